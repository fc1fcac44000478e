"""Brings the small tensors of a step to the device in one copy. Knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 8
"""Bytes; a view of a part needs it to begin at a multiple of its element size."""


def stage(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors from the host to a device, all at once.

    They go through pinned memory, so that the host does not wait. That memory comes from torch's
    caching allocator, which hands it out again only when the copy is through.

    Args:
        tensors: on the CPU, of any types and shapes.
        device: where to; on the CPU nothing is copied.

    Returns:
        Tensors of the same types, shapes and values.
    """
    if device.type == "cpu":
        return list(tensors)
    return unpack(pack(tensors, pinned=True).to(device, non_blocking=True), tensors)


def pack(tensors: Sequence[Tensor], *, pinned: bool) -> Tensor:
    """The bytes of tensors side by side: uint8 [bytes]."""
    packed = torch.empty(sum(map(_room, tensors)), dtype=torch.uint8, pin_memory=pinned)
    for part, tensor in zip(unpack(packed, tensors), tensors, strict=True):
        part.copy_(tensor)
    return packed


def unpack(packed: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What `pack` made of tensors, as views of their types and shapes."""
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(torch.split(packed, [*map(_room, tensors)]), tensors, strict=True)
    ]


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
