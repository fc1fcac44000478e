"""The workers of a run: wrapping the model, exchanging gradients, agreeing on numbers.

accelerate does devices, autocast and data parallelism. FSDP2 is torch's own ``fully_shard``:
accelerate applies it on accelerators only, and the sharding has to be testable on CPUs. Knows no
objective, data or checkpoint format.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

Strategy = Literal["ddp", "fsdp2"]


class Workers:
    """This process among the workers of the run."""

    def __init__(self, strategy: Strategy, *, use_gpu: bool, precision: Literal["no", "bf16"]):
        self._accelerator = Accelerator(cpu=not use_gpu, mixed_precision=precision)
        self._strategy = strategy
        self._precision = precision
        self.rank = self._accelerator.process_index
        self.num_workers = self._accelerator.num_processes
        self.device = self._accelerator.device

    def wrap(self, model: nn.Module, layer_classes: Iterable[str]) -> nn.Module:
        """Make a model's gradients those of all workers together, averaged over them.

        Args:
            model: on any device; float32 weights.
            layer_classes: names of the classes that FSDP2 shards as units.
        """
        if self._strategy == "ddp" or self.num_workers == 1:
            wrapped = self._accelerator.prepare_model(model)
            assert isinstance(wrapped, nn.Module)
            return wrapped
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = mixed if self._precision == "bf16" else MixedPrecisionPolicy()
        names = set(layer_classes)
        mesh = init_device_mesh(self.device.type, (self.num_workers,))  # the default wants a GPU
        model = model.to(self.device)
        for module in list(model.modules()):
            if type(module).__name__ in names:
                fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model

    def autocast(self) -> AbstractContextManager[None]:
        """Mixed precision for the forward pass."""
        context: AbstractContextManager[None] = self._accelerator.autocast()
        return context

    def gradient_exchange(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Context of one micro-batch: data parallelism exchanges gradients in the last one only.

        FSDP2 exchanges them every time: whole gradients would not fit what it is chosen for.
        """
        if last or isinstance(model, FSDPModule):
            return nullcontext()
        context: AbstractContextManager[None] = self._accelerator.no_sync(model)
        return context

    def clip_gradients(self, model: nn.Module, max_norm: float) -> float:
        """Scale the gradients down to a norm; returns the norm that they had."""
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def sum(self, *values: float) -> list[float]:
        """Sums over all workers, the same on each of them."""
        local = torch.tensor(values, device=self.device, dtype=torch.float64)
        total = self._accelerator.reduce(local, reduction="sum")
        assert isinstance(total, Tensor)
        return total.tolist()

    def gather(self, value: Any) -> list[Any]:
        """The value of every worker, in order of rank; waits for all of them."""
        gathered: list[Any] = gather_object([value])
        return gathered


def whole_parameters(model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Parameters of a possibly sharded model, whole; every worker must call it.

    A worker that does not ``keep`` them takes part, gets nothing, and holds one at a time.
    """
    found = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if keep:
            found[name] = whole.detach()
    return found
