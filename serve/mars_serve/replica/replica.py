"""One replica of a model, as Ray Serve calls it; its engine runs in a child process."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace

import ray
from ray import serve
from ray.serve import metrics

from mars_autoscale.policy.inner_loop import InnerLoopDecision
from mars_autoscale.ray.ongoing_policy import NUM_REQUESTS
from mars_platform.method.live import LiveDecoding
from mars_serve.config.served import PublishedThreshold, ReplicaReport
from mars_serve.config.settings import ModelSettings
from mars_serve.control.reporting import Reporter
from mars_serve.engine.ipc.listener import Address
from mars_serve.engine.ipc.loop import EngineDied
from mars_serve.engine.ipc.messages import Condition
from mars_serve.observability.figures import ReplicaFigures, ReplicaState
from mars_serve.observability.ray_metrics import RayMirror
from mars_serve.observability.replica_telemetry import ReplicaTelemetry
from mars_serve.replica.engine_process import start_engine
from mars_serve.replica.follower import Follower
from mars_serve.replica.steering import Steering

_DRAIN_S = 0.5
"""Least seconds between the announcement that a replica ends and its end, in which requests may
arrive that were sent before."""
_DRAIN_POLL_S = 0.1


class ModelReplica:
    """Ray Serve's deployment class; its construction ends when the engine is warmed up.

    Ray Serve starts, watches and ends the replica. Requests do not pass through it: ingress
    replicas ask for its address and send them to the engine's process.
    """

    def __init__(self, settings: ModelSettings, num_threads: int) -> None:
        context = serve.get_replica_context()
        self._name: str = context.replica_id.unique_id
        self._node = ray.util.get_node_ip_address()
        self._is_started = False
        self._reported = ReplicaFigures(self._name, self._node, ReplicaState.STARTING)
        Reporter(context.app_name, "observe", lambda: [(settings.name, self._figures())])
        self._loop = start_engine(settings, num_threads, host=self._node)
        self._loop.read_in_thread()
        self._telemetry = ReplicaTelemetry(settings.name, self._name, self._loop)
        RayMirror(self._telemetry, metrics).start()
        basis, autoscaling = self._loop.basis, settings.autoscaling
        self._steering: Steering | None = None
        if basis is not None and autoscaling is not None:
            self._steering = Steering(
                self._name,
                basis,
                autoscaling,
                self._loop,
                lambda: self._telemetry.requests.load,
                lambda: self._telemetry.requests.audits,
            )
        initial = PublishedThreshold(0, settings.initial_threshold)
        self._apply(initial)
        self._follower = Follower(
            context.app_name, settings.name, initial, self._apply, self._steering
        )
        self._is_started = True

    def _figures(self) -> ReplicaFigures:
        """Return the figures for the dashboard; the last ones if the engine has died."""
        if not self._is_started:
            return self._reported
        steering = self._steering
        decision = InnerLoopDecision(self._loop.live) if steering is None else steering.decision
        try:
            self._reported = self._telemetry.figures(self._node, decision)
        except EngineDied:
            self._reported = replace(self._reported, state=ReplicaState.OVERDUE)
        return self._reported

    async def __del__(self) -> None:
        """Let the running requests end; Ray Serve awaits this before it ends the replica."""
        with suppress(EngineDied):
            self._loop.tell(Condition(is_draining=True))
            await asyncio.sleep(_DRAIN_S)
            while self._loop.status().num_requests:
                await asyncio.sleep(_DRAIN_POLL_S)

    async def address(self) -> tuple[str, Address]:
        """Return the replica's name, and where its requests are sent to."""
        assert self._loop.address is not None
        return self._name, self._loop.address

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
        """Return the load for Ray Serve, which passes it to a policy of `mars_autoscale.ray`."""
        if self._steering is not None:
            return self._steering.stats(time.time())
        with suppress(EngineDied):
            return {NUM_REQUESTS: float(self._loop.status().num_requests)}
        return {}

    async def check_health(self) -> None:
        """Raise if the engine has stopped; Ray Serve then replaces the replica."""
        self._loop.status()

    def _apply(self, published: PublishedThreshold) -> None:
        if self._steering is None:
            self._loop.set_live(LiveDecoding(published.threshold))
        else:
            self._steering.take(published, time.monotonic())
