"""Data parallelism over the workers of a run, by DDP or FSDP2.

accelerate handles devices, autocast and DDP. FSDP2 is called directly, as torch's ``fully_shard``,
because accelerate applies it on accelerators only, and sharding must be testable on CPUs.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import chain
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

Strategy = Literal["ddp", "fsdp2"]

_LONGEST_WAIT = timedelta(days=1)
"""Longest wait for a worker that reads, writes or scores while the others have nothing to do. A
worker that ends in that time breaks the connection, and so ends the wait."""


class Workers:
    """This process as one of the run's workers."""

    def __init__(self, strategy: Strategy, *, use_gpu: bool, precision: Literal["no", "bf16"]):
        self._accelerator = Accelerator(cpu=not use_gpu, mixed_precision=precision)
        self._strategy = strategy
        self.precision = precision
        self.rank = self._accelerator.process_index
        self.num_workers = self._accelerator.num_processes
        self.device = self._accelerator.device
        self._host_group = (
            distributed.new_group(backend="gloo", timeout=_LONGEST_WAIT)
            if distributed.is_initialized()
            else None
        )

    def wrap(self, model: nn.Module, layer_classes: Iterable[str]) -> nn.Module:
        """Wrap a model with float32 weights such that its gradients are averaged over all workers.

        ``layer_classes`` names the classes whose modules FSDP2 shards as units.
        """
        if self._strategy == "ddp" or self.num_workers == 1:
            wrapped = self._accelerator.prepare_model(model)
            assert isinstance(wrapped, nn.Module)
            return wrapped
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = mixed if self.precision == "bf16" else MixedPrecisionPolicy()
        names = set(layer_classes)
        mesh = init_device_mesh(self.device.type, (self.num_workers,))  # the default needs a GPU
        model = model.to(self.device)
        for module in list(model.modules()):
            if type(module).__name__ in names:
                fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model

    def autocast(self) -> AbstractContextManager[None]:
        """Return a context of mixed precision for the forward pass."""
        context: AbstractContextManager[None] = self._accelerator.autocast()
        return context

    def gradient_exchange(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Return a context for one micro-batch; DDP exchanges gradients in the last one only.

        FSDP2 exchanges them in each, because it serves models whose whole gradients do not fit a
        worker's memory.
        """
        if last or isinstance(model, FSDPModule):
            return nullcontext()
        context: AbstractContextManager[None] = self._accelerator.no_sync(model)
        return context

    def clip_gradients(self, model: nn.Module, max_norm: float) -> float:
        """Scale the gradients down to ``max_norm`` and return the norm that they had."""
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def sum(self, *values: float) -> list[float]:
        """Return each value summed over all workers."""
        local = torch.tensor(values, device=self.device, dtype=torch.float64)
        total = self._accelerator.reduce(local, reduction="sum")
        assert isinstance(total, Tensor)
        return total.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers in order of rank, waiting for all of them.

        The process group's time limit, half an hour by default, does not hold: one worker may
        check, write or fetch a large checkpoint.
        """
        if self._host_group is None:
            return [value]
        found: list[Any] = [None] * self.num_workers
        distributed.all_gather_object(found, value, group=self._host_group)
        return found


def whole_weights(model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Gather the parameters and stored buffers of a possibly sharded model, each of them whole.

    Every worker must call this.

    A worker that does not ``keep`` them takes part but gets an empty dictionary, and holds only one
    whole parameter at a time.
    """
    found = {}
    stored = model.state_dict()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in stored)
    for name, parameter in chain(model.named_parameters(), buffers):
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if keep:
            found[name] = whole.detach()
    return found
