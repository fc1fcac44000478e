"""Triton kernels of the operators in `mars_serve.engine.kernels.recurrence`, which run on GPUs.

A program runs one row's states for some of a head's columns, which do not act on one another: the
state stays in registers from the log to the last mask. A group of masks runs on a copy of them. One
warp holds it, since the sums over its rows would otherwise need barriers at each token.

The module is imported only where there is a GPU or an interpreter, as Triton comes with the CUDA
builds of torch only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mars_serve.engine.kernels.recurrence import ROW_FIELDS, SNAPSHOT_FIELDS

_STATE = 2048
"""Most numbers of a state in a program, 64 registers of each thread of a warp; the copy for masks
takes as many."""
_CHANNELS = 256
_UNALIGNED = ["rows", "snapshots", "sources", "kept", "kept_snapshots"]
"""Arguments that are views of one array; see `attention_triton`."""


def scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor | None,
    states: Tensor,
    keys: Tensor,
    learned: Tensor,
    decays: Tensor,
    rows: Tensor,
    snapshots: Tensor,
) -> Tensor:
    """See `mars_serve.engine.kernels.recurrence.scan`."""
    (_, heads, value_dim), key_dim = value.shape, key.shape[-1]
    output = torch.zeros_like(value)
    block_k = triton.next_power_of_2(key_dim)
    block_v = min(triton.next_power_of_2(value_dim), max(1, _STATE // block_k))
    scan_kernel[(triton.cdiv(value_dim, block_v), heads, len(rows))](
        *(query, key, value, decay, decay if rate is None else rate, output),
        *(states, keys, learned, decays, rows, snapshots, rows.stride(0)),
        FIELDS=ROW_FIELDS,
        SNAPSHOT=SNAPSHOT_FIELDS,
        ENTRIES=keys.shape[1],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        IS_DELTA=rate is not None,
        RATES=decay.shape[-1],
        num_warps=1,
        enable_fp_fusion=True,
    )
    return output


@triton.jit(do_not_specialize=["row_stride"], do_not_specialize_on_alignment=["rows", "snapshots"])
def scan_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    decay: tl.tensor,
    rate: tl.tensor,
    output: tl.tensor,
    states: tl.tensor,
    keys: tl.tensor,
    learned: tl.tensor,
    decays: tl.tensor,
    rows: tl.tensor,
    snapshots: tl.tensor,
    row_stride: tl.tensor,
    FIELDS: tl.constexpr,  # noqa: N803
    SNAPSHOT: tl.constexpr,  # noqa: N803
    ENTRIES: tl.constexpr,  # noqa: N803
    KEY_DIM: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
    IS_DELTA: tl.constexpr,  # noqa: N803
    RATES: tl.constexpr,  # noqa: N803
) -> None:
    """Run some columns of one head's state over one row in each program."""
    row = rows + tl.program_id(2) * row_stride
    num_tokens = tl.load(row + 1).to(tl.int32)
    if num_tokens == 0:
        return
    start, num_drafts = tl.load(row).to(tl.int32), tl.load(row + 2).to(tl.int32)
    read, write = tl.load(row + 3), tl.load(row + 5)
    num_right = tl.load(row + 4).to(tl.int32)
    first, end = tl.load(row + 6).to(tl.int32), tl.load(row + 7).to(tl.int32)
    block, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    rank, column = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_rank, is_column = rank < KEY_DIM, column < VALUE_DIM
    place = rank[:, None] * VALUE_DIM + column[None, :]  # in a head's state
    inside = is_rank[:, None] & is_column[None, :]
    stride, at_head = num_heads * KEY_DIM * VALUE_DIM, states + head * KEY_DIM * VALUE_DIM

    state = tl.load(at_head + read * stride + place, mask=inside, other=0.0)
    for entry in range(num_right):
        at = (read * ENTRIES + entry) * num_heads + head
        state = _decayed(state, decays, at, rank, is_rank, RATES)
        keyed = tl.load(keys + at * KEY_DIM + rank, mask=is_rank, other=0.0)
        gained = tl.load(learned + at * VALUE_DIM + column, mask=is_column, other=0.0)
        state += keyed[:, None] * gained[None, :]
        _take(
            *(state, entry + 1, at_head, stride, snapshots, first, end),
            *(place, inside, SNAPSHOT),
        )
    for token in range(num_tokens):
        at = (start + token).to(tl.int64) * num_heads + head
        state, _ = _learn(
            *(state, at, query, key, value, decay, rate, output),
            *(rank, column, is_rank, is_column, KEY_DIM, VALUE_DIM, IS_DELTA, RATES),
        )
        _take(
            *(state, num_right + token + 1, at_head, stride, snapshots, first, end),
            *(place, inside, SNAPSHOT),
        )
    tl.store(at_head + write * stride + place, state, mask=inside)

    mask = start + num_tokens + num_drafts
    for outcome in range(num_drafts + 1):
        if outcome > 0:
            at = (start + num_tokens + outcome - 1).to(tl.int64) * num_heads + head
            state, gained = _learn(
                *(state, at, query, key, value, decay, rate, output),
                *(rank, column, is_rank, is_column, KEY_DIM, VALUE_DIM, IS_DELTA, RATES),
            )
            to = (write * ENTRIES + outcome - 1) * num_heads + head
            tl.store(learned + to * VALUE_DIM + column, gained, mask=is_column)
            if block == 0:
                _copy(key, at, keys, to, rank, is_rank, KEY_DIM)
                _copy(decay, at, decays, to, rank, rank < RATES, RATES)
        branch, num_masks = state, tl.load(row + FIELDS + outcome).to(tl.int32)
        for number in range(num_masks):
            branch, _ = _learn(
                *(branch, (mask + number).to(tl.int64) * num_heads + head),
                *(query, key, value, decay, rate, output),
                *(rank, column, is_rank, is_column, KEY_DIM, VALUE_DIM, IS_DELTA, RATES),
            )
        mask += num_masks


@triton.jit
def _learn(
    state: tl.tensor,
    at: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    decay: tl.tensor,
    rate: tl.tensor,
    output: tl.tensor,
    rank: tl.tensor,
    column: tl.tensor,
    is_rank: tl.tensor,
    is_column: tl.tensor,
    KEY_DIM: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    IS_DELTA: tl.constexpr,  # noqa: N803
    RATES: tl.constexpr,  # noqa: N803
) -> tuple[tl.tensor, tl.tensor]:
    """Return the state behind a position and what it has learned there; store the output."""
    queried = tl.load(query + at * KEY_DIM + rank, mask=is_rank, other=0.0)
    keyed = tl.load(key + at * KEY_DIM + rank, mask=is_rank, other=0.0)
    gained = tl.load(value + at * VALUE_DIM + column, mask=is_column, other=0.0)
    state = _decayed(state, decay, at, rank, is_rank, RATES)
    if IS_DELTA:
        gained = tl.load(rate + at) * (gained - tl.sum(keyed[:, None] * state, axis=0))
    state += keyed[:, None] * gained[None, :]
    result = tl.sum(queried[:, None] * state, axis=0)
    tl.store(output + at * VALUE_DIM + column, result, mask=is_column)
    return state, gained


@triton.jit
def _take(
    state: tl.tensor,
    count: tl.tensor,
    at_head: tl.tensor,
    stride: tl.tensor,
    snapshots: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    SNAPSHOT: tl.constexpr,  # noqa: N803
) -> None:
    """Store a state to the slots of a row's snapshots behind so many entries and tokens."""
    for index in range(first, end):
        if tl.load(snapshots + index * SNAPSHOT) == count:
            slot = tl.load(snapshots + index * SNAPSHOT + 1)
            tl.store(at_head + slot * stride + place, state, mask=inside)


@triton.jit
def _copy(
    source: tl.tensor,
    at: tl.tensor,
    log: tl.tensor,
    to: tl.tensor,
    rank: tl.tensor,
    mask: tl.tensor,
    SIZE: tl.constexpr,  # noqa: N803
) -> None:
    tl.store(log + to * SIZE + rank, tl.load(source + at * SIZE + rank, mask=mask), mask=mask)


@triton.jit
def _decayed(
    state: tl.tensor,
    decay: tl.tensor,
    at: tl.tensor,
    rank: tl.tensor,
    is_rank: tl.tensor,
    RATES: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    if RATES == 1:
        state *= tl.exp(tl.load(decay + at))
    else:
        state *= tl.exp(tl.load(decay + at * RATES + rank, mask=is_rank, other=0.0))[:, None]
    return state


def convolve(
    inputs: Tensor,
    weight: Tensor,
    slots: Tensor,
    sources: Tensor,
    kept: Tensor,
    rows: Tensor,
    snapshots: Tensor,
    kept_snapshots: Tensor,
) -> Tensor:
    """See `mars_serve.engine.kernels.recurrence.convolve`."""
    num_positions, channels = inputs.shape
    output = torch.empty_like(inputs, dtype=torch.float32)
    grid = (triton.cdiv(channels, _CHANNELS), num_positions + len(rows))
    convolve_kernel[grid](
        *(inputs, weight, slots, output, sources, kept, rows, snapshots, kept_snapshots),
        *(num_positions, channels, rows.stride(0)),
        KERNEL=weight.shape[1],
        SOURCES=sources.shape[1],
        WINDOW=kept.shape[1],
        KEPT=kept_snapshots.shape[1],
        SNAPSHOT=SNAPSHOT_FIELDS,
        BLOCK=_CHANNELS,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return output


@triton.jit(
    do_not_specialize=["num_positions", "row_stride"], do_not_specialize_on_alignment=_UNALIGNED
)
def convolve_kernel(
    inputs: tl.tensor,
    weight: tl.tensor,
    slots: tl.tensor,
    output: tl.tensor,
    sources: tl.tensor,
    kept: tl.tensor,
    rows: tl.tensor,
    snapshots: tl.tensor,
    kept_snapshots: tl.tensor,
    num_positions: tl.tensor,
    channels: tl.tensor,
    row_stride: tl.tensor,
    KERNEL: tl.constexpr,  # noqa: N803
    SOURCES: tl.constexpr,  # noqa: N803
    WINDOW: tl.constexpr,  # noqa: N803
    KEPT: tl.constexpr,  # noqa: N803
    SNAPSHOT: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """Convolve some channels at one position in each program, or keep inputs of one row."""
    channel, index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    inside = channel < channels
    if index < num_positions:
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for back in tl.static_range(KERNEL):
            source = tl.load(sources + index * SOURCES + back)
            found = _input(inputs, slots, source, channel, inside, num_positions, channels)
            tap = tl.load(weight + channel * KERNEL + KERNEL - 1 - back, mask=inside, other=0.0)
            total += found.to(tl.float32) * tap.to(tl.float32)
        at = output + index.to(tl.int64) * channels + channel
        tl.store(at, total, mask=inside)
    else:
        number = index - num_positions
        row = rows + number * row_stride
        if tl.load(row + 1) > 0:
            to = tl.load(row + 5) * WINDOW
            for place in range(WINDOW):
                source = tl.load(kept + number * WINDOW + place)
                found = _input(inputs, slots, source, channel, inside, num_positions, channels)
                tl.store(slots + (to + place) * channels + channel, found, mask=inside)
            for taken in range(tl.load(row + 6).to(tl.int32), tl.load(row + 7).to(tl.int32)):
                to = tl.load(snapshots + taken * SNAPSHOT + 1) * WINDOW
                for place in range(KEPT):
                    source = tl.load(kept_snapshots + taken * KEPT + place)
                    found = _input(inputs, slots, source, channel, inside, num_positions, channels)
                    tl.store(slots + (to + place) * channels + channel, found, mask=inside)


@triton.jit
def _input(
    inputs: tl.tensor,
    slots: tl.tensor,
    source: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    num_positions: tl.tensor,
    channels: tl.tensor,
) -> tl.tensor:
    """Return channels of an input of the step or, behind these, of one in the slots."""
    own = inputs + source * channels + channel
    other = slots + (source - num_positions) * channels + channel
    return tl.load(tl.where(source < num_positions, own, other), mask=inside, other=0.0)


torch.library.impl("marsray::scan", "CUDA", scan)
torch.library.impl("marsray::convolve", "CUDA", convolve)
