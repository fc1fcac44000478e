"""Copies between the host and a GPU through pinned memory, so that the host does not wait for them.

Torch's caching allocator hands pinned memory out again only after the transfers that use it.
"""

import torch
from torch import Tensor


def host_numbers(count: int, device: torch.device) -> Tensor:
    """Return uninitialised int64 [count] on the host, pinned if it is to be copied to a GPU."""
    return torch.empty(count, dtype=torch.long, pin_memory=device.type == "cuda")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device; on the CPU it is the tensor itself."""
    if device.type == "cuda" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class HostCopy:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        """Start to copy a tensor, which may be overwritten by what its device runs later."""
        self._event: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._host = tensor.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> Tensor:
        """Return the tensor on the host, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
