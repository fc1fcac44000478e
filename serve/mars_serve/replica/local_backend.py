"""A `Backend` over one engine that is reached from this process alone, without a cluster."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Generic, TypeVar

from prometheus_client.core import Metric

from mars_autoscale.policy.reports import ReplicaReport
from mars_platform.method.mode import LiveDecoding
from mars_serve.config.loras import LoraChanges
from mars_serve.config.served import Explanation, Picture, PublishedThreshold
from mars_serve.control.governor import Governor
from mars_serve.engine.ipc.client import EngineClient
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.observability.replica_telemetry import ReplicaTelemetry

EngineT = TypeVar("EngineT", bound=EngineClient)


class LocalBackend(Generic[EngineT]):
    """The only replica of a model, with a governor of its own in this process."""

    def __init__(self, engine: EngineT, threshold: float = 0.95) -> None:
        """Take an engine, whose live τ is ``threshold``."""
        self.engine = engine
        self.governor = Governor()
        self.live = PublishedThreshold(0, threshold)
        self._replica = ReplicaTelemetry("model", "only", engine)

    async def complete(self, request: Request) -> list[StepOutput]:
        """Run a request to its end."""
        request.is_streamed = False
        async with aclosing(self.engine.stream(request)) as outputs:
            return [output async for output in outputs]

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        """Run a request and yield one item per forward pass; closing the generator cancels it."""
        async with aclosing(self.engine.stream(request)) as outputs:
            async for output in outputs:
                yield output

    async def replicas(self) -> list[ReplicaReport]:
        """Return the state of the replica."""
        return [self._replica.report(live_version=self.live.version)]

    async def live_threshold(self) -> PublishedThreshold:
        """Return the live τ."""
        return self.live

    async def set_live_threshold(self, threshold: float | None) -> PublishedThreshold:
        """Set τ by hand; nothing here would move it, so that None leaves it as it is."""
        if threshold is not None:
            self.live = PublishedThreshold(self.live.version + 1, threshold)
            self.engine.set_live(LiveDecoding(threshold))
        return self.live

    async def autoscaler(self) -> Explanation | None:
        """Return None: the model is not autoscaled."""
        return None

    async def trust_frontier(self) -> None:
        """Do nothing, as there is no autoscaler."""

    async def metrics(self) -> list[Metric]:
        """Return no metrics beside those of the application."""
        return []

    async def picture(self, since_s: int | None) -> Picture:
        """Report the engine to the governor, and return its picture."""
        await self.governor.report("model", self._replica.report(), None)
        return await self.governor.picture("model", since_s)

    async def loras(self, known: LoraChanges) -> LoraChanges:
        """Return the latest changes of the model's LoRA adapters."""
        return await self.governor.loras("model", known)
