"""One replica of a model, as Ray Serve calls it; its engine runs in a child process."""

import asyncio
from contextlib import suppress

import ray
from prometheus_client.core import Metric
from ray import serve
from ray.serve import metrics

from mars_autoscale.policy.reports import ReplicaReport
from mars_serve.config.served import PublishedThreshold
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.ipc.client import EngineClient, EngineDied
from mars_serve.engine.ipc.listener import Address
from mars_serve.engine.ipc.messages import Condition
from mars_serve.observability.ray_metrics import RayMirror
from mars_serve.observability.replica_telemetry import ReplicaTelemetry
from mars_serve.replica.engine_process import start_engine
from mars_serve.replica.governor_link import GovernorLink
from mars_serve.replica.threshold_controller import InnerLoopController, ThresholdController

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
        node = ray.util.get_node_ip_address()
        self._governor = GovernorLink(context.app_name, settings.name, self._name, node)
        self._governor.start()  # the dashboard shows the replica while the engine starts
        cluster_node = ray.get_runtime_context().get_node_id()
        self._engine = start_engine(settings, num_threads, host=node, node=cluster_node)
        self._engine.read_in_thread()
        self._telemetry = ReplicaTelemetry(settings.name, self._name, self._engine, node)
        RayMirror(self._telemetry, metrics).start()
        self._governor.follow(
            self._telemetry, _threshold_controller(settings, self._engine, self._telemetry)
        )

    async def __del__(self) -> None:
        """Let the running requests end; Ray Serve awaits this before it ends the replica."""
        with suppress(EngineDied):
            self._engine.tell(Condition(is_draining=True))
            await asyncio.sleep(_DRAIN_S)
            while self._engine.status().num_requests:
                await asyncio.sleep(_DRAIN_POLL_S)

    async def address(self) -> tuple[str, Address]:
        """Return the replica's name, and where its requests are sent to."""
        assert self._engine.address is not None
        return self._name, self._engine.address

    async def metrics(self) -> list[Metric]:
        """Return the replica's metrics."""
        return list(self._telemetry.collect())

    async def report(self) -> ReplicaReport:
        """Return how full the engine is and what it decodes with."""
        self._engine.status()
        return self._governor.report()

    async def check_health(self) -> None:
        """Raise if the engine has stopped; Ray Serve then replaces the replica."""
        self._engine.status()


def _threshold_controller(
    settings: ModelSettings, engine: EngineClient, telemetry: ReplicaTelemetry
) -> ThresholdController:
    initial = PublishedThreshold(0, settings.initial_threshold)
    if engine.basis is None or settings.autoscaling is None:
        return ThresholdController(engine, initial)
    return InnerLoopController(
        engine, initial, engine.basis, settings.autoscaling, lambda: telemetry.requests
    )
