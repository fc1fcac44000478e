"""Attention over pages as Triton kernels; see `mars_serve.engine.kernels.attention`.

A program attends one piece for one key/value head. All query heads of that head, or as many as the
registers hold, are rows of its matrix products, so that each key is read once for them. Keys whose
first numbers are their value are read in two tiles, the first of which is the block of values, too.
Scores are in base 2, as the hardware's exponential is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mars_serve.engine.kernels.attention import (
    COMBINE_FIELDS,
    PIECE_FIELDS,
    has_large_memory,
    heads_of_tile,
)

_LOG2_E = tl.constexpr(1.4426950408889634)
_UNALIGNED = ["page_table", "leading", "own", "positions", "pieces", "oldest", "combine"]
"""Arguments that are views of one array, at an alignment that varies with the shape of the step;
the kernels are not compiled anew for it."""


class Launch(NamedTuple):
    """How a kernel is compiled."""

    num_warps: int
    num_stages: int
    """Blocks of keys and values on their way from memory at once."""


def launch_of(block_m: int, head_dim: int, block_bytes: int, is_large: bool) -> Launch:
    """Return how attention is compiled for a tile, a head size and a device's shared memory.

    Four warps share a matrix product of up to 64 rows, as the instruction of compute capability 9
    wants. Larger tiles and heads have eight, whose registers then hold the results. A block of keys
    and one of values mostly take 32 KiB together, and the queries up to 32: three such blocks on
    their way hide the latency of memory and leave room for a second program. Products of few rows
    keep one block less in shared memory, so that there may be one more of these ``block_bytes``.
    """
    num_warps = 8 if block_m > 64 or (block_m >= 32 and head_dim > 128) else 4
    num_stages = 3 if is_large else 2
    return Launch(num_warps, num_stages + (block_m <= 32 and block_bytes <= 32 << 10))


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    leading: Tensor,
    own: Tensor,
    positions: Tensor,
    pieces: Tensor,
    combine: Tensor,
    scaling: float,
    block_m: int,
    block_n: int,
    num_slots: int,
    oldest: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """See `mars_serve.engine.kernels.attention.paged_attention_twin`."""
    (num_positions, num_heads, key_dim), value_dim = query.shape, value.shape[-1]
    page_size, num_kv_heads = key_pages.shape[1:3]
    for tensor in (query, key, value):
        assert tensor.stride(-1) == 1, "numbers of a head lie side by side"
    assert key_pages.is_contiguous()
    value_stride = value_pages.stride(2)
    assert value_stride in (value_dim, key_dim), "values lie side by side, or keys begin with them"
    token_stride = num_kv_heads * value_stride
    assert value_pages.stride() == (page_size * token_stride, token_stride, value_stride, 1)
    heads = heads_of_tile(num_heads // num_kv_heads, block_m)
    split = key_dim if value_stride == value_dim else value_dim
    block_k, block_r, block_v = (
        max(16, triton.next_power_of_2(each)) for each in (split, key_dim - split, value_dim)
    )
    output = query.new_empty(num_positions, num_heads, value_dim)
    size = (num_slots, num_heads // heads, block_m, value_dim)
    partial = query.new_empty(size, dtype=torch.float32) if num_slots else output
    sums = query.new_empty(*size[:3], 2, dtype=torch.float32) if num_slots else output
    block_bytes = block_n * (block_k + (block_r if split < key_dim else block_v)) * query.itemsize
    is_large = has_large_memory(query.device)
    launch = launch_of(block_m, max(block_k, block_v), block_bytes, is_large)
    # Scores are in base 2; under the hyperbolic tangent of a soft cap, their doubles are.
    scale = scaling * _LOG2_E.value if softcap is None else scaling / softcap * 2 * _LOG2_E.value
    attend_kernel[(len(pieces), num_heads // heads)](
        *(query, key, value, key_pages, value_pages, output, partial, sums, page_table),
        *(leading, own, positions, pieces),
        *(positions if oldest is None else oldest, output if sinks is None else sinks),
        *(scale, 0.0 if softcap is None else softcap * _LOG2_E.value, key_scale, value_scale),
        *(page_table.stride(0), *query.stride()[:2], *key.stride()[:2], *value.stride()[:2]),
        FIELDS=PIECE_FIELDS,
        PAGE_SIZE=page_size,
        KEY_DIM=key_dim,
        SPLIT=split,
        VALUE_DIM=value_dim,
        HEADS=heads,
        GROUPS=num_heads // num_kv_heads // heads,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_R=block_r,
        BLOCK_V=block_v,
        HAS_OLDEST=oldest is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_SCALES=key_scale != 1.0 or value_scale != 1.0,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=True,  # by default it depends on Triton's version
    )
    if num_slots:
        combine_pieces_kernel[(num_positions, num_heads)](
            *(output, partial, sums, combine),
            FIELDS=COMBINE_FIELDS,
            HEAD_DIM=value_dim,
            HEADS=heads,
            BLOCK_M=block_m,
            BLOCK_D=block_v,
            BLOCK_S=min(16, 4096 // block_v),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return output


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_UNALIGNED)
def attend_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    output: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    page_table: tl.tensor,
    leading: tl.tensor,
    own: tl.tensor,
    positions: tl.tensor,
    pieces: tl.tensor,
    oldest: tl.tensor,
    sinks: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    table_stride: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    FIELDS: tl.constexpr,  # noqa: N803
    PAGE_SIZE: tl.constexpr,  # noqa: N803
    KEY_DIM: tl.constexpr,  # noqa: N803
    SPLIT: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    BLOCK_R: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
    HAS_OLDEST: tl.constexpr,  # noqa: N803
    HAS_SOFTCAP: tl.constexpr,  # noqa: N803
    HAS_SINKS: tl.constexpr,  # noqa: N803
    HAS_SCALES: tl.constexpr,  # noqa: N803
) -> None:
    """Attend one piece for a group of query heads, of which a key/value head has ``GROUPS``."""
    piece = pieces + tl.program_id(0) * FIELDS
    first, end = tl.load(piece + 1).to(tl.int32), tl.load(piece + 2).to(tl.int32)
    if first >= end:
        return
    group, num_groups = tl.program_id(1), tl.num_programs(1)
    kv_head, num_kv_heads = group // GROUPS, num_groups // GROUPS
    table = page_table + tl.load(piece) * table_stride
    start = tl.load(piece + 3).to(tl.int32)
    num_cached = tl.load(piece + 4).to(tl.int32)
    begin, stop = tl.load(piece + 5).to(tl.int32), tl.load(piece + 6).to(tl.int32)
    slot = tl.load(piece + 7)

    lane = tl.arange(0, BLOCK_M)
    position = first + lane // HEADS
    head = group * HEADS + lane % HEADS
    inside = (lane < BLOCK_M // HEADS * HEADS) & (position < end)
    at = position.to(tl.int64) * query_stride + head * query_head_stride
    queries = _load(query, at, inside, SPLIT, BLOCK_K)
    others = queries  # in the second tile, if there is one
    if SPLIT < KEY_DIM:
        others = _load(query + SPLIT, at, inside, KEY_DIM - SPLIT, BLOCK_R)
    lead = tl.load(leading + position, mask=inside, other=0).to(tl.int32)
    since = tl.load(own + position, mask=inside, other=0).to(tl.int32)
    since_first = position * 0  # the first position that each query sees
    cached_blocks = tl.cdiv(num_cached, BLOCK_N)
    first_block = 0
    if HAS_OLDEST:
        since_first = tl.load(oldest + position, mask=inside, other=2**30).to(tl.int32)
        first_block = tl.minimum(tl.min(since_first, axis=0) // BLOCK_N, cached_blocks)

    total = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    weight = tl.zeros([BLOCK_M], dtype=tl.float32)
    largest = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32) * _LOG2_E
        largest = tl.where(begin == first_block, sink, largest)  # in the tile's first piece
        weight = tl.where(begin == first_block, 1.0, weight)

    total, weight, largest = _attend_cached(
        *(queries, others, key_pages + kv_head * KEY_DIM, value_pages + kv_head * VALUE_DIM),
        *(table, num_kv_heads, begin, tl.minimum(stop, cached_blocks), num_cached, since_first),
        *(scale, cap, key_scale, value_scale, total, weight, largest),
        *(PAGE_SIZE, KEY_DIM, SPLIT, VALUE_DIM, BLOCK_N, HAS_OLDEST, HAS_SOFTCAP, HAS_SCALES),
    )
    total, weight, largest = _attend_own(
        *(queries, others),
        key + start.to(tl.int64) * key_stride + kv_head * key_head_stride,
        value + start.to(tl.int64) * value_stride + kv_head * value_head_stride,
        *(positions + start, key_stride, value_stride),
        *(tl.maximum(begin - cached_blocks, 0), stop - cached_blocks, end - start),
        *(position - start, lead, since, since_first, scale, cap, total, weight, largest),
        *(KEY_DIM, SPLIT, VALUE_DIM, BLOCK_N, HAS_OLDEST, HAS_SOFTCAP),
    )
    column = tl.arange(0, BLOCK_V)
    mask = inside[:, None] & (column < VALUE_DIM)[None, :]
    if slot < 0:
        total = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
        at = (position.to(tl.int64) * num_groups * HEADS + head) * VALUE_DIM
        tl.store(output + at[:, None] + column[None, :], total.to(queries.dtype), mask=mask)
    else:
        at = (slot * num_groups + group) * BLOCK_M + lane
        tl.store(partial + at[:, None] * VALUE_DIM + column[None, :], total, mask=mask)
        tl.store(sums + at * 2, largest, mask=inside)
        tl.store(sums + at * 2 + 1, weight, mask=inside)


@triton.jit
def _attend_cached(
    queries: tl.tensor,
    others: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    table: tl.tensor,
    num_kv_heads: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    num_cached: tl.tensor,
    oldest: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    largest: tl.tensor,
    PAGE_SIZE: tl.constexpr,  # noqa: N803
    KEY_DIM: tl.constexpr,  # noqa: N803
    SPLIT: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    HAS_OLDEST: tl.constexpr,  # noqa: N803
    HAS_SOFTCAP: tl.constexpr,  # noqa: N803
    HAS_SCALES: tl.constexpr,  # noqa: N803
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to blocks of cached keys, all of which are visible but for the oldest.

    Those that no query sees are not read: their pages may hold anything.
    """
    rest = tl.arange(0, BLOCK_N)
    least, page_heads = tl.min(oldest, axis=0), PAGE_SIZE * num_kv_heads
    if HAS_SCALES:
        scale *= key_scale
    for block in range(begin, stop):
        index = block * BLOCK_N + rest
        live = index < num_cached
        if HAS_OLDEST:
            live = live & (index >= least)
        if PAGE_SIZE % BLOCK_N == 0:  # the block lies in one page
            page = tl.load(table + block * BLOCK_N // PAGE_SIZE)
            place = page * page_heads + (block * BLOCK_N % PAGE_SIZE + rest) * num_kv_heads
        else:
            page = tl.load(table + index // PAGE_SIZE, mask=live, other=0)
            place = page * page_heads + index % PAGE_SIZE * num_kv_heads
        visible = live[None, :]
        if HAS_OLDEST:
            visible = visible & (index[None, :] >= oldest[:, None])
        total, weight, largest = _attend_block(
            *(queries, others, key_pages, value_pages, place * KEY_DIM, place * VALUE_DIM),
            *(live, visible, scale, cap, total, weight, largest),
            *(KEY_DIM, SPLIT, VALUE_DIM, HAS_SOFTCAP),
        )
    if HAS_SCALES:
        total *= value_scale
    return total, weight, largest


@triton.jit
def _attend_own(
    queries: tl.tensor,
    others: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    positions: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    num_keys: tl.tensor,
    offset: tl.tensor,
    lead: tl.tensor,
    since: tl.tensor,
    oldest: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    largest: tl.tensor,
    KEY_DIM: tl.constexpr,  # noqa: N803
    SPLIT: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    HAS_OLDEST: tl.constexpr,  # noqa: N803
    HAS_SOFTCAP: tl.constexpr,  # noqa: N803
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to blocks of the row's own keys; see `BatchRow.visible`."""
    rest = tl.arange(0, BLOCK_N)
    for block in range(begin, stop):
        index = block * BLOCK_N + rest
        live = index < num_keys
        before, after = index[None, :] < lead[:, None], index[None, :] >= since[:, None]
        visible = before | (after & (index[None, :] <= offset[:, None]))
        if HAS_OLDEST:
            where = tl.load(positions + index, mask=live, other=0).to(tl.int32)
            visible = visible & (where[None, :] >= oldest[:, None])
        total, weight, largest = _attend_block(
            *(queries, others, key, value),
            *(index.to(tl.int64) * key_stride, index.to(tl.int64) * value_stride),
            *(live, visible, scale, cap, total, weight, largest),
            *(KEY_DIM, SPLIT, VALUE_DIM, HAS_SOFTCAP),
        )
    return total, weight, largest


@triton.jit
def _attend_block(
    queries: tl.tensor,
    others: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    key_place: tl.tensor,
    value_place: tl.tensor,
    live: tl.tensor,
    visible: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    largest: tl.tensor,
    KEY_DIM: tl.constexpr,  # noqa: N803
    SPLIT: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    HAS_SOFTCAP: tl.constexpr,  # noqa: N803
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add a block of keys to the sums of values and weights, relative to the largest score."""
    keys = _load(key, key_place, live, SPLIT, queries.shape[1])
    if SPLIT < KEY_DIM:
        values = keys
        rest = _load(key + SPLIT, key_place, live, KEY_DIM - SPLIT, others.shape[1])
        scores = tl.dot(others, tl.trans(rest.to(queries.dtype)), input_precision="ieee")
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), scores, input_precision="ieee")
        scores *= scale
    else:
        values = _load(value, value_place, live, VALUE_DIM, total.shape[1])
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores))  # cap times the hyperbolic tangent
    scores = tl.where(visible, scores, -float("inf"))
    new = tl.maximum(largest, tl.max(scores, axis=1))
    base = tl.where(new == -float("inf"), 0.0, new)  # no query's first keys may all be hidden
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(largest - base)
    weight = weight * decay + tl.sum(weights, axis=1)
    total = total * decay[:, None]
    total = tl.dot(
        weights.to(queries.dtype), values.to(queries.dtype), total, input_precision="ieee"
    )
    return total, weight, new


@triton.jit
def _load(
    base: tl.tensor,
    place: tl.tensor,
    live: tl.tensor,
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """Load a block of keys or values; those not live are 0, whatever the memory holds."""
    column = tl.arange(0, BLOCK_D)
    mask = live[:, None]
    if HEAD_DIM != BLOCK_D:
        mask = mask & (column < HEAD_DIM)[None, :]
    return tl.load(base + place[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def combine_pieces_kernel(
    output: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    combine: tl.tensor,
    FIELDS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
    BLOCK_S: tl.constexpr,  # noqa: N803
) -> None:
    """Combine the pieces of one position and query head, if its tile has several."""
    position, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    fields = combine + position * FIELDS
    count = tl.load(fields + 1).to(tl.int32)
    if count == 0:
        return
    num_heads = tl.num_programs(1)
    lane = tl.load(fields + 2) * HEADS + head % HEADS
    column, rest = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    slot = tl.load(fields)
    total = tl.zeros([BLOCK_D], dtype=tl.float32)
    weight, largest = 0.0, -float("inf")
    for begin in range(0, count, BLOCK_S):
        live = begin + rest < count
        at = ((slot + begin + rest) * (num_heads // HEADS) + head // HEADS) * BLOCK_M + lane
        each = tl.load(sums + at * 2, mask=live, other=-float("inf"))
        mask = live[:, None] & (column < HEAD_DIM)[None, :]
        part = tl.load(partial + at[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
        new = tl.maximum(largest, tl.max(each, axis=0))
        base = tl.where(new == -float("inf"), 0.0, new)
        factor, decay = tl.exp2(each - base), tl.exp2(largest - base)
        of_pieces = tl.load(sums + at * 2 + 1, mask=live, other=0.0)
        weight = weight * decay + tl.sum(of_pieces * factor, axis=0)
        total = total * decay + tl.sum(part * factor[:, None], axis=0)
        largest = new
    total = total / tl.where(weight == 0.0, 1.0, weight)
    at = (position * num_heads + head) * HEAD_DIM
    tl.store(output + at + column, total.to(output.dtype.element_ty), mask=column < HEAD_DIM)


torch.library.impl("marsray::paged_attention", "CUDA", paged_attention)
