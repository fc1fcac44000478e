"""Attention that reads pages in place: tokens, stored keys and values, and where it can run."""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.method import reference
from mars_platform.method.mode import Mode
from mars_serve.engine.attention.gathered import GatheredAttention
from mars_serve.engine.attention.interface import KeyValueShape
from mars_serve.engine.attention.paged_kernel import (
    PagedKernel,
    load_kernel,
    refusal,
    varlen_available,
)
from mars_serve.engine.attention.plain_kernel import plain_kernel, plain_varlen_attn
from mars_serve.engine.attention.selection import choose_attention
from mars_serve.engine.attention.varlen import VarlenAttention
from mars_serve.engine.batch import build_batch
from mars_serve.engine.decoding_options import DecodingOptions, FinishReason
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution.forward import ModelRunner
from mars_serve.engine.request import Draft, Request
from mars_serve.engine.scheduled_row import ScheduledRow
from mars_serve.engine.settings import EngineSettings

MASK, BLOCK_SIZE, POISONED = 3, 4, 61
Shape = tuple[int, int, tuple[int, ...]]
"""Stored tokens of a row, tokens that it feeds, and its masks by outcome."""
SPECIAL = SpecialTokens(eos=frozenset({1, 9}), never_emitted=frozenset({0, MASK, POISONED}))
MODES = [(Mode.THRESHOLD, 0.05), (Mode.THRESHOLD, 0.2), (Mode.AR, 0.5)]

Models = Callable[[str], PreTrainedModel]
Engines = Callable[..., Engine]
Cached = Callable[[PreTrainedModel, list[int]], tuple[Tensor, Tensor]]
Passes = dict[str, list[list[int]]]


def prompt(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(4, 60) for _ in range(length)]


def ragged_requests(count: int) -> list[Request]:
    """Some with prompts that take several steps, of narrow and wide shares."""
    source, requests = random.Random(0), []
    for index in range(count):
        length = source.randint(100, 200) if index % 4 == 1 else source.randint(1, 40)
        mode, threshold = MODES[index % len(MODES)]
        options = DecodingOptions(source.randint(1, 20), mode, threshold)
        requests.append(Request(str(index), prompt(length, index), options))
    return requests


def read_in_place(engine: Engine, *, needs_key_starts: bool = False) -> VarlenAttention:
    """Let an engine attend by the plain kernel."""
    model, settings = engine._runner.model, engine.settings
    attention = VarlenAttention(
        KeyValueShape.of(model.config),
        num_query_heads=model.config.num_attention_heads,
        num_pages=engine.num_pages,
        page_size=settings.page_size,
        dtype=model.dtype,
        device=model.device,
        kernel=plain_kernel(needs_key_starts=needs_key_starts),
    )
    engine._attention = attention
    engine._runner = ModelRunner(model, attention, engine.checkpoint.special, MASK)
    return attention


def run(engine: Engine, requests: list[Request], *, at_once: int = 6) -> Passes:
    queue, passes = requests[::-1], defaultdict(list)
    while queue or engine.has_work:
        while queue and engine.status().num_requests < at_once:
            engine.add(queue.pop())
        for output in engine.step():
            passes[output.request_id].append(output.tokens)
        engine.check_integrity()
    return passes


def oracle(model: PreTrainedModel, request: Request) -> list[list[int]]:
    options = request.options
    return reference.decode(
        model,
        request.tokens[: request.num_prompt],
        SPECIAL,
        max_tokens=options.max_tokens,
        threshold=1.0 if options.mode is Mode.AR else options.threshold,
        num_masks=BLOCK_SIZE,
        mask_token_id=MASK,
    ).passes


# Tokens


def _seen(num_tokens: int, masks: tuple[int, ...]) -> Tensor:
    """Tokens and drafts causally; of each outcome's masks the drafts up to it, and each other."""
    kept = num_tokens + len(masks) - 1
    seen = torch.ones(kept + sum(masks), kept + sum(masks)).tril()
    begin = kept
    for outcome, count in enumerate(masks):
        seen[begin : begin + count, num_tokens + outcome : begin] = 0
        begin += count
    return seen


@pytest.mark.parametrize("needs_key_starts", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_passes_equal_oracle(
    tiny_model: Models, make_engine: Engines, family: str, needs_key_starts: bool
) -> None:
    model, requests = tiny_model(family), ragged_requests(16)
    engine = make_engine(model, SPECIAL, num_pages=300, max_num_batched_tokens=110)
    read_in_place(engine, needs_key_starts=needs_key_starts)
    passes = run(engine, requests)
    for request in requests:
        assert passes[request.id] == oracle(model, request)
    assert sum(len(tokens) > 1 for each in passes.values() for tokens in each) > 5


@pytest.mark.parametrize(
    "sizes", [{"page_size": 1}, {"page_size": 7}, {"max_num_batched_tokens": 65}]
)
def test_sizes_do_not_change_passes(
    tiny_model: Models, make_engine: Engines, sizes: dict[str, int]
) -> None:
    engine = make_engine(tiny_model("qwen2"), SPECIAL, **{"num_pages": 700, **sizes})
    read_in_place(engine)
    requests = ragged_requests(8)
    passes = run(engine, requests)
    for request in requests:
        assert passes[request.id] == oracle(tiny_model("qwen2"), request)


def test_a_reused_prefix_gives_the_same_tokens(tiny_model: Models, make_engine: Engines) -> None:
    model, shared = tiny_model("llama"), prompt(90, 5)
    engine = make_engine(model, SPECIAL)
    read_in_place(engine)
    for index in range(3):
        own = prompt(3 * index, index)
        request = Request(str(index), shared + own, DecodingOptions(12, threshold=0.1))
        assert run(engine, [request])[request.id] == oracle(model, request)
    assert engine.status().num_prefix_hit_tokens >= 2 * 80


# Keys and values


def test_masks_leave_no_keys_or_values(
    tiny_model: Models, make_engine: Engines, cached: Cached
) -> None:
    model = tiny_model("qwen2")
    engine = make_engine(model, SpecialTokens(frozenset(), SPECIAL.never_emitted))
    attention = read_in_place(engine)
    request = Request("one", prompt(90, 1), DecodingOptions(40, threshold=1e-9))
    engine.add(request)
    while request.num_output < 12:
        engine.step()
    expected = cached(model, request.tokens[: request.num_cached])
    for stored, each in zip((attention.keys, attention.values), expected, strict=True):
        own = stored[:, request.pages].flatten(1, 2)  # [layers, slots, kv_heads, head_dim]
        torch.testing.assert_close(own[:, : request.num_cached], each, rtol=1e-4, atol=1e-4)
        assert own[:, request.num_cached :].abs().sum() == 0
        free = sorted(set(range(engine.num_pages)) - set(request.pages))
        assert stored[:, free].abs().sum() == 0


def test_what_is_no_number_stays_in_its_row(tiny_model: Models, make_engine: Engines) -> None:
    model = tiny_model("qwen2")
    engine = make_engine(model, SPECIAL, num_pages=300)
    read_in_place(engine)
    with torch.no_grad():
        engine._runner.model.get_input_embeddings().weight[POISONED] = torch.nan
    requests = ragged_requests(6)
    requests.insert(2, Request("bad", [5, 6, POISONED, 7, 8], DecodingOptions(5, threshold=0.1)))
    passes = run(engine, requests)
    assert requests[2].finish_reason is FinishReason.ERROR
    for request in requests[:2] + requests[3:]:
        assert passes[request.id] == oracle(model, request)


# One step


class Step:
    """One step of rows of (stored, tokens, masks), with random numbers, and a row's pages apart."""

    def __init__(
        self,
        rows: list[Shape],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        page_size: int = 4,
    ) -> None:
        torch.manual_seed(0)
        self.sizes = {"dtype": dtype, "device": device}
        most = 1 + max(stored + tokens + len(masks) for stored, tokens, masks in rows) // page_size
        self.page_size = page_size
        works = []
        for index, (stored, tokens, masks) in enumerate(rows):
            request = Request(str(index), [5] * (stored + tokens), DecodingOptions(9))
            request.num_cached = stored
            request.pages = [index + len(rows) * page for page in range(most)]
            request.drafts = [Draft(6, 0.5)] * (len(masks) - 1)
            works.append(ScheduledRow(request, tokens, masks, reads_logits=True))
        self.batch = build_batch(works, MASK)
        places = len(self.batch.ids)
        self.query = torch.randn(places, 8, 64, **self.sizes)
        self.key, self.value = torch.randn(2, places, 2, 64, **self.sizes)
        self.num_pages = len(rows) * most
        self.pages = torch.randn(2, self.num_pages + 1, page_size, 2, 64, **self.sizes)

    def attend(self, kernel: PagedKernel) -> tuple[Tensor, VarlenAttention]:
        attention = VarlenAttention(
            KeyValueShape(num_layers=1, num_heads=2, head_dim=64),
            num_query_heads=8,
            num_pages=self.num_pages,
            page_size=self.page_size,
            kernel=kernel,
            **self.sizes,
        )
        attention.keys[0], attention.values[0] = self.pages
        plan = attention.prepare(self.batch)
        output = attention.attend(0, self.query, self.key, self.value, 0.125, plan)
        return output[: self.batch.num_positions], attention

    def expected(self) -> Tensor:
        """Of each row by itself: what is stored, then what it feeds as `_seen` says."""
        outputs = []
        for row in self.batch.rows:
            own = slice(row.start, row.start + row.length)
            keys, values = (
                torch.cat([pages[row.pages].flatten(0, 1)[: row.num_cached], fresh[own]])
                .float()
                .transpose(0, 1)
                for pages, fresh in zip(self.pages, (self.key, self.value), strict=True)
            )
            seen = torch.ones(row.length, keys.shape[1], device=keys.device)
            seen[:, row.num_cached :] = _seen(row.num_tokens - row.num_drafts, row.masks)
            output = torch.nn.functional.scaled_dot_product_attention(
                self.query[own].float().transpose(0, 1),
                keys,
                values,
                attn_mask=seen.bool(),
                scale=0.125,
                enable_gqa=True,
            )
            outputs.append(output.transpose(0, 1))
        return torch.cat(outputs)


@pytest.mark.parametrize("needs_key_starts", [False, True])
@pytest.mark.parametrize(
    "rows",
    [
        [(7, 1, (4,)), (0, 70, (0,)), (9, 3, (0,)), (16, 90, (2,)), (0, 2, (1,)), (5, 66, (0,))],
        [(0, 65, (0,)), (0, 64, (0,))],
        [(0, 1, (0,))],
        [(3, 80, (4,))],
        [(7, 1, (4, 4, 4, 4, 4)), (6, 1, (0, 2, 0, 1)), (0, 3, (2, 0)), (2, 1, (0, 0, 3))],
        [(5, 60, (3, 3, 3)), (7, 70, (0, 2)), (4, 1, (4,))],
    ],
)
def test_a_step_equals_dense_attention(rows: list[Shape], needs_key_starts: bool) -> None:
    step = Step(rows, torch.device("cpu"))
    output, attention = step.attend(plain_kernel(needs_key_starts=needs_key_starts))
    torch.testing.assert_close(output, step.expected())
    for row in step.batch.rows:
        end, fed = row.num_cached + row.num_tokens, slice(row.start, row.start + row.num_tokens)
        for stored, fresh in ((attention.keys[0], step.key), (attention.values[0], step.value)):
            assert stored[row.pages].flatten(0, 1)[row.num_cached : end].equal(fresh[fed])


@pytest.mark.parametrize("bad", range(4))
def test_no_row_attends_to_its_neighbours(bad: int) -> None:
    step = Step([(0, 2, (1,)), (5, 1, (4,)), (9, 66, (0,)), (0, 8, (3, 1))], torch.device("cpu"))
    row = step.batch.rows[bad]
    own = slice(row.start, row.start + row.length)
    for part in (step.query, step.key, step.value):
        part[own] = torch.nan
    step.pages[:, row.pages] = torch.nan
    output, attention = step.attend(plain_kernel())
    assert output[own].isnan().all()
    assert output.isnan().any(-1).any(-1).sum() == row.length
    attention.recover()
    assert attention.keys.isfinite().all()
    assert attention.values.isfinite().all()


# Where it can run


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"page_size": 512}, None),
        ({"family": "FlashAttention 3", "page_size": 16}, None),
        ({"page_size": 16}, "engine.page_size is 16; set it to 256"),
        ({"dtype": torch.float32}, "float32"),
        ({"capability": 7}, "compute capability is 7"),
        ({"head_dim": 12}, "head size is 12"),
        ({"head_dim": 512}, "head size is 512"),
        ({"family": "FA4"}, "FA4 is active"),
    ],
)
def test_refusal_says_why(changes: dict[str, Any], words: str | None) -> None:
    call = {
        "capability": 8,
        "family": "FlashAttention 2",
        "dtype": torch.bfloat16,
        "page_size": 256,
        "head_dim": 128,
        **changes,
    }
    reason = refusal(**call)
    assert reason is None if words is None else words in str(reason)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({}, "the device is cpu"), ({"batch_invariant": True}, "batch_invariant is set")],
)
def test_pages_are_gathered_where_nothing_else_is_possible(
    tiny_model: Models, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], words: str
) -> None:
    with caplog.at_level(logging.INFO):
        attention = choose_attention(
            tiny_model("qwen2"),
            EngineSettings(**settings),
            num_pages=4,
            page_size=16,
            max_masks=2,
        )
    assert isinstance(attention, GatheredAttention)
    assert words in caplog.text


# On a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PAGE = 256


def on_gpu() -> torch.device:
    """The GPU, if a kernel reads pages of `PAGE` tokens on it."""
    device = torch.device("cuda", torch.cuda.current_device())
    reason = varlen_available(device, torch.bfloat16, page_size=PAGE, head_dim=64)
    if reason is not None:
        pytest.skip(reason)
    return device


@needs_gpu
@pytest.mark.parametrize("stored", [0, 1, 255, 256, 700])
def test_a_gpu_kernel_equals_dense_attention(stored: int) -> None:
    device = on_gpu()
    rows = [(stored, 3, (4,)), (3, 80, (0,)), (0, 3, (2, 1)), (600, 70, (7,)), (9, 1, (4, 4, 2))]
    step = Step(rows, device, torch.bfloat16, PAGE)
    torch.testing.assert_close(
        step.attend(load_kernel(device))[0].float(), step.expected(), rtol=2e-2, atol=2e-2
    )


@needs_gpu
def test_a_gpu_kernels_log_sum_exps_have_heads_first() -> None:
    device = on_gpu()
    kernel = load_kernel(device)
    query, key, value = torch.randn(3, 70, 4, 64, dtype=torch.bfloat16, device=device)
    starts = torch.tensor([0, 70], dtype=torch.int32, device=device)
    attention = VarlenAttention(
        KeyValueShape(1, 4, 64),
        num_query_heads=4,
        num_pages=1,
        page_size=PAGE,
        dtype=query.dtype,
        device=device,
        kernel=kernel,
    )
    plan = attention.prepare(
        build_batch(
            [ScheduledRow(Request("", [5] * 70, DecodingOptions(1), pages=[0]), 70, (0,), True)],
            None,
        )
    )
    _, lse = attention._attend_wide(query, key, value, 0.125, plan)
    scores = (torch.einsum("qhd,khd->qhk", query.float(), key.float()) * 0.125).masked_fill(
        torch.ones(70, 70, device=device).triu(1).bool()[:, None], -torch.inf
    )
    assert starts.equal(plan.wide_starts)
    torch.testing.assert_close(lse.float(), scores.logsumexp(-1), rtol=1e-2, atol=1e-2)


@needs_gpu
def test_both_attentions_agree_on_a_gpu(tiny_model: Models) -> None:
    device = on_gpu()
    torch.manual_seed(0)
    shape = KeyValueShape(num_layers=1, num_heads=2, head_dim=64)
    sizes = {"dtype": torch.bfloat16, "device": device}
    in_place = VarlenAttention(
        shape,
        num_query_heads=8,
        num_pages=8,
        page_size=PAGE,
        kernel=load_kernel(device),
        **sizes,
    )
    gathered = GatheredAttention(
        shape, num_pages=8, page_size=PAGE, max_rows=2, max_masks=4, **sizes
    )
    requests = [Request(str(row), [5] * 400, DecodingOptions(9)) for row in range(2)]
    for begin, length, masks in [(0, 300, 0), (300, 5, 4), (305, 1, 2)]:
        works = []
        for row, request in enumerate(requests):
            request.num_cached, request.pages = begin, [2 * row, 2 * row + 1]
            works.append(ScheduledRow(request, length, (masks,), reads_logits=True))
        batch = build_batch(works, MASK)
        query = torch.randn(len(batch.ids), 8, 64, **sizes)
        key, value = torch.randn(2, len(batch.ids), 2, 64, **sizes)
        one, other = (
            attention.attend(0, query, key, value, 0.125, attention.prepare(batch))
            for attention in (in_place, gathered)
        )
        used = slice(batch.num_positions)
        torch.testing.assert_close(one[used], other[used], rtol=2e-2, atol=2e-2)


def test_plain_kernel_equals_ordinary_attention() -> None:
    query, key, value = torch.randn(3, 9, 2, 4)
    starts = torch.tensor([0, 9], dtype=torch.int32)
    output, lse = plain_varlen_attn(
        query,
        key,
        value,
        starts,
        starts,
        9,
        9,
        return_aux=torch.nn.attention.varlen.AuxRequest(lse=True),
        scale=0.5,
        window_size=(-1, 0),
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(part.transpose(0, 1) for part in (query, key, value)), is_causal=True, scale=0.5
    )
    torch.testing.assert_close(output, expected.transpose(0, 1))
    assert lse.shape == (2, 9)
    torch.testing.assert_close(lse[:, 0], (query[0] * key[0]).sum(-1) * 0.5)
