"""A model that requests can name, and what runs it. Knows neither HTTP nor Ray."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mars_autoscale.policy.control import Plan, Record
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.request import EngineStatus, Request, StepOutput
from mars_serve.engine.settings import CPU_PAGES

if TYPE_CHECKING:  # a replica's process has no use for torch, which takes seconds to import
    from mars_platform.checkpoint.directory import Checkpoint


@dataclass(frozen=True)
class ThresholdRange:
    """Within which each replica chooses its τ by its own load."""

    floor_threshold: float
    """The lowest for tier default."""
    flex_floor_threshold: float
    """The lowest for tier flex."""
    feed_forward: float
    """Gain in speed over the target τ that what arrives needs of the replicas that are ready."""
    is_saturated: bool
    """Whether nothing is left to give, so that what would come too late is refused."""


@dataclass(frozen=True)
class LiveThreshold:
    """τ of the requests that give none of their own, as it was set last."""

    version: int
    """Grows with every change."""
    threshold: float
    """In (0, 1]; where replicas choose for themselves, their mean."""
    range: ThresholdRange | None = None
    """Where the autoscaler has given one; else all replicas use ``threshold``."""
    is_pinned: bool = False
    """Whether somebody has set it by hand, which the autoscaler leaves alone."""


@dataclass(frozen=True)
class ReplicaReport:
    """One replica of a model, as it is now."""

    replica: str
    """Name, unique among all replicas that ever ran."""
    status: EngineStatus
    live: LiveThreshold
    """What its next step decodes with."""


@dataclass(frozen=True)
class Explanation:
    """An autoscaler's latest decisions, and what it goes by."""

    plan: Plan | None
    """None until a replica has told it."""
    records: list[Record]
    """The oldest first."""


class Backend(Protocol):
    """A model's replicas."""

    async def complete(self, request: Request) -> list[StepOutput]:
        """Run a request to its end."""

    def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        """Run a request, one item a forward pass; closing the generator early cancels it."""

    async def replicas(self) -> list[ReplicaReport]:
        """Every replica that can serve; empty where none can."""

    async def live_threshold(self) -> LiveThreshold:
        """What was set last, whether or not every replica has it yet."""

    async def set_live_threshold(self, threshold: float | None) -> LiveThreshold:
        """Change τ of the requests that give none, those that run now included; None gives it back
        to the autoscaler.
        """

    async def autoscaler(self) -> Explanation | None:
        """What the autoscaler has decided lately; None where the model has none."""

    async def metrics(self) -> list[str]:
        """What every replica counted, in Prometheus' text format."""


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
