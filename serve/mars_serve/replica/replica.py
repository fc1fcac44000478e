"""One replica of a model: an engine in a process of its own, as Ray Serve calls it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from ray import serve

from mars_serve.config.served import LiveThreshold, ReplicaReport
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.request import LiveDecoding, Request, StepOutput
from mars_serve.observability.ray_metrics import RayMirror
from mars_serve.observability.telemetry import ReplicaTelemetry
from mars_serve.replica.engine_process import start_engine
from mars_serve.replica.follower import Follower
from mars_serve.replica.steering import Steering

_BEAT_S = 2.0
"""Seconds without an output after which a request's caller is shown that it still runs; several of
them fit into what `mars_serve.deploy.backend` takes for the replica's end."""


class ModelReplica:
    """Ray Serve's deployment class. Its construction ends when the engine is warm."""

    def __init__(self, settings: ModelSettings, num_threads: int) -> None:
        context = serve.get_replica_context()
        self._name: str = context.replica_id.unique_id
        self._loop = start_engine(settings, num_threads)
        self._telemetry = ReplicaTelemetry(settings.name, self._name, self._loop)
        RayMirror(self._telemetry).start()
        self._steering = self._steering_of(settings)
        initial = LiveThreshold(0, settings.initial_threshold)
        self._apply(initial)
        self._follower = Follower(
            context.app_name, settings.name, initial, self._apply, self._steering
        )

    async def complete(self, request: Request) -> AsyncGenerator[list[StepOutput] | None]:
        """Run a request to its end: one item, and None every few seconds before; a cancelled call
        cancels it.
        """
        outputs, shown_s = list[StepOutput](), time.monotonic()
        async with aclosing(self.stream(request)) as items:
            async for item in items:
                if item is not None:
                    outputs.append(item)
                if time.monotonic() - shown_s >= _BEAT_S:
                    shown_s = time.monotonic()
                    yield None
        yield outputs

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput | None]:
        """Run a request, one item a forward pass, and None where that takes seconds; a cancelled
        call cancels it.

        Raises:
            QueueFull: there is no room, or it would come too late.
            Exception: see `EngineLoop.stream`.
        """
        if self._steering is not None:
            self._steering.refuse_late(request)
        outputs = self._loop.stream(request, _BEAT_S)
        async with aclosing(self._telemetry.watch(outputs, request)) as watched:
            async for output in watched:
                yield output

    async def exposition(self) -> str:
        """What it counted, in Prometheus' text format."""
        return self._telemetry.exposition()

    async def report(self) -> ReplicaReport:
        """How full the engine is and what it decodes with.

        Raises:
            EngineDied: it has stopped.
        """
        decoding, live = self._loop.live, self._follower.live
        return ReplicaReport(
            self._name, self._loop.status(), replace(live, threshold=decoding.threshold)
        )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray Serve, which passes it on to `mars_autoscale.ray.ray_policy`."""
        return {} if self._steering is None else self._steering.stats(time.time())

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces a replica that raises here."""
        self._loop.status()

    def _steering_of(self, settings: ModelSettings) -> Steering | None:
        plan, autoscaling = self._loop.plan, settings.autoscaling
        if plan is None or autoscaling is None:
            return None
        return Steering(self._name, plan, autoscaling, self._loop, self._telemetry.load)

    def _apply(self, live: LiveThreshold) -> None:
        if self._steering is None:
            self._loop.set_live(LiveDecoding(live.threshold))
        else:
            self._steering.take(live, time.monotonic())
