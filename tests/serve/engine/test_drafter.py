"""A second model that drafts; the output is the target's own, whatever it proposes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conftest import Trained

from decoding.engines import run as run_requests
from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.errors import UserError
from mars_platform.method.live import LiveDecoding
from mars_platform.method.mode import Mode
from mars_serve.config.settings import DraftSettings, ModelSettings
from mars_serve.engine.decoding_options import (
    DecodingOptions,
    FinishReason,
    GrammarKind,
    GrammarSpec,
    Outcomes,
    Sampling,
    Span,
    Spans,
)
from mars_serve.engine.drafting.drafter import Drafter, drafting_checkpoint
from mars_serve.engine.engine import Engine
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings
from mars_serve.measure.evaluation.items import EvalItem, read_items
from mars_serve.replica.loading import load_engine

BATCH, MAX_TOKENS, NUM_DRAFTS = 6, 30, 5
AR = DecodingOptions(MAX_TOKENS, Mode.AR, 1.0)
EXACT = DecodingOptions(MAX_TOKENS, Mode.EXACT, 1.0)
THRESHOLD = DecodingOptions(MAX_TOKENS, Mode.THRESHOLD, 0.9)
SIZES = EngineSettings(max_num_seqs=BATCH, num_pages=BATCH * 12)


@pytest.fixture(scope="module")
def target(trained: Trained) -> Checkpoint:
    return read_checkpoint(str(trained.model))


@pytest.fixture(scope="module")
def items(trained: Trained, target: Checkpoint) -> list[EvalItem]:
    path = trained.data / "eval.jsonl"
    return read_items([path], target.tokenizer, max_length=target.max_length, max_items=18)


def make_drafter(path: Path, target: Checkpoint, **sizes: int) -> Drafter:
    settings = SIZES.model_copy(update={"enable_prefix_caching": False, **sizes})
    draft = drafting_checkpoint(read_checkpoint(str(path)), target)
    return Drafter(Engine(draft, settings), NUM_DRAFTS)


def run(
    engine: Engine, items: list[EvalItem], options: list[DecodingOptions]
) -> tuple[list[list[int]], list[StepOutput]]:
    requests = [
        Request(str(index), list(item.prompt), options[index % len(options)])
        for index, item in enumerate(items)
    ]
    outputs = [output for each in run_requests(engine, requests).values() for output in each]
    assert all(output.error is None for output in outputs)
    return [request.tokens[request.num_prompt :] for request in requests], outputs


def tokens_per_forward(outputs: list[StepOutput]) -> float:
    return sum(len(output.tokens) for output in outputs) / len(outputs)


@pytest.fixture(scope="module")
def expected(target: Checkpoint, items: list[EvalItem]) -> list[list[int]]:
    return run(Engine(target, SIZES), items, [AR])[0]


@pytest.fixture(scope="module", params=["plain AR", "MARS"])
def engine(request: pytest.FixtureRequest, trained: Trained, target: Checkpoint) -> Engine:
    path = trained.ar_model if request.param == "plain AR" else trained.model
    made = Engine(target, SIZES, drafter=make_drafter(path, target))
    made.warm_up()
    return made


@pytest.mark.parametrize(
    "options",
    [
        EXACT,
        replace(EXACT, window=0),  # no masks of its own: ordinary speculative decoding
        replace(EXACT, outcomes=Outcomes.ALL),
        replace(EXACT, outcomes=Outcomes.LAST, window=2),
    ],
)
def test_exact_output_is_the_targets(
    engine: Engine, items: list[EvalItem], expected: list[list[int]], options: DecodingOptions
) -> None:
    outputs, steps = run(engine, items, [options])
    assert outputs == expected
    # How many masks and drafts the engine chooses itself follows from step times, and so from what
    # else the machine does; the other layouts are the same in every run.
    assert tokens_per_forward(steps) > (1.5 if options is EXACT else 2)


def test_all_modes_side_by_side(
    engine: Engine, items: list[EvalItem], expected: list[list[int]]
) -> None:
    sampled = replace(EXACT, sampling=Sampling(0.8, top_p=0.9, seed=5))
    modes = [EXACT, AR, THRESHOLD, sampled]
    outputs, _ = run(engine, items, modes)
    alone, _ = run(engine, items, [AR, AR, AR, replace(sampled, mode=Mode.AR)])
    for index, (output, other) in enumerate(zip(outputs, alone, strict=True)):
        assert modes[index % 4] is THRESHOLD or output == other
    assert alone[1] == expected[1]


def test_masks_behind_drafts_add_tokens(engine: Engine, items: list[EvalItem]) -> None:
    with_masks, without = (
        tokens_per_forward(run(engine, items, [replace(THRESHOLD, window=window)])[1])
        for window in (4, 0)
    )
    assert with_masks > without + 0.2


def test_a_live_threshold_of_one_is_drafted_for_without_loss(
    engine: Engine, items: list[EvalItem], expected: list[list[int]]
) -> None:
    live = replace(THRESHOLD, threshold=None, window=4)
    engine.live = LiveDecoding(1.0)
    outputs, steps = run(engine, items, [live])
    assert outputs == expected
    assert tokens_per_forward(steps) > 2
    assert all(step.num_masks == 0 for step in steps)
    engine.live = LiveDecoding(0.9)
    followed, pinned = (run(engine, items, [replace(live, threshold=t)]) for t in (None, 0.9))
    assert followed[0] == pinned[0]
    assert any(step.num_masks for step in followed[1])


def test_threshold_without_masks_is_exact(
    engine: Engine, items: list[EvalItem], expected: list[list[int]]
) -> None:
    assert run(engine, items, [replace(THRESHOLD, window=0)])[0] == expected


def test_a_run_ends_behind_a_marker_and_goes_on_without_loss(
    engine: Engine, items: list[EvalItem], expected: list[list[int]]
) -> None:
    (marker, _), *_ = Counter(token for output in expected for token in output).most_common()
    markers = {Span.ANSWER: {marker: Span.THINKING}, Span.THINKING: {marker: Span.ANSWER}}
    spans = Spans(Span.ANSWER, markers, dict.fromkeys(Span, 1.0))
    outputs, steps = run(engine, items, [replace(THRESHOLD, threshold=None, spans=spans)])
    assert outputs == expected
    assert not any(marker in step.tokens[:-1] for step in steps)
    assert tokens_per_forward(steps) > 1.2


def test_what_depends_on_the_tokens_before_is_checked(
    engine: Engine, items: list[EvalItem]
) -> None:
    regex = GrammarSpec(GrammarKind.REGEX, "[0-9]{3,9}")
    penalty = Sampling(0.7, repetition_penalty=1.4, seed=3)
    for options in (replace(THRESHOLD, grammar=regex), replace(THRESHOLD, sampling=penalty)):
        outputs, steps = run(engine, items, [options])
        assert outputs == run(engine, items, [replace(options, mode=Mode.AR)])[0]
        assert all(step.num_masks == 0 for step in steps)


def test_a_small_pool_preempts_shadows(
    trained: Trained, target: Checkpoint, items: list[EvalItem], expected: list[list[int]]
) -> None:
    drafter = make_drafter(trained.model, target, num_pages=8)
    engine = Engine(target, SIZES.model_copy(update={"num_pages": 12}), drafter=drafter)
    assert run(engine, items, [EXACT])[0] == expected
    assert engine.status().num_preemptions > 0
    assert drafter._engine.status().num_preemptions > 0
    assert not drafter._engine.has_work


def test_cancelled_requests_leave_no_shadow(
    trained: Trained, target: Checkpoint, items: list[EvalItem]
) -> None:
    drafter = make_drafter(trained.model, target)
    engine = Engine(target, SIZES, drafter=drafter)
    request = Request("one", list(items[0].prompt), EXACT)
    engine.add(request)
    engine.step()
    engine.step()
    assert drafter._engine.has_work
    engine.cancel("one")
    assert request.finish_reason is FinishReason.CANCELLED
    assert not drafter._engine.has_work


def test_a_plain_target_is_drafted_for(
    trained: Trained, target: Checkpoint, items: list[EvalItem]
) -> None:
    draft = DraftSettings(path=str(trained.model), num_tokens=4)
    model = ModelSettings(name="ar", path=str(trained.ar_model), engine=SIZES, draft=draft)
    engine = load_engine(model)
    outputs, steps = run(engine, items, [EXACT])
    assert outputs == run(engine, items, [AR])[0]
    assert tokens_per_forward(steps) > 2


def test_another_tokenizer_is_refused(target: Checkpoint, mars_dir: Path) -> None:
    with pytest.raises(UserError, match=r"draft\.path: .* another tokenizer"):
        drafting_checkpoint(read_checkpoint(str(mars_dir)), target)
