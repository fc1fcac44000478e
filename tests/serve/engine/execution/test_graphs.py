"""Replayed steps give the logits of eager ones, whatever ran on their addresses before."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from decoding.engine_requests import make_request, make_row
from decoding.engines import Engines, Models, oracle, paged_attention, passes_of, run
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.method.mode import Confidence, Mode
from mars_platform.mixing.bind import ATTENTION_NAME
from mars_serve.engine.attention.interface import LayerGroup
from mars_serve.engine.attention.plan import StepShape, cached_pages
from mars_serve.engine.attention.selection import why_gathered
from mars_serve.engine.batch import StepBatch, build_batch
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution.graphs import CudaCapture, EagerForward, GraphedForward, GraphSizes
from mars_serve.engine.execution.proposals import Reads, build_reads, propose
from mars_serve.engine.request import Draft, Request
from mars_serve.engine.settings import EngineSettings

MASK, NUM_MASKS = 3, 4
SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, MASK}))
BANNED = torch.tensor(sorted(SPECIAL.never_emitted))
MEASURES = tuple(Confidence)
PAGE, NUM_PAGES, MAX_ROWS = 4, 120, 5
SIZES = GraphSizes(
    max_rows=MAX_ROWS, max_row_length=2 * NUM_MASKS + 1, max_num_batched_tokens=65, max_pages=40
)


class CountingCapture:
    """Stands in for a capture: calls functions again, and counts these calls."""

    def __init__(self) -> None:
        self.num_captured = self.num_replayed = 0

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1
        function()

        def replay() -> None:
            self.num_replayed += 1
            function()

        return replay


@dataclass(frozen=True)
class Fed:
    """Layout of a step and its reads."""

    batch: StepBatch
    reads: Reads | None


def graphed_engine(make_engine: Engines, model: PreTrainedModel, capture: Any) -> Engine:
    """An engine whose decoding steps are captured."""
    sizes = {"num_pages": NUM_PAGES, "page_size": PAGE, "max_num_seqs": MAX_ROWS}
    engine_class = partial(Engine, attention_of=paged_attention)
    engine = make_engine(model, SPECIAL, engine_class=engine_class, **sizes)
    engine.capture_graphs(capture)
    return engine


class Pair:
    """Two copies of a model, one run eagerly and one from fixed addresses."""

    def __init__(self, model: PreTrainedModel, capture: Any, **options: Any) -> None:
        models = [copy.deepcopy(model) for _ in range(2)]  # each forward takes over its own
        sizes = {"page_size": PAGE, "num_pages": NUM_PAGES, **options}
        self.attentions = [paged_attention(each, **sizes) for each in models]
        for each in models:
            each.set_attn_implementation(ATTENTION_NAME)
        self.eager = EagerForward(models[0], self.attentions[0])
        self.graphed = GraphedForward(models[1], self.attentions[1], BANNED.to(model.device))
        self.graphed.capture(SIZES, capture)

    @torch.inference_mode()
    def assert_equal(self, fed: Fed, tolerance: float = 1e-5) -> None:
        batch, reads = fed.batch, fed.reads
        expected, found = self.eager(batch, reads, ()), self.graphed(batch, reads, ())
        close = {"rtol": tolerance, "atol": tolerance}
        if reads is not None:
            torch.testing.assert_close(found.logits, expected.logits, **close)
            assert found.reads is not None
            assert found.proposals is not None
            own = propose(found.logits.clone(), found.reads, BANNED.to(found.logits.device))
            assert found.proposals.equal(own) or tolerance > 1e-3
        for kind in ("keys", "values"):
            eager, graphed = (getattr(each, kind)[:, :-1] for each in self.attentions)
            torch.testing.assert_close(graphed, eager, **close)


def feed(
    requests: list[Request],
    rows: list[tuple[int, int, bool]],
    temperatures: list[float] | None = None,
) -> Fed:
    """A step of rows of (tokens, masks, reads logits); the tokens are then counted as cached."""
    scheduled = [
        make_row(request, tokens, (masks,), reads_logits=reads)
        for request, (tokens, masks, reads) in zip(requests, rows, strict=False)
        if tokens
    ]
    batch = build_batch(scheduled, MASK)
    for row in scheduled:
        row.request.num_cached += row.num_tokens
    reading = [row for row in scheduled if row.reads_logits]
    return Fed(batch, build_reads(reading, temperatures) if reading else None)


def new_requests(num_pages: int = 24) -> list[Request]:
    source, requests = random.Random(0), []
    for index in range(MAX_ROWS):
        tokens = [source.randrange(4, 60) for _ in range(num_pages * PAGE)]
        pages = list(range(num_pages * index, num_pages * (index + 1)))
        requests.append(make_request(str(index), tokens, pages=pages))
    return requests


# Logits


def test_logits_equal_eager_ones_after_larger_and_smaller_steps(tiny_model: Models) -> None:
    capture = CountingCapture()
    pair, requests, source = Pair(tiny_model("qwen2"), capture), new_requests(), random.Random(1)
    for request in requests[:2]:  # two rows with many cached tokens, three without any
        pair.assert_equal(feed([request], [(38, 0, False)]))
    for _ in range(40):
        rows = [
            (source.choice([0, 1, 1, 2]), source.randint(0, NUM_MASKS), source.random() < 0.8)
            for _ in requests
        ]
        rows[source.randrange(MAX_ROWS)] = (1, 1, True)
        pair.assert_equal(feed(requests, rows))
    assert capture.num_replayed == 42


def test_steps_that_fit_no_shape_run_eagerly(tiny_model: Models) -> None:
    capture = CountingCapture()
    pair, requests = Pair(tiny_model("qwen2"), capture), new_requests()
    pair.assert_equal(feed(requests, [(45, 0, True), (2, 3, True)]))  # too many positions
    assert capture.num_replayed == 0
    pair.assert_equal(feed(requests, [(28, 0, True), (2, 3, True)]))
    assert capture.num_replayed == 1


def test_calibrated_rows_are_measured_at_their_temperatures(tiny_model: Models) -> None:
    pair, requests = Pair(tiny_model("qwen3"), CountingCapture()), new_requests()
    for index, request in enumerate(requests[:3]):
        options = replace(request.options, calibrated=index > 0, confidence=MEASURES[index])
        request.options = options
    temperatures = [1.0, 2.0, 0.5, 1.5, 3.0]
    for tokens in (1, 20):  # by a graph, and eagerly
        pair.assert_equal(feed(requests, [(tokens, 4, True)] * 3, temperatures))


def test_capturing_leaves_the_pages_alone(tiny_model: Models) -> None:
    capture, seen = CountingCapture(), []
    pair = Pair(tiny_model("qwen2"), capture)
    assert pair.attentions[1].keys[:, :-1].abs().sum() == 0
    pair.graphed.capture(SIZES, capture, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, len(SIZES.shapes())) for done in range(1, len(SIZES.shapes()) + 1)]


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_engine_passes_equal_oracle(tiny_model: Models, make_engine: Engines, family: str) -> None:
    model, capture, source = tiny_model(family), CountingCapture(), random.Random(2)
    engine = graphed_engine(make_engine, model, capture)
    requests = [
        make_request(
            str(index),
            source.choice([2, 9, 80]),
            source.randint(1, 15),
            threshold=source.choice([0.05, 0.3, 1.0]),
        )
        for index in range(12)
    ]
    passes = passes_of(run(engine, requests))
    for request in requests:
        assert passes[request.id] == oracle(model, request, SPECIAL)
    assert 4 < capture.num_replayed <= engine.status().num_forward_passes


def test_prompts_are_scored_beside_captured_steps(tiny_model: Models, make_engine: Engines) -> None:
    model, capture = tiny_model("qwen2"), CountingCapture()
    engine = graphed_engine(make_engine, model, capture)
    talk = make_request("talk", [5, 6, 7], 20, threshold=0.1)
    score = make_request("score", 90, 4, num_prompt_logprobs=1)
    prompt = list(score.tokens)
    outputs = run(engine, [talk, score])
    found = [entry for output in outputs["score"] for entry in output.prompt_logprobs]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
    own = expected[:-1].gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(
        torch.tensor([entry.logprob for entry in found]), own, rtol=1e-4, atol=1e-4
    )
    assert [entry.top[0][0] for entry in found] == expected[:-1].argmax(-1).tolist()
    assert passes_of(outputs)["talk"] == oracle(model, talk, SPECIAL)
    assert capture.num_replayed > 1


# Shapes


@given(
    max_rows=st.integers(1, 40),
    window=st.integers(0, 16),
    more_drafts=st.integers(0, 8),
    max_num_batched_tokens=st.integers(65, 2048),
    max_pages=st.integers(1, 600),
    data=st.data(),
)
def test_every_layout_of_rows_fits_a_captured_shape(
    max_rows: int,
    window: int,
    more_drafts: int,
    max_num_batched_tokens: int,
    max_pages: int,
    data: st.DataObject,
) -> None:
    """Rows of mode exact have any masks for any outcomes, up to all masks for all outcomes."""
    drafts = window + more_drafts
    longest = window + 1 + drafts + (drafts + 1) * window
    sizes = GraphSizes(max_rows, longest, max_num_batched_tokens, max_pages)
    rows, room = [], max_num_batched_tokens
    for _ in range(data.draw(st.integers(1, max_rows))):
        num_drafts = data.draw(st.integers(0, drafts))
        masks = data.draw(st.tuples(*[st.integers(0, window)] * (num_drafts + 1)))
        num_tokens = data.draw(st.integers(1, window + 1))
        if data.draw(st.booleans()):
            masks = (window,) * len(masks)  # a full row
        room -= num_tokens + num_drafts + sum(masks)
        if room < 0:
            break
        mode = Mode.EXACT if num_drafts else data.draw(st.sampled_from(list(Mode)))
        num_cached = data.draw(st.integers(0, max_pages * PAGE))
        request = make_request("", [5] * (num_cached + num_tokens), mode=mode)
        request.num_cached, request.pages = num_cached, [0] * (max_pages + longest)
        request.drafts = [Draft(7, 0.5)] * num_drafts
        rows.append(make_row(request, num_tokens, masks))
    assume(rows)
    batch = build_batch(rows, MASK)
    shape = sizes.shape_for(batch, PAGE)
    assert shape in sizes.shapes()
    exact = StepShape.of(batch, PAGE)
    assert shape.step.num_positions == exact.num_positions
    assert shape.step.num_rows >= exact.num_rows
    assert shape.step.num_pages >= cached_pages(batch, PAGE)
    assert shape.num_reads >= len(batch.reads)


def test_the_engine_says_what_its_graphs_took(tiny_model: Models, make_engine: Engines) -> None:
    capture = CountingCapture()
    engine = graphed_engine(make_engine, tiny_model("qwen2"), capture)
    assert engine.captured is not None
    assert engine.captured.num_graphs == capture.num_captured
    assert engine.captured.seconds > 0


# On a GPU

GROUP = LayerGroup(1, heads=4, kv_heads=2, key_dim=8, value_dim=8)
needs_paged_gpu = pytest.mark.skipif(
    not torch.cuda.is_available()
    or why_gathered(EngineSettings(), torch.device("cuda"), torch.bfloat16, [GROUP]) is not None,
    reason="needs a GPU on which the kernel reads pages",
)


@needs_paged_gpu
def test_replayed_graphs_equal_eager_steps_on_a_gpu(tiny_model: Models) -> None:
    device, page = torch.device("cuda", torch.cuda.current_device()), 64
    model = copy.deepcopy(tiny_model("qwen2")).to(device, torch.bfloat16)
    pair = Pair(model, CudaCapture(), page_size=page, num_pages=MAX_ROWS)
    requests, source = new_requests(num_pages=1), random.Random(1)
    for request in requests:
        request.tokens = [source.randrange(4, 60) for _ in range(page)]
    for request in requests[:2]:
        pair.assert_equal(feed([request], [(90, 0, False)]), tolerance=0.1)
    for _ in range(20):
        rows = [(source.choice([0, 1, 2]), source.randint(0, NUM_MASKS), True) for _ in requests]
        rows[source.randrange(MAX_ROWS)] = (1, 1, True)
        pair.assert_equal(feed(requests, rows), tolerance=0.1)


def test_shapes_are_few_and_the_largest_comes_first() -> None:
    sizes = GraphSizes(max_rows=32, max_row_length=89, max_num_batched_tokens=1024, max_pages=2048)
    shapes = sizes.shapes()
    assert max(Counter(shapes).values()) == 1
    assert len(shapes) < 180
    keys = [(shape.step.num_positions, shape.step.num_pages, shape.num_reads) for shape in shapes]
    assert keys == sorted(keys, reverse=True)
