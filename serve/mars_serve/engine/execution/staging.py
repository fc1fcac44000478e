"""Copies the small tensors of a step to the device in one transfer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

_ALIGNMENT = 8
"""Bytes of which each part's start is a multiple, as a view of any element type needs."""

Struct = TypeVar("Struct")


def stage(struct: Struct, device: torch.device) -> Struct:
    """Copy all tensors of a dataclass, nested ones included, to a device in one transfer.

    The tensors go through pinned memory, so that the host does not wait. Torch's caching allocator
    reuses that memory only after the transfer.

    Args:
        struct: a dataclass whose tensors are on the CPU, of any types and shapes.
        device: where to copy them; on the CPU nothing is copied.

    Returns:
        A dataclass with tensors of the same types, shapes and values.
    """
    if device.type == "cpu":
        return struct
    tensors = list(_tensors(struct))
    staged = unpack(pack(tensors, pinned=True).to(device, non_blocking=True), tensors)
    copied: Struct = _with_tensors(struct, iter(staged))
    return copied


def pack(tensors: Sequence[Tensor], *, pinned: bool) -> Tensor:
    """Return the bytes of tensors side by side: uint8 [bytes]."""
    packed = torch.empty(sum(map(_room, tensors)), dtype=torch.uint8, pin_memory=pinned)
    for part, tensor in zip(unpack(packed, tensors), tensors, strict=True):
        part.copy_(tensor)
    return packed


def unpack(packed: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Undo `pack`: return views of ``packed`` with the types and shapes of ``tensors``."""
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(torch.split(packed, [*map(_room, tensors)]), tensors, strict=True)
    ]


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _tensors(struct: Any) -> Iterator[Tensor]:
    for field in fields(struct):
        value = getattr(struct, field.name)
        if isinstance(value, Tensor):
            yield value
        elif is_dataclass(value):
            yield from _tensors(value)


def _with_tensors(struct: Any, staged: Iterator[Tensor]) -> Any:
    """Return a dataclass with its tensors, in the order of `_tensors`, replaced."""
    changes: dict[str, Any] = {}
    for field in fields(struct):
        value = getattr(struct, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = next(staged)
        elif is_dataclass(value):
            changes[field.name] = _with_tensors(value, staged)
    return replace(struct, **changes)
