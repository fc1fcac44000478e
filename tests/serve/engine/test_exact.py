"""Mode exact through the engine: the output of mode ar in fewer passes, whatever is drafted.

The outputs come from a trained model, so that drafts are right often enough to matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.engines import output_of, run
from mars_autoscale.model.step_times import StepTimes
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.method import reference
from mars_platform.method.mode import Mode
from mars_serve.engine.batch import BatchRow, StepBatch
from mars_serve.engine.decoding_options import DecodingOptions, Outcomes
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution.forward import Launched
from mars_serve.engine.execution.graphs import ForwardOutput
from mars_serve.engine.execution.proposals import unpack
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import ScheduledRow
from mars_serve.engine.settings import EngineSettings

MAX_TOKENS = 40
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
"""Times far above those of the steps here, so that the engine's own clock changes no choice."""
OTHERS = {
    "ar": DecodingOptions(MAX_TOKENS, Mode.AR),
    "threshold": DecodingOptions(MAX_TOKENS, threshold=0.9),
}

Cached = Callable[[PreTrainedModel, list[int]], tuple[Tensor, Tensor]]


@pytest.fixture(scope="module", params=[0, 16], ids=["masks alone", "with lookup drafts"])
def engine(checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Engine:
    """An engine that adapts windows, with so few pages that requests are preempted at times."""
    settings = EngineSettings(max_num_seqs=12, num_pages=30, num_lookup_drafts=request.param)
    engine = Engine(checkpoint, settings)
    engine.adapt_windows(TIMES)
    return engine


@pytest.fixture(scope="module")
def expected(
    model: PreTrainedModel, checkpoint: Checkpoint, prompts: list[list[int]]
) -> list[list[int]]:
    """Outputs of one-token decoding without cache or batch."""
    return [
        reference.decode(model, prompt, checkpoint.special, max_tokens=MAX_TOKENS).tokens
        for prompt in prompts
    ]


def test_every_layout_gives_the_output_of_mode_ar(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    kinds = {**LAYOUTS, **OTHERS}
    num_passes, num_tokens = defaultdict[str, int](int), defaultdict[str, int](int)
    for shift in range(0, len(kinds), 4):
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


# Fed positions


def test_steps_are_padded_by_a_sixteenth_at_most(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, padding = engine._runner._forward, list[float]()

    def note(batch: StepBatch, *others: Any) -> ForwardOutput:
        padding.append(len(batch.ids) / batch.num_positions - 1.0)
        return forward(batch, *others)

    monkeypatch.setattr(engine._runner, "_forward", note)
    run(engine, [Request(str(i), list(prompt), EXACT) for i, prompt in enumerate(prompts)])
    assert 0.0 < max(padding) <= 1 / 16


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
def test_each_position_of_a_row_sees_its_prefix_and_its_group(
    num_tokens: int, num_drafts: int, masks: tuple[int, ...]
) -> None:
    """Tokens and drafts are causal; a mask sees the tokens, its drafts and its own group."""
    row = BatchRow(
        start=0,
        num_cached=9,
        num_tokens=num_tokens,
        num_drafts=num_drafts,
        masks=masks,
        pages=[],
        reads_logits=True,
    )
    leading, own = row.visible()
    groups = [group for group, count in enumerate(masks) for _ in range(count)]
    num_fixed = num_tokens - num_drafts
    for position in range(row.length):
        seen = {*range(leading[position]), *range(own[position], position + 1)}
        if position < num_tokens:
            assert seen == set(range(position + 1))
        else:
            group = groups[position - num_tokens]
            same = (i for i, other in enumerate(groups) if other == group)
            masks_before = {i + num_tokens for i in same if i + num_tokens <= position}
            assert seen == {*range(num_fixed + group), *masks_before}
    sees_all = all(leading[i] + (i + 1 - own[i]) >= i + 1 for i in range(row.length))
    assert row.is_causal == sees_all


def drafts_by_group(step: Launched) -> dict[str, list[list[int]]]:
    """Tokens that each group of masks proposes, by the id of its request."""
    assert step.proposals is not None
    tokens, found = iter(unpack(step.proposals.wait())[0]), {}
    for row in step.rows:
        if row.reads_logits:
            list(islice(tokens, row.num_proposed))  # those that check the drafts
            found[row.request.id] = [list(islice(tokens, count)) for count in row.masks]
    return found


def plain_drafts(
    model: PreTrainedModel, checkpoint: Checkpoint, row: ScheduledRow, outcome: int
) -> list[int]:
    """Tokens that one group proposes in a plain pass over its prefix and its masks alone."""
    assert checkpoint.metadata is not None
    request, num_masks = row.request, row.masks[outcome]
    seen = [*request.tokens, *(draft.token for draft in request.drafts[:outcome])]
    ids = torch.tensor([seen + [checkpoint.metadata.mask_token_id] * num_masks])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(seen) :]  # [masks, vocabulary]
    logits[:, sorted(checkpoint.special.never_emitted)] = -torch.inf
    return logits.argmax(-1).tolist()


@pytest.mark.parametrize("name", ["all", "last", "all 2"])
def test_each_group_proposes_what_a_plain_pass_does(
    engine: Engine,
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    prompts: list[list[int]],
    name: str,
) -> None:
    requests = [Request(str(i), list(prompts[i]), LAYOUTS[name]) for i in range(3)]
    for request in requests:
        engine.add(request)
    outcomes, eos = set[int](), checkpoint.special.eos
    while engine.has_work:
        step = engine.begin_step()
        assert isinstance(step, Launched)
        found = drafts_by_group(step)
        for row in step.rows:
            for outcome, drafts in enumerate(found[row.request.id]):
                if drafts:
                    assert drafts == plain_drafts(model, checkpoint, row, outcome)
                    outcomes.add(outcome)
        for output in engine.finish_step(step):
            drafts = requests[int(output.request_id)].drafts
            group = found[output.request_id][len(output.tokens) - 1]  # it saw the right drafts
            end = next((i for i, token in enumerate(group, 1) if token in eos), None)
            num_own = requests[int(output.request_id)].num_own_drafts
            own = [draft.token for draft in drafts[:num_own]]
            assert output.finish_reason or own == group[:end] or (not own and drafts)
    assert (2 if name == "all 2" else engine.window) in outcomes
    assert outcomes == set(range(max(outcomes) + 1)) or name in ("last", "free")


@pytest.mark.parametrize("name", ["all", "last", "free"])
def test_each_committed_token_is_fed_once(
    checkpoint: Checkpoint, prompts: list[list[int]], name: str
) -> None:
    engine = Engine(checkpoint, EngineSettings(max_num_seqs=4, num_pages=60))
    engine.adapt_windows(TIMES)
    for prompt in prompts[:8]:
        request = Request("one", list(prompt), LAYOUTS[name])
        num_drafts, outputs = 0, list[StepOutput]()
        engine.add(request)
        while engine.has_work:
            cached_before = request.num_cached
            step = engine.begin_step()
            assert isinstance(step, Launched)
            [row] = step.rows
            assert row.num_tokens == (1 if outputs else len(prompt) - request.num_prefix_hit_tokens)
            num_drafts += row.num_drafts
            outputs += engine.finish_step(step)
            num_right = len(outputs[-1].tokens) - 1
            if request.finish_reason is None:
                assert request.num_cached == len(request.tokens) - 1
                assert request.num_cached == cached_before + row.num_tokens + num_right
        num_fed = sum(output.num_positions - output.num_masks for output in outputs)
        num_refused = num_drafts - sum(len(output.tokens) - 1 for output in outputs[:-1])
        num_last = len(outputs[-1].tokens)
        num_committed = len(request.tokens) - request.num_prefix_hit_tokens
        # The tokens of the last pass are fed by no other pass, and by that one only as drafts.
        assert num_fed == num_committed - num_last + num_refused


def test_cached_keys_and_values_are_those_of_a_plain_pass(
    model: PreTrainedModel, checkpoint: Checkpoint, prompts: list[list[int]], cached: Cached
) -> None:
    """This includes accepted drafts, and slots that held refused drafts before."""
    engine = Engine(checkpoint, EngineSettings(max_num_seqs=4, num_pages=60))
    attention: Any = engine.attention
    request = Request("one", list(prompts[0]), LAYOUTS["all"])
    engine.add(request)
    lengths = []
    while True:
        lengths += [len(output.tokens) for output in engine.step()]
        if request.finish_reason is not None:
            break
        keys, values = cached(model, request.tokens[: request.num_cached])
        for part, plain in ((attention.keys, keys), (attention.values, values)):
            own = part[:, request.pages].transpose(2, 3).flatten(1, 2)
            torch.testing.assert_close(own[:, : request.num_cached], plain, rtol=1e-4, atol=1e-4)
    assert max(lengths) > 1
    assert min(lengths[1:-1]) < engine.window + 1


def test_confidences_are_those_of_the_verified_tokens(
    engine: Engine, model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    options = replace(LAYOUTS["all"], reports_rejected=True)
    request = Request("one", list(prompts[1]), options)
    outputs = run(engine, [request])["one"]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([request.tokens])).logits[0]
    tokens = torch.tensor(output_of(request))
    shares = logits[request.num_prompt - 1 : -1].softmax(-1)  # [output, vocabulary]
    expected = shares.gather(-1, tokens[:, None])[:, 0].tolist()
    assert [c for output in outputs for c in output.confidences] == pytest.approx(
        expected, abs=1e-4
    )
