"""Operators of a decoder layer beside its matrix products and attention, each one launch on a GPU.

Each operator has a twin in plain torch, which a CPU runs and which is the oracle of the Triton
kernel. Both compute in float32 and round once, when they store. Liger's kernels need no more than
torch and Triton either, but they neither write to pages nor read merged products; FlashInfer and
vLLM would bring CUDA libraries of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_rms_norm(residual: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add to the residual stream in place, and return its RMSNorm.

    ``residual`` and ``added`` are [positions, hidden_size], contiguous; None adds nothing.
    ``weight`` is [hidden_size], and ``eps`` is added to the mean square.
    """
    normed: Tensor = torch.ops.marsray.add_rms_norm.default(residual, added, weight, eps)
    return normed


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
    """Rotate queries and keys in place, and write keys and values to their pages.

    Args:
        merged: [positions, (heads + 2 * kv_heads) * head_dim], contiguous: queries, keys and values
            side by side; the values stay as they are.
        cos: float32 [positions, head_dim], contiguous; both halves of a row are equal.
        sin: float32 [positions, head_dim], like ``cos``.
        slots: int64 [positions], slot of each position's key and value.
        key_pages: [pages, page_size, kv_heads, head_dim], contiguous.
        value_pages: like ``key_pages``.
        query_weight: [head_dim], weight of the RMSNorm of each query head before it is rotated;
            None for no norm of queries and keys.
        key_weight: [head_dim], the same for keys.
        eps: added to the mean square.
    """
    torch.ops.marsray.rotate_and_write.default(
        merged, cos, sin, slots, key_pages, value_pages, query_weight, key_weight, eps
    )


def silu_mul(merged: Tensor) -> Tensor:
    """Return SiLU of the left half of the columns times the right half.

    ``merged`` is [positions, 2 * intermediate_size], contiguous, and the result [positions,
    intermediate_size].
    """
    product: Tensor = torch.ops.marsray.silu_mul.default(merged)
    return product


# The twins


def add_rms_norm_twin(residual: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `add_rms_norm`."""
    if added is not None:
        residual += added
    return _rms_norm(residual.float(), weight, eps).to(residual.dtype)


def rotate_and_write_twin(
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
    """See `rotate_and_write`."""
    num_kv_heads, head_dim = key_pages.shape[-2:]
    heads = merged.view(len(merged), -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    parts = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    for part, weight in zip(parts, (query_weight, key_weight), strict=False):
        numbers = part.float()
        if weight is not None:
            numbers = _rms_norm(numbers, weight, eps)
        first, second = numbers.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        part.copy_(numbers * cos[:, None] + turned * sin[:, None])
    for pages, fresh in zip((key_pages, value_pages), parts[1:], strict=True):
        pages.flatten(0, 1).index_copy_(0, slots, fresh.to(pages.dtype))


def silu_mul_twin(merged: Tensor) -> Tensor:
    """See `silu_mul`."""
    gate, up = merged.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(merged.dtype)


def _rms_norm(numbers: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean_square = numbers.square().mean(-1, keepdim=True)
    return numbers * torch.rsqrt(mean_square + eps) * weight.float()


# The operators; `layer_triton` adds their implementations on GPUs


def _like_residual(residual: Tensor, _added: object, _weight: object, _eps: object) -> Tensor:
    return torch.empty_like(residual)


def _nothing(*_: object) -> None:
    return None


def _half(merged: Tensor) -> Tensor:
    return merged.new_empty(len(merged), merged.shape[1] // 2)


torch.library.define(
    "marsray::add_rms_norm",
    "(Tensor(a!) residual, Tensor? added, Tensor weight, float eps) -> Tensor",
)
torch.library.impl("marsray::add_rms_norm", "CPU", add_rms_norm_twin)
torch.library.register_fake("marsray::add_rms_norm", _like_residual)

torch.library.define(
    "marsray::rotate_and_write",
    "(Tensor(a!) merged, Tensor cos, Tensor sin, Tensor slots, Tensor(b!) key_pages, "
    "Tensor(c!) value_pages, Tensor? query_weight, Tensor? key_weight, float eps) -> ()",
)
torch.library.impl("marsray::rotate_and_write", "CPU", rotate_and_write_twin)
torch.library.register_fake("marsray::rotate_and_write", _nothing)

torch.library.define("marsray::silu_mul", "(Tensor merged) -> Tensor")
torch.library.impl("marsray::silu_mul", "CPU", silu_mul_twin)
torch.library.register_fake("marsray::silu_mul", _half)
