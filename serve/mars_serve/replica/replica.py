"""One replica of a model, as Ray Serve calls it; its engine runs in a child process."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from ray import serve

from mars_platform.method.live import LiveDecoding
from mars_serve.config.served import PublishedThreshold, ReplicaReport
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.ipc.loop import EngineDied
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.observability.ray_metrics import RayMirror
from mars_serve.observability.replica_telemetry import ReplicaTelemetry
from mars_serve.replica.engine_process import start_engine
from mars_serve.replica.follower import Follower
from mars_serve.replica.steering import Steering

_BEAT_S = 2.0
"""Seconds without an output after which a sign of life is sent to the request's caller; a few
of them may be lost before `mars_serve.deploy.backend` takes the replica for dead."""


class ModelReplica:
    """Ray Serve's deployment class; its construction ends when the engine is warmed up."""

    def __init__(self, settings: ModelSettings, num_threads: int) -> None:
        context = serve.get_replica_context()
        self._name: str = context.replica_id.unique_id
        self._loop = start_engine(settings, num_threads)
        self._telemetry = ReplicaTelemetry(settings.name, self._name, self._loop)
        RayMirror(self._telemetry).start()
        basis, autoscaling = self._loop.basis, settings.autoscaling
        self._steering: Steering | None = None
        if basis is not None and autoscaling is not None:
            load = self._telemetry.load
            self._steering = Steering(self._name, basis, autoscaling, self._loop, load)
        initial = PublishedThreshold(0, settings.initial_threshold)
        self._apply(initial)
        self._follower = Follower(
            context.app_name, settings.name, initial, self._apply, self._steering
        )

    async def complete(self, request: Request) -> AsyncGenerator[list[StepOutput] | None]:
        """Run a request to its end and yield all its outputs as one item.

        Yields None every few seconds before. A cancelled call cancels the request.
        """
        outputs, shown_s = list[StepOutput](), time.monotonic()
        try:
            async with aclosing(self.stream(request)) as items:
                async for item in items:
                    if item is not None:
                        outputs.append(item)
                    if time.monotonic() - shown_s >= _BEAT_S:
                        shown_s = time.monotonic()
                        yield None
        except EngineDied as died:
            died.num_tokens = sum(len(output.tokens) for output in outputs)
            raise
        yield outputs

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput | None]:
        """Run a request and yield one item per forward pass.

        Yields None after seconds without an output. A cancelled call cancels the request.

        Raises:
            QueueFull: there is no room, or the request would come too late.
            Exception: see `EngineLoop.stream`.
        """
        if self._steering is not None:
            self._steering.refuse_late(request)
        outputs = self._loop.stream(request, _BEAT_S)
        try:
            async with aclosing(self._telemetry.watch(outputs, request)) as watched:
                async for output in watched:
                    yield output
        except EngineDied as died:
            died.replica = self._name
            raise

    async def exposition(self) -> str:
        """Return the replica's metrics in Prometheus' text format."""
        return self._telemetry.exposition()

    async def report(self) -> ReplicaReport:
        """Return how full the engine is and what it decodes with.

        Raises:
            EngineDied: the engine has stopped.
        """
        live = replace(self._follower.live, threshold=self._loop.live.threshold)
        return ReplicaReport(self._name, self._loop.status(), live, self._loop.is_overdue)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for Ray Serve, which passes it to `mars_autoscale.ray.ray_policy`."""
        return {} if self._steering is None else self._steering.stats(time.time())

    async def check_health(self) -> None:
        """Raise if the engine has stopped; Ray Serve then replaces the replica."""
        self._loop.status()

    def _apply(self, published: PublishedThreshold) -> None:
        if self._steering is None:
            self._loop.set_live(LiveDecoding(published.threshold))
        else:
            self._steering.take(published, time.monotonic())
