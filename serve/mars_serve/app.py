"""The Ray Serve application: one ingress deployment, one deployment of replicas per model."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncGenerator
from typing import Any

import torch
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from mars_platform.checkpoint import read_checkpoint
from mars_serve.engine.loop import EngineLoop
from mars_serve.engine.request import EngineStatus, Request, StepOutput
from mars_serve.loading import load_engine
from mars_serve.rest.app import create_app
from mars_serve.served import LiveThreshold, ReplicaReport, ServedModel
from mars_serve.settings import ModelSettings, ServeSettings

_MAX_ONGOING = 100_000
"""Far above any batch: requests queue in the engine, the only place that knows its load."""


_log = logging.getLogger(__name__)


class ModelReplica:
    """One engine with its thread."""

    def __init__(self, settings: ModelSettings, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        engine = load_engine(settings)
        engine.warm_up(_log_progress)
        self._loop = EngineLoop(engine)

    async def complete(self, request: Request) -> list[StepOutput]:
        """Run a request to its end; a cancelled call cancels it."""
        return [output async for output in self._loop.stream(request)]

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        """Run a request, one item a forward pass; a cancelled call cancels it."""
        async for output in self._loop.stream(request):
            yield output

    async def status(self) -> EngineStatus:
        """How full the engine is; raises if it has died."""
        return self._loop.status()

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces a replica that raises here."""
        self._loop.status()


class HandleBackend:
    """`mars_serve.served.Backend` over the replicas of a deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def complete(self, request: Request) -> list[StepOutput]:
        """Run a request on one replica."""
        outputs: list[StepOutput] = await self._handle.complete.remote(request)
        return outputs

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        """Run a request on one replica; leaving the iteration early cancels it there."""
        response = self._streaming.stream.remote(request)
        try:
            async for output in response:
                yield output
        finally:
            response.cancel()

    async def replicas(self) -> list[ReplicaReport]:
        """One replica, where one answers."""
        status: EngineStatus = await self._handle.status.remote()
        return [ReplicaReport("one", status, await self.live_threshold())]

    async def live_threshold(self) -> LiveThreshold:
        """Not changed yet."""
        return LiveThreshold(0, 0.95)


class Ingress:
    """Serves the REST application over the models' handles."""

    def __init__(self, settings: ServeSettings, handles: list[DeploymentHandle]) -> None:
        created = int(time.time())
        self._settings = settings
        self._models = {
            model.name: ServedModel(
                model, read_checkpoint(model.path), HandleBackend(handle), created
            )
            for model, handle in zip(settings.models, handles, strict=True)
        }

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve once the replica is constructed."""
        return create_app(self._models, self._settings)


def _log_progress(done: int, total: int) -> None:
    if done == total or done % 8 == 0:
        _log.info("warm-up: %d of %d step sizes timed", done, total)


def build_application(settings: ServeSettings) -> Application:
    """The application graph that ``serve.run`` deploys."""
    num_replicas = sum(model.num_replicas for model in settings.models)
    share = max(1, (os.cpu_count() or 1) // num_replicas)
    handles = [_bind_model(model, model.num_threads or share) for model in settings.models]
    options: dict[str, Any] = {
        "name": "ingress",
        "num_replicas": 1,
        "max_ongoing_requests": _MAX_ONGOING,
        "ray_actor_options": {"num_cpus": 0},
    }
    ingress = serve.deployment(serve.ingress()(Ingress), **options)
    return ingress.bind(settings, handles)


def _bind_model(settings: ModelSettings, num_threads: int) -> Application:
    options: dict[str, Any] = {
        "name": f"model-{settings.name}",
        "num_replicas": settings.num_replicas,
        "max_ongoing_requests": _MAX_ONGOING,
        "ray_actor_options": {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        "health_check_period_s": 2,
    }
    return serve.deployment(ModelReplica, **options).bind(settings, num_threads)
