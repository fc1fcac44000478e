"""Brings the small tensors of a step to the device in one copy. Knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 8
"""Bytes; a view of a part needs it to begin at a multiple of its element size."""


def stage(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors from the host to a device, all at once.

    For a GPU they go through pinned memory, so that the host does not wait. That memory comes from
    torch's caching allocator, which hands it out again only when the copy is through.

    Args:
        tensors: on the CPU, of any types and shapes.
        device: where to.

    Returns:
        Tensors of the same types, shapes and values; all are views of one.
    """
    used = [tensor.numel() * tensor.itemsize for tensor in tensors]
    sizes = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in used]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, size, tensor in zip(torch.split(packed, sizes), used, tensors, strict=True):
        part[:size].copy_(tensor.flatten().view(torch.uint8))
    parts = torch.split(packed.to(device, non_blocking=True), sizes)
    return [
        part[:size].view(tensor.dtype).view(tensor.shape)
        for part, size, tensor in zip(parts, used, tensors, strict=True)
    ]
