"""A model that requests can name, and what runs it. Knows neither HTTP nor Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from mars_platform.checkpoint import Checkpoint
from mars_serve.engine.request import EngineStatus, Request, StepOutput
from mars_serve.engine.settings import CPU_PAGES
from mars_serve.settings import ModelSettings


class Backend(Protocol):
    """A model's replicas."""

    async def complete(self, request: Request) -> list[StepOutput]:
        """Run a request to its end."""

    def stream(self, request: Request) -> AsyncIterator[StepOutput]:
        """Run a request, one item a forward pass; leaving the iteration early cancels it."""

    async def status(self) -> EngineStatus:
        """Of one replica; raises if none can serve."""


@dataclass(frozen=True)
class ServedModel:
    """A model that requests can name."""

    settings: ModelSettings
    checkpoint: Checkpoint
    backend: Backend
    created: int
    """Unix time, in seconds."""

    @property
    def max_length(self) -> int:
        """Tokens of a request, prompt and output together, at the most."""
        sizes = self.settings.engine
        if sizes.num_pages is None and self.settings.num_gpus:
            return self.checkpoint.max_length  # the replica takes what its GPU holds
        page_size = sizes.page_size_on("cuda" if self.settings.num_gpus else "cpu")
        return min(self.checkpoint.max_length, (sizes.num_pages or CPU_PAGES) * page_size)
