"""A τ that changes while requests run, live or from span to span, and what each pass uses."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

import pytest
from transformers import PreTrainedModel

from decoding.engines import Engines, Models, Outputs
from mars_autoscale.model.step_times import StepTimes
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.errors import UserError
from mars_platform.method import reference
from mars_platform.method.mode import Confidence, LiveDecoding, Mode
from mars_platform.tier import Tier
from mars_serve.engine.decoding_options import DecodingOptions, Span, Spans
from mars_serve.engine.engine import Engine
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request

PAD, MASK, BLOCK_SIZE = 0, 3, 4
SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({PAD, MASK}))
LIVE = DecodingOptions(24, threshold=None)


@pytest.fixture
def model(tiny_model: Models) -> PreTrainedModel:
    return tiny_model("qwen2")


def requests_with(options: DecodingOptions, count: int = 5, name: str = "r") -> list[Request]:
    source = random.Random(1)
    prompts = [[source.randrange(4, 64) for _ in range(3 + 20 * i)] for i in range(count)]
    return [Request(f"{name}{i}", prompt, options) for i, prompt in enumerate(prompts)]


def run(
    engine: Engine, requests: list[Request], live: Iterable[float | LiveDecoding] = ()
) -> Outputs:
    """Run requests, each step with the next entry of ``live``; the last entry stays."""
    outputs = defaultdict[str, list[StepOutput]](list)
    changes = (each if isinstance(each, LiveDecoding) else LiveDecoding(each) for each in live)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.live = next(changes, engine.live)
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    return outputs


def replayed(
    model: PreTrainedModel, request: Request, outputs: list[StepOutput]
) -> list[list[int]]:
    """Decode plainly with the thresholds and windows that the engine reported."""
    return reference.decode(
        model,
        request.tokens[: request.num_prompt],
        SPECIAL,
        max_tokens=request.options.max_tokens,
        threshold=[output.threshold for output in outputs],
        num_masks=[output.num_masks for output in outputs],
        mask_token_id=MASK,
        measure=request.options.confidence,
    ).passes


@pytest.mark.parametrize("threshold", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("confidence", list(Confidence))
def test_a_live_threshold_that_stays_is_a_pinned_one(
    model: PreTrainedModel, make_engine: Engines, threshold: float, confidence: Confidence
) -> None:
    pinned, live = (
        run(
            make_engine(model, SPECIAL),
            requests_with(replace(LIVE, threshold=value, confidence=confidence)),
            [threshold],
        )
        for value in (threshold, None)
    )
    assert pinned == live
    assert {output.threshold for each in live.values() for output in each} == {threshold}


TRACE = [0.05] * 4 + [1.0] * 3 + [0.1] * 3 + [0.02]


@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_passes_are_those_of_the_thresholds_that_they_report_down_to_the_floor(
    model: PreTrainedModel, make_engine: Engines, floor: float
) -> None:
    requests = requests_with(replace(LIVE, min_threshold=floor))
    outputs = run(make_engine(model, SPECIAL), requests, TRACE)
    for request in requests:
        found = outputs[request.id]
        assert [output.tokens for output in found] == replayed(model, request, found)
    first = outputs["r0"]
    expected = [max(value, floor) for value in TRACE]
    assert [output.threshold for output in first[: len(TRACE)]] == expected[: len(first)]
    assert floor or any(len(output.tokens) > 1 for output in first[:4])


def test_masks_end_and_return_with_the_very_next_step(
    model: PreTrainedModel, make_engine: Engines
) -> None:
    outputs = run(make_engine(model, SPECIAL), requests_with(LIVE, 1), [1.0, 0.9, 1.0, 0.9, 1.0])
    masks = [output.num_masks for output in outputs["r0"][:5]]
    assert masks == [0, BLOCK_SIZE, 0, BLOCK_SIZE, 0]


def test_an_engine_that_adapts_windows_feeds_masks_at_once(
    model: PreTrainedModel, make_engine: Engines
) -> None:
    engine = make_engine(model, SPECIAL)
    flat = StepTimes((1, 64), (0, 1), ((1e-4, 1e-4), (1e-4, 1e-4)))
    engine.adapt_windows(flat)
    neighbours = requests_with(replace(LIVE, threshold=0.9), 1, "pinned")  # choices are kept
    outputs = run(engine, requests_with(LIVE, 1) + neighbours, [1.0, 1.0, 0.9, 0.9, 1.0])
    assert [output.num_masks > 0 for output in outputs["r0"][:5]] == [0, 0, 1, 1, 0]


@pytest.mark.parametrize("mode", [Mode.AR, Mode.EXACT])
def test_lossless_modes_follow_neither_a_live_threshold_nor_spans(
    model: PreTrainedModel, make_engine: Engines, mode: Mode
) -> None:
    _, options = spans_with(make_engine(model, SPECIAL), thinking=0.05)
    options = replace(options, mode=mode)
    still = run(make_engine(model, SPECIAL), requests_with(replace(options, spans=None)))
    moved = run(make_engine(model, SPECIAL), requests_with(options), TRACE)
    assert still == moved
    assert {output.threshold for outputs in moved.values() for output in outputs} == {1.0}


def test_exact_may_stand_in_for_one_at_any_step(
    model: PreTrainedModel, make_engine: Engines
) -> None:
    requests = requests_with(LIVE)
    expected = run(make_engine(model, SPECIAL), requests_with(LIVE), [1.0])
    exact = LiveDecoding(1.0, is_exact=True)
    moves = [exact] * 4 + [LiveDecoding(1.0)] * 2 + [exact] * 3 + [LiveDecoding(1.0)] + [exact]
    outputs = run(make_engine(model, SPECIAL), requests, moves)
    for name, steps in outputs.items():
        assert joined(steps) == joined(expected[name])
        assert {step.threshold for step in steps} == {1.0}
    masks = [step.num_masks > 0 for step in outputs["r0"][:10]]
    assert masks == [True] * 4 + [False] * 2 + [True] * 3 + [False]


def test_exact_gives_way_to_a_lower_threshold(model: PreTrainedModel, make_engine: Engines) -> None:
    options = replace(LIVE, window=BLOCK_SIZE)
    low = LiveDecoding(0.05, is_exact=True)
    moved = run(make_engine(model, SPECIAL), requests_with(options), [low])
    assert moved == run(make_engine(model, SPECIAL), requests_with(options), [0.05])


def test_requests_of_low_priority_have_a_threshold_of_their_own(
    model: PreTrainedModel, make_engine: Engines
) -> None:
    default, flex = requests_with(LIVE, 2)
    flex.options = replace(LIVE, tier=Tier.FLEX, min_threshold=0.3)
    engine = make_engine(model, SPECIAL)
    outputs = run(engine, [default, flex], [LiveDecoding(0.9, flex_threshold=0.1)])
    assert {step.threshold for step in outputs["r0"]} == {0.9}
    assert {step.threshold for step in outputs["r1"]} == {0.3}


def joined(steps: list[StepOutput]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def test_a_step_keeps_the_threshold_that_it_began_with(
    model: PreTrainedModel, make_engine: Engines
) -> None:
    engine = make_engine(model, SPECIAL)
    engine.live = LiveDecoding(0.02)
    engine.add(requests_with(LIVE, 1)[0])
    step = engine.begin_step()
    engine.live = LiveDecoding(1.0)
    late = requests_with(LIVE, 1, "late")[0]
    engine.add(late)
    (output,) = engine.finish_step(step)
    assert (output.threshold, output.num_masks) == (0.02, BLOCK_SIZE)
    assert {output.threshold for output in engine.step()} == {1.0}


# --- spans ----------------------------------------------------------------------------------------


def spans_with(engine: Engine, **thresholds: float) -> tuple[Spans, DecodingOptions]:
    """Return spans whose markers are the tokens that the model writes most at a low τ."""
    options = replace(LIVE, max_tokens=40)
    run(engine, written := requests_with(options), [0.05])
    counts = Counter(each for request in written for each in request.tokens[request.num_prompt :])
    (begin, _), (end, _), *_ = counts.most_common()
    markers = {Span.ANSWER: {begin: Span.THINKING}, Span.THINKING: {end: Span.ANSWER}}
    own = {Span(name): value for name, value in thresholds.items()}
    spans = Spans(Span.ANSWER, markers, own)
    return spans, replace(options, spans=spans)


def check_spans(
    model: PreTrainedModel, request: Request, outputs: list[StepOutput], spans: Spans
) -> set[Span]:
    """Compare each pass with one of the plain decoder, cut behind the first marker.

    Returns:
        The spans that occurred.
    """
    tokens, span, seen = request.tokens[: request.num_prompt], spans.start, set[Span]()
    for output in outputs:
        assert output.threshold == spans.thresholds[span]
        (plain, *_) = reference.decode(
            model,
            tokens,
            SPECIAL,
            max_tokens=min(len(request.tokens) - len(tokens), output.num_masks + 1),
            threshold=output.threshold,
            num_masks=output.num_masks,
            mask_token_id=MASK,
        ).passes
        marker = next((i for i, each in enumerate(plain) if each in spans.markers[span]), None)
        assert output.tokens == (plain if marker is None else plain[: marker + 1])
        seen.add(span)
        tokens, span = tokens + output.tokens, spans.of_tokens(span, output.tokens)[-1]
    assert tokens == request.tokens
    return seen


@pytest.mark.parametrize(("thinking", "answer"), [(0.05, 1.0), (1.0, 0.05), (0.05, 0.02)])
def test_each_span_is_decoded_at_its_threshold(
    model: PreTrainedModel, make_engine: Engines, thinking: float, answer: float
) -> None:
    spans, options = spans_with(make_engine(model, SPECIAL), thinking=thinking, answer=answer)
    requests, pinned = requests_with(options, 3), replace(LIVE, threshold=0.1)
    outputs = run(make_engine(model, SPECIAL), requests + requests_with(pinned, 2, "n"))
    seen = {span for each in requests for span in check_spans(model, each, outputs[each.id], spans)}
    assert seen == {Span.THINKING, Span.ANSWER}
    alone = run(make_engine(model, SPECIAL), requests_with(pinned, 2, "n"))
    assert all(joined(outputs[name]) == joined(each) for name, each in alone.items())


def test_a_span_without_a_threshold_follows_the_live_one_down_to_the_floor(
    model: PreTrainedModel, make_engine: Engines
) -> None:
    spans, options = spans_with(make_engine(model, SPECIAL), thinking=1.0)
    requests = requests_with(replace(options, min_threshold=0.1))
    outputs = run(make_engine(model, SPECIAL), requests, [0.05])
    for request in requests:
        span = spans.start
        for output in outputs[request.id]:
            assert output.threshold == (1.0 if span is Span.THINKING else 0.1)
            span = spans.of_tokens(span, output.tokens)[-1]
    assert {output.threshold for each in outputs.values() for output in each} == {0.1, 1.0}


def test_exact_stands_in_for_a_live_one_in_its_spans_alone(
    model: PreTrainedModel, make_engine: Engines
) -> None:
    spans, options = spans_with(make_engine(model, SPECIAL), thinking=1.0)
    expected = run(make_engine(model, SPECIAL), requests_with(replace(options, spans=None)), [1.0])
    exact, requests = LiveDecoding(1.0, is_exact=True), requests_with(options)
    outputs = run(make_engine(model, SPECIAL), requests, [exact])
    for request in requests:
        assert joined(outputs[request.id]) == joined(expected[request.id])
        span = spans.start
        for output in outputs[request.id]:
            assert output.num_masks == 0 or span is Span.ANSWER
            span = spans.of_tokens(span, output.tokens)[-1]


def test_a_plain_model_refuses_to_follow(model: PreTrainedModel, make_engine: Engines) -> None:
    engine = make_engine(model, SPECIAL, block_size=None)
    with pytest.raises(UserError, match="mode: this model is a plain AR checkpoint"):
        engine.check(requests_with(LIVE, 1)[0])
