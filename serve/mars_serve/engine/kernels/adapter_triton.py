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


def add_low_rank(
    outputs: Tensor, inputs: Tensor, down: Tensor, up: Tensor, is_mask: Tensor, scale: float
) -> None:
    """See `mars_serve.engine.kernels.adapter.add_low_rank`."""
    low = torch.mm(inputs, down.t())  # so narrow that leaving rows out would gain nothing
    num_positions, num_columns = outputs.shape
    grid = (triton.cdiv(num_positions, _BLOCK_M), triton.cdiv(num_columns, _BLOCK_N))
    rank = up.shape[1]
    add_low_rank_kernel[grid](
        outputs,
        low,
        up,
        is_mask,
        scale,
        num_positions,
        num_columns,
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
    is_mask: tl.tensor,
    scale: tl.tensor,
    num_positions: tl.tensor,
    num_columns: tl.tensor,
    RANK: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_R: tl.constexpr,  # noqa: N803
) -> None:
    """Handle a block of columns of some positions in each program, if a mask is among them."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    gate = tl.load(is_mask + rows, mask=rows < num_positions, other=0).to(tl.int32)
    if tl.max(gate, axis=0) == 0:
        return
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < num_columns
    rows = rows.to(tl.int64)
    columns = columns.to(tl.int64)
    product = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for begin in range(0, RANK, BLOCK_R):
        ranks = begin + tl.arange(0, BLOCK_R)
        known = ranks < RANK
        left = tl.load(
            low + rows[:, None] * RANK + ranks[None, :],
            mask=(gate != 0)[:, None] & known[None, :],
            other=0.0,
        )
        right = tl.load(
            up + columns[:, None] * RANK + ranks[None, :],
            mask=inside[:, None] & known[None, :],
            other=0.0,
        )
        product = tl.dot(left, tl.trans(right), product, input_precision="ieee")
    at = outputs + rows[:, None] * num_columns + columns[None, :]
    own = (gate != 0)[:, None] & inside[None, :]  # other rows keep their bits
    stored = tl.load(at, mask=own, other=0.0)
    total = stored.to(tl.float32) + scale * product
    tl.store(at, total.to(stored.dtype), mask=own)


torch.library.impl("marsray::add_low_rank", "CUDA", add_low_rank)
