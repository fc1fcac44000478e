"""Replayed steps give the logits of eager ones, whatever ran on their addresses before."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from decoding.engine_requests import make_request, make_row
from decoding.engines import Engines, Models, oracle, paged_attention, passes_of, run
from mars_platform.checkpoint.directory import SpecialTokens
from mars_serve.engine.attention.operator import ATTENTION_NAME
from mars_serve.engine.attention.plan import StepShape, cached_pages
from mars_serve.engine.attention.selection import why_gathered
from mars_serve.engine.batch import StepBatch, build_batch
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution.graphs import CudaCapture, EagerForward, GraphedForward, GraphSizes
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings

MASK, NUM_MASKS = 3, 4
SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, MASK}))
PAGE, NUM_PAGES, MAX_ROWS = 4, 120, 5
SIZES = GraphSizes(max_rows=MAX_ROWS, max_masks=NUM_MASKS, max_num_batched_tokens=65, max_pages=40)


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
class NoTensors:
    """An extra of a step without tensors."""


@dataclass(frozen=True)
class TwoTensors:
    whole: Tensor
    share: Tensor


NO_TENSORS = NoTensors()


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
        for each in models:
            each.set_attn_implementation(ATTENTION_NAME)
        sizes = {"page_size": PAGE, "num_pages": NUM_PAGES, **options}
        self.attentions = [paged_attention(each, **sizes) for each in models]
        self.eager = EagerForward(models[0], self.attentions[0])
        self.graphed = GraphedForward(models[1], self.attentions[1])
        self.graphed.capture(SIZES, capture)

    @torch.inference_mode()
    def assert_equal(self, batch: StepBatch, tolerance: float = 1e-5) -> None:
        expected, found = self.eager(batch, NO_TENSORS), self.graphed(batch, NO_TENSORS)
        if batch.reads:
            close = {"rtol": tolerance, "atol": tolerance}
            torch.testing.assert_close(found.logits, expected.logits, **close)
        for kind in ("keys", "values"):
            eager, graphed = (getattr(each, kind)[:, :-1] for each in self.attentions)
            torch.testing.assert_close(graphed, eager, rtol=tolerance, atol=tolerance)


def feed(requests: list[Request], rows: list[tuple[int, int, bool]]) -> StepBatch:
    """A step of rows of (tokens, masks, reads logits); the tokens are then counted as cached."""
    scheduled = [
        make_row(request, tokens, (masks,), reads_logits=reads)
        for request, (tokens, masks, reads) in zip(requests, rows, strict=False)
        if tokens
    ]
    batch = build_batch(scheduled, MASK)
    for row in scheduled:
        row.request.num_cached += row.num_tokens
    return batch


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


def test_the_smallest_step_after_a_full_one_equals_an_eager_one(tiny_model: Models) -> None:
    capture = CountingCapture()
    pair, requests = Pair(tiny_model("llama"), capture), new_requests()
    for _ in range(3):
        pair.assert_equal(feed(requests, [(NUM_MASKS + 1, NUM_MASKS, True)] * MAX_ROWS))
        pair.assert_equal(feed(requests, [(0, 0, False)] * 4 + [(1, 0, True)]))
    assert capture.num_replayed == 6


def test_steps_that_fit_no_shape_run_eagerly(tiny_model: Models) -> None:
    capture = CountingCapture()
    pair, requests = Pair(tiny_model("qwen2"), capture), new_requests()
    pair.assert_equal(feed(requests, [(66, 0, True), (2, 3, True)]))  # too many positions
    assert capture.num_replayed == 0
    pair.assert_equal(feed(requests, [(1, 4, True), (2, 3, True)]))
    pair.assert_equal(feed(requests, [((NUM_MASKS + 1) ** 2 + 1, 0, True), (1, 1, True)]))
    assert capture.num_replayed == 2


def test_capturing_leaves_the_pages_alone(tiny_model: Models) -> None:
    capture, seen = CountingCapture(), []
    pair = Pair(tiny_model("qwen2"), capture)
    assert pair.attentions[1].keys[:, :-1].abs().sum() == 0
    pair.graphed.capture(SIZES, capture, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, len(SIZES.shapes())) for done in range(1, len(SIZES.shapes()) + 1)]


def test_further_tensors_reach_the_device_unchanged(tiny_model: Models) -> None:
    pair = Pair(tiny_model("qwen2"), CountingCapture())
    extra = TwoTensors(torch.tensor([3, 1]), torch.tensor([0.5]))
    for tokens in (1, 70):
        for forward in (pair.eager, pair.graphed):
            with torch.inference_mode():
                staged = forward(feed(new_requests(), [(tokens, 0, True)]), extra).extra
            assert staged.whole.equal(extra.whole)
            assert staged.share.equal(extra.share)


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
    assert 4 < capture.num_replayed < engine.status().num_forward_passes


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
    sizes=st.builds(
        GraphSizes,
        max_rows=st.integers(1, 40),
        max_masks=st.integers(0, 16),
        max_num_batched_tokens=st.just(2048),
        max_pages=st.integers(8, 300),
    ),
    data=st.data(),
)
def test_every_decoding_step_fits_a_captured_shape(sizes: GraphSizes, data: st.DataObject) -> None:
    row = st.tuples(st.integers(1, sizes.max_masks + 1), st.integers(0, sizes.max_masks))
    lengths = st.integers(0, sizes.max_pages * PAGE - sizes.max_masks - 1)
    rows = []
    for tokens, masks in data.draw(st.lists(row, min_size=1, max_size=sizes.max_rows)):
        num_cached = data.draw(lengths)
        prompt = [5] * (num_cached + tokens)
        request = make_request("", prompt, num_cached=num_cached, pages=[0] * 400)
        rows.append(make_row(request, tokens, (masks,)))
    batch = build_batch(rows, MASK)
    shape = sizes.shape_for(batch, PAGE)
    assert shape in sizes.shapes()
    exact = StepShape.of(batch, PAGE)
    assert shape.step.num_positions == exact.num_positions
    assert shape.step.num_rows >= exact.num_rows
    assert shape.step.num_pages >= cached_pages(batch, PAGE)
    assert shape.num_reads >= len(batch.reads)


def test_shapes_are_few_and_the_largest_comes_first() -> None:
    shapes = GraphSizes(
        max_rows=32, max_masks=8, max_num_batched_tokens=1024, max_pages=256
    ).shapes()
    assert max(Counter(shapes).values()) == 1
    assert len(shapes) < 120
    sizes = [(shape.step.num_positions, shape.step.num_pages) for shape in shapes]
    assert sizes == sorted(sizes, reverse=True)


# On a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replayed_graphs_equal_eager_steps_on_a_gpu(tiny_model: Models) -> None:
    device, page = torch.device("cuda", torch.cuda.current_device()), 256
    reason = why_gathered(EngineSettings(), device, torch.bfloat16, head_dim=8)
    if reason is not None:
        pytest.skip(reason)
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
