"""The contract of every attention backend: its tokens, and its cached keys and values."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.attention_steps import AttentionStep, RowShape
from decoding.engine_requests import make_request
from decoding.engines import Engines, Models, oracle, paged_attention, passes_of, run
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.method.mode import Mode
from mars_serve.engine.attention.gathered import GatheredAttention
from mars_serve.engine.attention.interface import Attention, group_layers
from mars_serve.engine.attention.mixed import MixedAttention
from mars_serve.engine.attention.native import NativeAttention
from mars_serve.engine.attention.paged import PagedAttention
from mars_serve.engine.engine import Engine
from mars_serve.engine.kernels.native import native_for
from mars_serve.engine.request import Request

MASK, POISONED = 3, 61
SPECIAL = SpecialTokens(eos=frozenset({1, 9}), never_emitted=frozenset({0, MASK, POISONED}))
MODES = [(Mode.THRESHOLD, 0.05), (Mode.THRESHOLD, 0.2), (Mode.AR, 0.5)]
BACKENDS = ["gathered", "native", "batch-invariant", "paged", "paged in pieces"]

Cached = Callable[[PreTrainedModel, list[int]], tuple[Tensor, Tensor]]


def attention_of(
    backend: str, model: PreTrainedModel, specs: Any, _: Any, **sizes: int
) -> Attention:
    """A backend for an engine's model."""
    if backend.startswith("paged"):
        attention = paged_attention(model, specs, **sizes)
        if backend == "paged in pieces":
            for each in getattr(attention, "backends", [attention]):
                cut(each)
        return attention
    groups, places = group_layers(specs)
    options: Any = {"dtype": model.dtype, "device": model.device, **sizes}
    kind: Any = GatheredAttention
    if backend == "native":
        kind, options["native"] = NativeAttention, native_for(model.device, model.dtype)
    else:
        options["batch_invariant"] = backend == "batch-invariant"
    num_window_pages = options.pop("num_window_pages")
    backends: list[Attention] = [
        kind(group, **options | ({"num_pages": num_window_pages} if group.is_bounded else {}))
        for group in groups
    ]
    is_uniform = len(groups) == 1 and all(place.is_own for place in places.values())
    return backends[0] if is_uniform else MixedAttention(backends, places)


def cut(attention: PagedAttention) -> PagedAttention:
    """Attention over small blocks, so that short rows are cut into several pieces, too."""
    attention.tiling = replace(attention.tiling, block_n=3, num_pieces=11, fewest_blocks=1)
    return attention


def cached_of(attention: Any) -> list[Tensor]:
    """Cached keys and values, [layers, pages, page_size, kv_heads, head_dim] each."""
    if isinstance(attention, PagedAttention):
        return [attention.keys, attention.values]
    return [attention.keys.transpose(2, 3), attention.values.transpose(2, 3)]


def ragged_requests(count: int) -> list[Request]:
    """Requests of all kinds, some with prompts that take several steps."""
    source, requests = random.Random(0), []
    for index in range(count):
        length = source.randint(100, 200) if index % 4 == 1 else source.randint(1, 40)
        prompt = [source.randrange(4, 60) for _ in range(length)]
        mode, threshold = MODES[index % len(MODES)]
        max_tokens = source.randint(1, 20)
        options = {"mode": mode, "threshold": threshold}
        requests.append(make_request(str(index), prompt, max_tokens, **options))
    return requests


# Through the engine


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_passes_equal_the_oracles(
    tiny_model: Models, make_engine: Engines, family: str, backend: str
) -> None:
    model, requests = tiny_model(family), ragged_requests(10)
    engine_class = partial(Engine, attention_of=partial(attention_of, backend))
    sizes = {"num_pages": 300, "max_num_batched_tokens": 110}
    engine = make_engine(model, SPECIAL, engine_class=engine_class, **sizes)
    passes = passes_of(run(engine, requests, at_once=6))
    for request in requests:
        assert passes[request.id] == oracle(model, request, SPECIAL)
    assert sum(len(tokens) > 1 for each in passes.values() for tokens in each) > 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [{"page_size": 1}, {"page_size": 7, "max_num_seqs": 1}])
def test_sizes_do_not_change_passes(
    tiny_model: Models, make_engine: Engines, sizes: dict[str, int], backend: str
) -> None:
    model, requests = tiny_model("qwen2"), ragged_requests(6)
    engine_class = partial(Engine, attention_of=partial(attention_of, backend))
    engine = make_engine(model, SPECIAL, engine_class=engine_class, num_pages=700, **sizes)
    passes = passes_of(run(engine, requests, at_once=6))
    for request in requests:
        assert passes[request.id] == oracle(model, request, SPECIAL)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_leave_no_keys_or_values(
    tiny_model: Models, make_engine: Engines, cached: Cached, backend: str
) -> None:
    model, endless = tiny_model("qwen2"), SpecialTokens(frozenset(), SPECIAL.never_emitted)
    engine_class = partial(Engine, attention_of=partial(attention_of, backend))
    engine = make_engine(model, endless, engine_class=engine_class)
    request = make_request("one", 90, 40, threshold=1e-9)
    engine.add(request)
    while request.num_output < 12:
        engine.step()
    expected = cached(model, request.tokens[: request.num_cached])
    free = sorted(set(range(engine.num_pages)) - set(request.pages))
    for part, each in zip(cached_of(engine.attention), expected, strict=True):
        own = part[:, request.pages].flatten(1, 2)  # [layers, slots, kv_heads, head_dim]
        torch.testing.assert_close(own[:, : request.num_cached], each, rtol=1e-4, atol=1e-4)
        assert own[:, request.num_cached :].abs().sum() == 0
        assert part[:, free].abs().sum() == 0


# One step


def attend(backend: str, step: AttentionStep) -> tuple[Tensor, Any]:
    """Result of a step's own positions, and the backend, over the step's pages."""
    sizes = {"num_pages": step.num_pages, "page_size": step.page_size, **step.types}
    attention: Any
    if backend.startswith("paged"):
        attention = PagedAttention(step.group, **sizes)
        attention = cut(attention) if backend == "paged in pieces" else attention
    elif backend == "native":
        native: Any = native_for(step.types["device"], step.types["dtype"])
        attention = NativeAttention(step.group, native=native, **sizes)
    else:
        is_invariant = backend == "batch-invariant"
        attention = GatheredAttention(step.group, batch_invariant=is_invariant, **sizes)
    return step.attend(attention, cached_of(attention)), attention


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "rows",
    [
        [(7, 1, (4,)), (0, 70, (0,)), (9, 3, (0,)), (16, 90, (2,)), (0, 2, (1,)), (5, 66, (0,))],
        [(0, 65, (0,)), (0, 64, (0,))],
        [(120, 1, (2,)), (125, 1, (2,))],
        [(0, 1, (0,))],
        [(3, 80, (4,))],
        [(7, 1, (4, 4, 4, 4, 4)), (6, 1, (0, 2, 0, 1)), (0, 3, (2, 0)), (2, 1, (0, 0, 3))],
        [(5, 60, (3, 3, 3)), (7, 70, (0, 2)), (4, 1, (4,))],
        [(3, 1, (0,)), (30, 290, (3, 3)), (0, 600, (0,)), (600, 30, (2,))],
    ],
)
def test_a_step_equals_dense_attention(rows: list[RowShape], backend: str) -> None:
    step = AttentionStep(rows, torch.device("cpu"))
    output, attention = attend(backend, step)
    torch.testing.assert_close(output, step.expected())
    for row in step.batch.rows:
        end, fed = row.num_cached + row.num_tokens, slice(row.start, row.start + row.num_tokens)
        for part, fresh in zip(cached_of(attention), (step.key, step.value), strict=True):
            assert part[0, row.pages].flatten(0, 1)[row.num_cached : end].equal(fresh[fed])


RAGGED: list[RowShape] = [
    *((40, 1, (3,)), (9, 3, (2, 0, 2)), (0, 30, (1,)), (33, 1, (0,))),
    (20, 270, (1, 2)),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "kind",
    [
        {"window": 1},
        {"window": 6, "num_kv_heads": 8},
        {"chunk": 12},
        {"softcap": 0.4},
        {"has_sinks": True},
        {"value_dim": 24},
        {"value_dim": 80},
        {"value_in_key": True, "value_dim": 48, "num_kv_heads": 1},
        {"value_in_key": True, "value_dim": 48, "num_kv_heads": 1, "window": 6},
        {"window": 11, "softcap": 0.4, "has_sinks": True, "value_dim": 24, "num_heads": 6},
    ],
    ids=str,
)
def test_other_kinds_of_attention_equal_dense_attention(kind: Any, backend: str) -> None:
    """Pages before all that a row sees hold NaN."""
    step = AttentionStep(RAGGED, torch.device("cpu"), **kind)
    for row in step.batch.rows:
        step.hide(row)
    output, _ = attend(backend, step)
    torch.testing.assert_close(output, step.expected())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [RAGGED, [(300, 1, (0,))]], ids=["ragged", "one"])
@pytest.mark.parametrize(
    "kind",
    [
        {"page_size": 1, "head_dim": 33},
        {"page_size": 7, "num_kv_heads": 1, "window": 11, "has_sinks": True},
        {"page_size": 16, "head_dim": 32, "num_heads": 18, "softcap": 0.4},
    ],
    ids=str,
)
def test_native_attention_reads_pairs_and_cuts_heads(
    kind: Any, rows: list[RowShape], dtype: torch.dtype
) -> None:
    """Places behind a row's tokens hold NaN, and no bit depends on the number of threads."""
    step = AttentionStep(rows, torch.device("cpu"), dtype, **kind)
    for row in step.batch.rows:
        step.hide(row)
        for place in range(row.num_cached + row.num_tokens, len(row.pages) * step.page_size):
            for part in step.pages:
                part[row.pages[place // step.page_size], place % step.page_size] = torch.nan
    outputs, threads = [], torch.get_num_threads()
    for count in (1, 7):
        torch.set_num_threads(count)
        outputs.append(attend("native", step)[0])
    torch.set_num_threads(threads)
    error = {"rtol": 0.01, "atol": 0.01} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(outputs[0].float(), step.expected(), **error)
    assert outputs[0].equal(outputs[1])


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("page_size", [1, 7, 16, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_of_c_read_nothing_that_no_query_sees(
    dtype: torch.dtype, page_size: int, window: int | None
) -> None:
    """NaN fills all of the pages that no row sees, and their padding."""
    sizes: Any = {"window": window, "head_dim": 17, "value_dim": 5}
    step = AttentionStep(RAGGED, torch.device("cpu"), dtype, page_size, **sizes)
    native: Any = native_for(torch.device("cpu"), dtype)
    sizes = {"num_pages": step.num_pages, "page_size": page_size, **step.types}
    attention = NativeAttention(step.group, native=native, **sizes)
    attention._keys.fill_(torch.nan)
    attention._values.fill_(torch.nan)
    for row in step.batch.rows:
        step.hide(row)
        for part in step.pages:
            tokens = part[row.pages].flatten(0, 1)
            tokens[row.num_cached :] = torch.nan
            part[row.pages] = tokens.view_as(part[row.pages])
    output = step.attend(attention, cached_of(attention))
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(output.float(), step.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"window": 6},
        {"softcap": 0.4, "has_sinks": True},
        {"value_in_key": True, "value_dim": 48, "num_kv_heads": 1},
    ],
    ids=str,
)
def test_no_bit_depends_on_the_cut_of_a_prompt(kind: Any) -> None:
    outputs = []
    for rows in ([(0, 61, (0,))], [(0, 50, (0,)), (50, 11, (0,))], [(0, 60, (0,)), (60, 1, (0,))]):
        step = AttentionStep([(0, 61, (0,))], torch.device("cpu"), **kind)
        attention = attend("batch-invariant", step)[1]
        found = []
        for num_cached, tokens, masks in rows:
            part = AttentionStep([(num_cached, tokens, masks)], torch.device("cpu"), **kind)
            row = part.batch.rows[0]
            row.pages = row.window_pages = step.batch.rows[0].pages
            own = slice(num_cached, num_cached + len(part.batch.ids))  # padding is another's
            metadata = attention.prepare(part.batch)
            output = attention.attend(
                *(0, step.query[own], step.key[own], step.value[own], step.scaling, metadata),
                softcap=step.softcap,
                sinks=step.sinks,
            )
            found.append(output[:tokens])
        outputs.append(torch.cat(found))
    assert outputs[0].equal(outputs[1])
    assert outputs[0].equal(outputs[2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", range(4))
def test_no_row_attends_to_its_neighbours(bad: int, backend: str) -> None:
    rows = [(0, 2, (1,)), (5, 1, (4,)), (9, 66, (0,)), (0, 8, (3, 1))]
    step = AttentionStep(rows, torch.device("cpu"))
    row = step.batch.rows[bad]
    own = slice(row.start, row.start + row.length)
    for part in (step.query, step.key, step.value):
        part[own] = torch.nan
    for part in step.pages:
        part[row.pages] = torch.nan
    output, attention = attend(backend, step)
    assert output[own].isnan().all()
    assert output.isnan().any(-1).any(-1).sum() == row.length
    attention.recover()
    for part in cached_of(attention):
        others = sorted(set(range(part.shape[1])) - set(row.pages))
        assert part[:, others].isfinite().all()
