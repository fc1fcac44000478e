"""Notes which experts a model's routers choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def routed_experts(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the experts of each position, [positions, experts], from each call of a router."""
    chosen: list[Tensor] = []

    def note(_module: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        chosen.append(output[2].sort(-1).values)

    routers = [each for each in model.modules() if type(each).__name__.endswith("TopKRouter")]
    handles = [router.register_forward_hook(note) for router in routers]
    yield chosen
    for handle in handles:
        handle.remove()
