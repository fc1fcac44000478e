"""Mode exact through the engine: the output of mode ar in fewer passes, whatever is drafted.

The outputs come from a trained model, so that drafts are right often enough to matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_platform.checkpoint.directory import Checkpoint, load_model, read_checkpoint
from mars_platform.method import reference
from mars_platform.method.mode import Mode
from mars_serve.engine.adaptive.step_times import StepTimes
from mars_serve.engine.adaptive.window_choice import WindowChooser
from mars_serve.engine.batch import Row
from mars_serve.engine.decoding_options import DecodingOptions, FinishReason, Outcomes
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution.acceptance import unpack_coming
from mars_serve.engine.execution.forward import Launched
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import ScheduledRow
from mars_serve.engine.settings import EngineSettings
from mars_serve.measure.evaluation.items import read_items

MAX_TOKENS = 40
NUM_PROMPTS = 60
EXACT = DecodingOptions(MAX_TOKENS, Mode.EXACT)
LAYOUTS = {
    "free": EXACT,
    "all": replace(EXACT, outcomes=Outcomes.ALL),
    "last": replace(EXACT, outcomes=Outcomes.LAST),
    **{f"all {w}": replace(EXACT, outcomes=Outcomes.ALL, window=w) for w in (1, 2, 3)},
    **{f"last {w}": replace(EXACT, outcomes=Outcomes.LAST, window=w) for w in (1, 2, 3)},
    "no masks": replace(EXACT, window=0),
}
TIMES = StepTimes((1, 256), (0,), ((10.0,), (20.0,)))
"""Far above what steps take: the engine's own clock changes no choice."""
OTHERS = {
    "ar": DecodingOptions(MAX_TOKENS, Mode.AR),
    "threshold": DecodingOptions(MAX_TOKENS, threshold=0.9),
}

Cached = Callable[[PreTrainedModel, list[int]], tuple[Tensor, Tensor]]
Passes = dict[str, list[StepOutput]]


@pytest.fixture(scope="module")
def checkpoint(trained) -> Checkpoint:
    return read_checkpoint(trained.model)


@pytest.fixture(scope="module")
def prompts(trained, checkpoint: Checkpoint) -> list[list[int]]:
    file = trained.data / "eval.jsonl"
    items = read_items(
        [file], checkpoint.tokenizer, max_length=checkpoint.max_length, max_items=NUM_PROMPTS
    )
    return [list(item.prompt) for item in items]


@pytest.fixture(scope="module")
def model(trained) -> PreTrainedModel:
    return load_model(trained.model).eval()


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint) -> Engine:
    """Windows adapt; pages are tight enough for rows to be preempted at times."""
    engine = Engine(checkpoint, EngineSettings(max_num_seqs=12, num_pages=30))
    engine._chooser = WindowChooser(TIMES, engine.window)
    return engine


@pytest.fixture(scope="module")
def expected(
    model: PreTrainedModel, checkpoint: Checkpoint, prompts: list[list[int]]
) -> list[list[int]]:
    """Output of one-token decoding without cache or batch."""
    return [
        reference.decode(model, prompt, checkpoint.special, max_tokens=MAX_TOKENS).tokens
        for prompt in prompts
    ]


def output_of(request: Request) -> list[int]:
    return request.tokens[request.num_prompt :]


def run(engine: Engine, requests: list[Request]) -> Passes:
    passes = defaultdict[str, list[StepOutput]](list)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            passes[output.request_id].append(output)
        engine.check_integrity()
    assert engine.status().num_free_pages == engine.num_pages
    return passes


def test_every_layout_gives_the_output_of_mode_ar(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    kinds = {**LAYOUTS, **OTHERS}
    num_passes, num_tokens = defaultdict[str, int](int), defaultdict[str, int](int)
    for shift in range(0, len(kinds), 3):
        names = list(islice(cycle(kinds), shift, shift + len(prompts)))
        requests = [
            Request(str(index), list(prompt), kinds[name])
            for index, (name, prompt) in enumerate(zip(names, prompts, strict=True))
        ]
        passes = run(engine, requests)
        for request, name, tokens in zip(requests, names, expected, strict=True):
            if name != "threshold":
                assert output_of(request) == tokens, name
                num_passes[name] += len(passes[request.id])
                num_tokens[name] += len(tokens)
    assert engine.status().num_preemptions > 0
    per_pass = {name: num_tokens[name] / num_passes[name] for name in num_tokens}
    assert per_pass["ar"] == per_pass["no masks"] == 1.0
    assert min(per_pass[name] for name in ("free", "all", "last")) > 1.5
    assert 1.0 < per_pass["last 1"] < per_pass["all 1"] < per_pass["all 2"] < per_pass["all"]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_short_outputs_feed_no_mask_that_could_not_be_used(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]], max_tokens: int
) -> None:
    options = replace(LAYOUTS["all"], max_tokens=max_tokens)
    requests = [Request(str(i), list(prompt), options) for i, prompt in enumerate(prompts[:20])]
    passes = run(engine, requests)
    for request, tokens in zip(requests, expected, strict=False):
        assert output_of(request) == tokens[:max_tokens]
        assert request.finish_reason is FinishReason.LENGTH
        outputs, num_given = passes[request.id], 0
        for output in outputs:
            num_given += len(output.tokens)
            assert num_given <= max_tokens
        # a mask proposes what is checked in the next pass, behind a token that this one gives
        assert outputs[0].num_masks == min(max(0, max_tokens - 2), engine.window)


# What is fed


@pytest.mark.parametrize(
    ("num_tokens", "num_drafts", "masks"),
    [
        (1, 0, (0,)),
        (7, 0, (3,)),
        (3, 2, (2, 0, 1)),
        (1 + 4, 4, (4, 4, 4, 4, 4)),
        (1 + 4, 4, (0, 0, 0, 0, 4)),
        (6, 1, (3, 0)),
    ],
)
def test_what_each_place_of_a_row_sees(
    num_tokens: int, num_drafts: int, masks: tuple[int, ...]
) -> None:
    """Tokens and drafts what is before them; a mask the tokens, its drafts and its own group."""
    row = Row(0, 9, num_tokens, num_drafts, masks, [], reads_logits=True)
    leading, own = row.visible()
    groups = [group for group, count in enumerate(masks) for _ in range(count)]
    num_fixed = num_tokens - num_drafts
    for place in range(row.length):
        seen = {*range(leading[place]), *range(own[place], place + 1)}
        if place < num_tokens:
            assert seen == set(range(place + 1))
        else:
            group = groups[place - num_tokens]
            same = (i for i, other in enumerate(groups) if other == group)
            masks_before = {i + num_tokens for i in same if i + num_tokens <= place}
            assert seen == {*range(num_fixed + group), *masks_before}
    sees_all = all(leading[i] + (i + 1 - own[i]) >= i + 1 for i in range(row.length))
    assert row.is_causal == sees_all


def drafts_by_group(step: Launched) -> dict[str, list[list[int]]]:
    """Of each work of a step that reads logits, what each group of masks proposes."""
    works = [work for work in step.works if work.reads_logits]
    assert step.packed is not None
    num_coming = sum(work.num_masks for work in works)
    coming = iter(unpack_coming(step.packed, len(works), num_coming))
    return {
        work.request.id: [[draft.token for draft in islice(coming, n)] for n in work.masks]
        for work in works
    }


def plain_drafts(
    model: PreTrainedModel, checkpoint: Checkpoint, work: ScheduledRow, outcome: int
) -> list[int]:
    """The same of one group, from a pass over its prefix and its masks alone."""
    assert checkpoint.metadata is not None
    request, num_masks = work.request, work.masks[outcome]
    seen = [*request.tokens, *(draft.token for draft in request.drafts[:outcome])]
    ids = torch.tensor([seen + [checkpoint.metadata.mask_token_id] * num_masks])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(seen) :]  # [masks, vocabulary]
    logits[:, sorted(checkpoint.special.never_emitted)] = -torch.inf
    return logits.argmax(-1).tolist()


@pytest.mark.parametrize("name", ["all", "last", "free", "all 2"])
def test_each_group_proposes_what_a_plain_pass_does(
    engine: Engine,
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    prompts: list[list[int]],
    name: str,
) -> None:
    requests = [Request(str(i), list(prompts[i]), LAYOUTS[name]) for i in range(5)]
    for request in requests:
        engine.add(request)
    outcomes = set[int]()
    while engine.has_work:
        step = engine.begin_step()
        assert isinstance(step, Launched)
        found = drafts_by_group(step)
        for work in step.works:
            for outcome, drafts in enumerate(found[work.request.id]):
                if drafts:
                    assert drafts == plain_drafts(model, checkpoint, work, outcome)
                    outcomes.add(outcome)
        for output in engine.finish_step(step):
            coming = requests[int(output.request_id)].drafts
            # those of the group that saw the drafts that were right
            group = found[output.request_id][len(output.tokens) - 1]
            assert output.finish_reason or [draft.token for draft in coming] == group
    assert (2 if name == "all 2" else engine.window) in outcomes
    assert outcomes == set(range(max(outcomes) + 1)) or name in ("last", "free")


@pytest.mark.parametrize("name", ["all", "last", "free"])
def test_each_committed_token_is_fed_once(
    checkpoint: Checkpoint, prompts: list[list[int]], name: str
) -> None:
    engine = Engine(checkpoint, EngineSettings(max_num_seqs=4, num_pages=60))
    engine._chooser = WindowChooser(TIMES, engine.window)
    for prompt in prompts[:20]:
        request = Request("one", list(prompt), LAYOUTS[name])
        num_drafts, outputs = 0, list[StepOutput]()
        engine.add(request)
        while engine.has_work:
            stored_before = request.num_cached
            step = engine.begin_step()
            assert isinstance(step, Launched)
            [work] = step.works
            assert work.num_tokens == (
                1 if outputs else len(prompt) - request.num_prefix_hit_tokens
            )
            num_drafts += work.num_drafts
            outputs += engine.finish_step(step)
            num_right = len(outputs[-1].tokens) - 1
            if request.finish_reason is None:
                assert request.num_cached == len(request.tokens) - 1
                assert request.num_cached == stored_before + work.num_tokens + num_right
        num_fed = sum(output.num_positions - output.num_masks for output in outputs)
        num_refused = num_drafts - sum(len(output.tokens) - 1 for output in outputs[:-1])
        num_last = len(outputs[-1].tokens)
        num_committed = len(request.tokens) - request.num_prefix_hit_tokens
        # the last pass commits tokens that no pass feeds but, as drafts, itself
        assert num_fed == num_committed - num_last + num_refused


def test_what_is_stored_is_what_a_plain_pass_caches(
    model: PreTrainedModel, checkpoint: Checkpoint, prompts: list[list[int]], cached: Cached
) -> None:
    """Of accepted drafts, and where refused ones and masks were fed before."""
    engine = Engine(checkpoint, EngineSettings(max_num_seqs=4, num_pages=60))
    request = Request("one", list(prompts[0]), LAYOUTS["all"])
    engine.add(request)
    lengths = []
    while True:
        lengths += [len(output.tokens) for output in engine.step()]
        if request.finish_reason is not None:
            break
        keys, values = cached(model, request.tokens[: request.num_cached])
        for stored, plain in ((engine._attention.keys, keys), (engine._attention.values, values)):
            own = stored[:, request.pages].transpose(2, 3).flatten(1, 2)
            torch.testing.assert_close(own[:, : request.num_cached], plain, rtol=1e-4, atol=1e-4)
    assert max(lengths) > 1
    assert min(lengths[1:-1]) < engine.window + 1


def test_confidences_are_those_of_the_checked_tokens(
    engine: Engine, model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    request = Request("one", list(prompts[1]), LAYOUTS["all"])
    outputs = run(engine, [request])["one"]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([request.tokens])).logits[0]
    tokens = torch.tensor(output_of(request))
    shares = logits[request.num_prompt - 1 : -1].softmax(-1)  # [output, vocabulary]
    expected = shares.gather(-1, tokens[:, None])[:, 0].tolist()
    assert [c for output in outputs for c in output.confidences] == pytest.approx(
        expected, abs=1e-4
    )
