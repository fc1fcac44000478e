"""Triton kernel of the operator in `mars_serve.engine.kernels.adapter`, which runs on GPUs.

The module is imported only where there is a GPU or an interpreter, as Triton comes with the CUDA
builds of torch only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_M, _BLOCK_N = 16, 128
_MOST_RANK = 64
"""Most columns of the inner product at once."""


def add_low_rank(outputs: Tensor, inputs: Tensor, down: Tensor, up: Tensor, slots: Tensor) -> None:
    """See `mars_serve.engine.kernels.adapter.add_low_rank`."""
    # All slots' inner products of all positions are one product of a fixed shape, so narrow that
    # leaving some out would gain nothing.
    low = torch.mm(inputs, down.flatten(0, 1).t())
    num_positions, num_columns = outputs.shape
    num_slots, rank, _ = up.shape
    grid = (triton.cdiv(num_positions, _BLOCK_M), triton.cdiv(num_columns, _BLOCK_N), num_slots)
    add_low_rank_kernel[grid](
        outputs,
        low,
        up,
        slots,
        num_positions,
        num_columns,
        num_slots,
        RANK=rank,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=_BLOCK_N,
        BLOCK_R=min(max(triton.next_power_of_2(rank), 16), _MOST_RANK),
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit
def add_low_rank_kernel(
    outputs: tl.tensor,
    low: tl.tensor,
    up: tl.tensor,
    slots: tl.tensor,
    num_positions: tl.tensor,
    num_columns: tl.tensor,
    num_slots: tl.tensor,
    RANK: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_R: tl.constexpr,  # noqa: N803
) -> None:
    """Add one slot's product to a block of columns of some positions in each program.

    Programs of other slots write other rows, and one without a row of its slot ends at once.
    """
    slot = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    gate = tl.load(slots + rows, mask=rows < num_positions, other=-1) == slot
    if tl.max(gate.to(tl.int32), axis=0) == 0:
        return
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < num_columns
    rows = rows.to(tl.int64)
    columns = columns.to(tl.int64)
    product = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for begin in range(0, RANK, BLOCK_R):
        ranks = begin + tl.arange(0, BLOCK_R)
        known = ranks < RANK
        own = slot.to(tl.int64) * RANK + ranks
        left = tl.load(
            low + rows[:, None] * (num_slots * RANK) + own[None, :],
            mask=gate[:, None] & known[None, :],
            other=0.0,
        )
        right = tl.load(
            up + own[:, None] * num_columns + columns[None, :],
            mask=known[:, None] & inside[None, :],
            other=0.0,
        )
        product = tl.dot(left, right, product, input_precision="ieee")
    at = outputs + rows[:, None] * num_columns + columns[None, :]
    mine = gate[:, None] & inside[None, :]  # other rows keep their bits
    stored = tl.load(at, mask=mine, other=0.0)
    total = stored.to(tl.float32) + product
    tl.store(at, total.to(stored.dtype), mask=mine)


torch.library.impl("marsray::add_low_rank", "CUDA", add_low_rank)
