"""An application over engines in this process, and clients of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from fastapi import FastAPI
from transformers import PreTrainedTokenizerBase

from mars_platform.checkpoint import Checkpoint, read_checkpoint
from mars_serve.engine.engine import Engine
from mars_serve.engine.loop import EngineLoop
from mars_serve.engine.request import Request, StepOutput
from mars_serve.engine.settings import EngineSettings
from mars_serve.rest.app import create_app
from mars_serve.served import Backend, LiveThreshold, ReplicaReport, ServedModel
from mars_serve.settings import ModelSettings, ServeSettings

CREATED = 1_700_000_000
ENGINE = EngineSettings(page_size=8, num_pages=128, max_batch=4, max_positions=65)


class LoopBackend:
    """Backend over an engine in this process."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self.live = LiveThreshold(0, 0.95)

    async def complete(self, request: Request) -> list[StepOutput]:
        return [output async for output in self.loop.stream(request)]

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        async for output in self.loop.stream(request):
            yield output

    async def replicas(self) -> list[ReplicaReport]:
        return [ReplicaReport("only", self.loop.status(), self.live)]

    async def live_threshold(self) -> LiveThreshold:
        return self.live

    async def set_live_threshold(self, threshold: float) -> LiveThreshold:
        self.live = LiveThreshold(self.live.version + 1, threshold)
        self.loop.set_live_threshold(threshold)
        return self.live

    async def metrics(self) -> list[str]:
        return []


class BrokenBackend:
    """Backend that gives a token or none, and then fails."""

    def __init__(self, error: Exception, num_outputs: int = 0) -> None:
        self.error = error
        self.num_outputs = num_outputs

    async def complete(self, request: Request) -> list[StepOutput]:
        raise self.error

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        for _ in range(self.num_outputs):
            yield StepOutput(request.id, [50], None)
        raise self.error

    async def replicas(self) -> list[ReplicaReport]:
        return []

    async def live_threshold(self) -> LiveThreshold:
        return LiveThreshold(0, 0.95)

    async def set_live_threshold(self, threshold: float) -> LiveThreshold:
        raise self.error

    async def metrics(self) -> list[str]:
        return []


@pytest.fixture(scope="session")
def loop_backend() -> type[LoopBackend]:
    return LoopBackend


@pytest.fixture(scope="session")
def broken_backend() -> type[BrokenBackend]:
    return BrokenBackend


@pytest.fixture(scope="session")
def served() -> Callable[..., ServedModel]:
    """A served model: ``served(name, checkpoint, backend, **settings)``."""

    def make(name: str, checkpoint: Checkpoint, backend: Backend, **settings: Any) -> ServedModel:
        entry = ModelSettings(name=name, path=str(checkpoint.path), engine=ENGINE, **settings)
        return ServedModel(entry, checkpoint, backend, CREATED)

    return make


@pytest.fixture(scope="session")
def app_of() -> Callable[..., FastAPI]:
    """An application: ``app_of(*models, **settings)``."""

    def make(*models: ServedModel, **settings: Any) -> FastAPI:
        entries = [model.settings for model in models]
        by_name = {model.settings.name: model for model in models}
        return create_app(by_name, ServeSettings(models=entries, **settings))

    return make


@pytest.fixture(scope="session")
def mars(mars_dir: Path) -> Checkpoint:
    return read_checkpoint(mars_dir)


@pytest.fixture(scope="session")
def tokenizer(mars: Checkpoint) -> PreTrainedTokenizerBase:
    return mars.tokenizer


@pytest.fixture(scope="session")
def loops(mars: Checkpoint, plain_dir: Path) -> Iterator[dict[str, EngineLoop]]:
    """The engines of a MARS checkpoint and a plain AR one."""
    checkpoints = {"mars": mars, "plain": read_checkpoint(plain_dir)}
    loops = {name: EngineLoop(Engine(each, ENGINE)) for name, each in checkpoints.items()}
    yield loops
    for loop in loops.values():
        loop.stop()


@pytest.fixture(scope="session")
def models(loops: dict[str, EngineLoop], served: Callable[..., ServedModel]) -> list[ServedModel]:
    return [served(name, loop.engine.checkpoint, LoopBackend(loop)) for name, loop in loops.items()]


@pytest.fixture(scope="session")
def app(models: list[ServedModel], app_of: Callable[..., FastAPI]) -> FastAPI:
    """An application over both engines, with default settings."""
    return app_of(*models)


@pytest.fixture(scope="session")
def client_of() -> Callable[[FastAPI], httpx2.AsyncClient]:
    def make(app: FastAPI, **options: Any) -> httpx2.AsyncClient:
        transport = httpx2.ASGITransport(app)
        return httpx2.AsyncClient(transport=transport, base_url="http://server", **options)

    return make


@pytest.fixture
async def client(
    app: FastAPI, client_of: Callable[[FastAPI], httpx2.AsyncClient]
) -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(app) as client:
        yield client


@pytest.fixture
async def official(client: httpx2.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="none", base_url="http://server/v1", http_client=client, max_retries=0
    )
