"""Triton kernels of the operators in `mars_serve.engine.kernels.layer`, which run on GPUs.

The module is imported only where there is a GPU or an interpreter, as Triton comes with the CUDA
builds of torch only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ACTIVATION_BLOCK = 1024
_ELEMENTS_PER_WARP = 512


def add_rms_norm(residual: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `mars_serve.engine.kernels.layer.add_rms_norm`."""
    output = residual.new_empty(residual.shape)
    num_positions, size = residual.shape
    block = triton.next_power_of_2(size)
    add_rms_norm_kernel[(num_positions,)](
        residual,
        residual if added is None else added,
        weight,
        output,
        size,
        eps,
        HAS_ADDED=added is not None,
        BLOCK=block,
        num_warps=min(max(block // _ELEMENTS_PER_WARP, 1), 16),
        enable_fp_fusion=True,  # by default it depends on Triton's version
    )
    return output


def rotate_and_write(
    merged: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
) -> None:
    """See `mars_serve.engine.kernels.layer.rotate_and_write`."""
    num_kv_heads, head_dim = key_pages.shape[-2:]
    num_positions, width = merged.shape
    num_all = width // head_dim
    has_norm = query_weight is not None
    rotate_and_write_kernel[(num_positions, num_all)](
        merged,
        cos,
        sin,
        slots,
        key_pages,
        value_pages,
        query_weight if has_norm else cos,
        key_weight if has_norm else cos,
        eps,
        num_all - 2 * num_kv_heads,
        num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK=triton.next_power_of_2(head_dim // 2),
        HAS_NORM=has_norm,
        num_warps=1,
        enable_fp_fusion=True,
    )


def silu_mul(merged: Tensor) -> Tensor:
    """See `mars_serve.engine.kernels.layer.silu_mul`."""
    num_positions, size = len(merged), merged.shape[1] // 2
    output = merged.new_empty(num_positions, size)
    silu_mul_kernel[(num_positions, triton.cdiv(size, _ACTIVATION_BLOCK))](
        merged, output, size, BLOCK=_ACTIVATION_BLOCK, num_warps=4, enable_fp_fusion=True
    )
    return output


@triton.jit
def add_rms_norm_kernel(
    residual: tl.tensor,
    added: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    HAS_ADDED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """Normalise one position in each program."""
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    at = tl.program_id(0).to(tl.int64) * size + columns
    stored = tl.load(residual + at, mask=inside, other=0.0)
    if HAS_ADDED:
        more = tl.load(added + at, mask=inside, other=0.0)
        stored = (stored.to(tl.float32) + more.to(tl.float32)).to(stored.dtype)
        tl.store(residual + at, stored, mask=inside)
    numbers = stored.to(tl.float32)
    mean_square = tl.sum(numbers * numbers, axis=0) / size
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = numbers * tl.rsqrt(mean_square + eps) * scale
    tl.store(output + at, normed.to(stored.dtype), mask=inside)


@triton.jit
def rotate_and_write_kernel(
    merged: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    eps: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    HAS_NORM: tl.constexpr,  # noqa: N803
) -> None:
    """Handle one head of one position in each program, as two halves that rotate together."""
    half: tl.constexpr = HEAD_DIM // 2
    position, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < half
    at = merged + (position * tl.num_programs(1) + head) * HEAD_DIM + columns
    first = tl.load(at, mask=inside, other=0.0)
    second = tl.load(at + half, mask=inside, other=0.0)
    slot = tl.load(slots + position)
    num_rotated = num_heads + num_kv_heads
    if head < num_rotated:
        left, right = first.to(tl.float32), second.to(tl.float32)
        if HAS_NORM:
            mean_square = tl.sum(left * left + right * right, axis=0) / HEAD_DIM
            weight = query_weight
            if head >= num_heads:
                weight = key_weight
            scale = tl.rsqrt(mean_square + eps)
            left *= scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
            right *= scale * tl.load(weight + half + columns, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + position * HEAD_DIM + columns, mask=inside, other=0.0)
        s = tl.load(sin + position * HEAD_DIM + columns, mask=inside, other=0.0)
        rotated_left = (left * c - right * s).to(first.dtype)
        rotated_right = (right * c + left * s).to(first.dtype)
        tl.store(at, rotated_left, mask=inside)
        tl.store(at + half, rotated_right, mask=inside)
        if head >= num_heads:
            kept = (slot * num_kv_heads + head - num_heads) * HEAD_DIM + columns
            kind = key_pages.dtype.element_ty
            tl.store(key_pages + kept, rotated_left.to(kind), mask=inside)
            tl.store(key_pages + kept + half, rotated_right.to(kind), mask=inside)
    else:
        kept = (slot * num_kv_heads + head - num_rotated) * HEAD_DIM + columns
        kind = value_pages.dtype.element_ty
        tl.store(value_pages + kept, first.to(kind), mask=inside)
        tl.store(value_pages + kept + half, second.to(kind), mask=inside)


@triton.jit
def silu_mul_kernel(
    merged: tl.tensor,
    output: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """Handle a block of columns of one position in each program."""
    position = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(merged + position * 2 * size + columns, mask=inside, other=0.0)
    up = tl.load(merged + position * 2 * size + size + columns, mask=inside, other=0.0)
    number = gate.to(tl.float32)
    product = number * tl.sigmoid(number) * up.to(tl.float32)
    tl.store(output + position * size + columns, product.to(gate.dtype), mask=inside)


for _launch in (add_rms_norm, rotate_and_write, silu_mul):
    torch.library.impl(f"marsray::{_launch.__name__}", "CUDA", _launch)
