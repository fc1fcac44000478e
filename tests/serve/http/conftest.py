"""An application over engines in this process, and its clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from fastapi import FastAPI
from transformers import PreTrainedTokenizerBase

from local_loop import LocalLoop
from mars_platform.checkpoint.directory import Checkpoint, load_model, read_checkpoint
from mars_platform.method import reference
from mars_platform.method.live import LiveDecoding
from mars_serve.config.served import (
    Backend,
    Explanation,
    PublishedThreshold,
    ReplicaReport,
    ServedModel,
)
from mars_serve.config.settings import ModelSettings, ServeSettings
from mars_serve.engine.engine import Engine
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings
from mars_serve.http.app import create_app

CREATED = 1_700_000_000
ENGINE = EngineSettings(page_size=8, num_pages=128, max_num_seqs=4, max_num_batched_tokens=65)


class LoopBackend:
    """A backend over an engine in this process."""

    def __init__(self, loop: LocalLoop) -> None:
        self.loop = loop
        self.live = PublishedThreshold(0, 0.95)

    async def complete(self, request: Request) -> list[StepOutput]:
        return [output async for output in self.loop.stream(request)]

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        async with aclosing(self.loop.stream(request)) as outputs:
            async for output in outputs:
                yield output

    async def replicas(self) -> list[ReplicaReport]:
        return [ReplicaReport("only", self.loop.status(), self.live)]

    async def live_threshold(self) -> PublishedThreshold:
        return self.live

    async def set_live_threshold(self, threshold: float | None) -> PublishedThreshold:
        assert threshold is not None, "these models are not autoscaled"
        self.live = PublishedThreshold(self.live.version + 1, threshold)
        self.loop.set_live(LiveDecoding(threshold))
        return self.live

    async def autoscaler(self) -> Explanation | None:
        return None

    async def metrics(self) -> list[str]:
        return []


class BrokenBackend:
    """A backend that gives some tokens, and then fails."""

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

    async def live_threshold(self) -> PublishedThreshold:
        return PublishedThreshold(0, 0.95)

    async def set_live_threshold(self, threshold: float | None) -> PublishedThreshold:
        raise self.error

    async def autoscaler(self) -> Explanation | None:
        return None

    async def metrics(self) -> list[str]:
        return []


class Client(httpx2.AsyncClient):
    """A client that checks the shape of every response."""

    async def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the response to a request that must succeed."""
        response = await self.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a stream's events without the final [DONE], which must exist."""
        response = await self.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done, nothing = response.text.split("\n\n")
        assert (done, nothing) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    async def refusal(self, path: str, body: dict[str, Any], status: int, param: str | None) -> str:
        """Return the error message for a request that must be refused."""
        # httpx's own encoder does not write NaN, but other clients' may
        headers = {"content-type": "application/json"}
        response = await self.post(path, content=json.dumps(body), headers=headers)
        return self.error_of(response, status, param)

    @staticmethod
    def error_of(response: httpx2.Response, status: int, param: str | None) -> str:
        """Return the message of an error response in OpenAI's shape."""
        assert response.status_code == status, response.text
        assert set(response.json()) == {"error"}
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"].endswith("_error")
        assert (error["type"] == "server_error") == (status >= 500)
        assert error["param"] == param
        assert param is None or param in error["message"]
        return error["message"]


@pytest.fixture(scope="session")
def loop_backend() -> type[LoopBackend]:
    return LoopBackend


@pytest.fixture(scope="session")
def broken_backend() -> type[BrokenBackend]:
    return BrokenBackend


@pytest.fixture(scope="session")
def served() -> Callable[..., ServedModel]:
    """Make a served model: ``served(name, checkpoint, backend, **settings)``."""

    def make(name: str, checkpoint: Checkpoint, backend: Backend, **settings: Any) -> ServedModel:
        entry = ModelSettings(name=name, path=str(checkpoint.path), engine=ENGINE, **settings)
        return ServedModel(entry, checkpoint, backend, CREATED)

    return make


@pytest.fixture(scope="session")
def app_of() -> Callable[..., FastAPI]:
    """Make an application: ``app_of(*models, **settings)``."""

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
def oracle(mars: Checkpoint) -> Callable[..., reference.ReferenceOutput]:
    """Decode with the reference decoder: ``oracle(ids, threshold, max_tokens=24)``."""
    model = load_model(mars.path)
    assert mars.metadata is not None

    def decode(ids: list[int], threshold: float, max_tokens: int = 24) -> reference.ReferenceOutput:
        return reference.decode(
            model,
            ids,
            mars.special,
            max_tokens=max_tokens,
            threshold=threshold,
            num_masks=4,
            mask_token_id=mars.metadata.mask_token_id,
        )

    return decode


@pytest.fixture
def make_loop() -> Iterator[Callable[..., LocalLoop]]:
    """Make an engine for one test: ``make_loop(checkpoint, **sizes)``."""
    made = []

    def make(checkpoint: Checkpoint, **sizes: Any) -> LocalLoop:
        made.append(LocalLoop(Engine(checkpoint, ENGINE.model_copy(update=sizes))))
        return made[-1]

    yield make
    for loop in made:
        loop.stop()


@pytest.fixture(scope="session")
def until_idle() -> Callable[[Engine], Awaitable[None]]:
    """Wait until an engine has no work left and holds no page."""

    async def wait(engine: Engine) -> None:
        for _ in range(200):
            if not engine.has_work:
                break
            await asyncio.sleep(0.01)
        assert not engine.has_work
        assert engine.status().num_free_pages == engine.settings.num_pages

    return wait


@pytest.fixture(scope="session")
def loops(mars: Checkpoint, plain_dir: Path) -> Iterator[dict[str, LocalLoop]]:
    """Return the engines of a MARS checkpoint and of a plain AR one."""
    checkpoints = {"mars": mars, "plain": read_checkpoint(plain_dir)}
    loops = {name: LocalLoop(Engine(each, ENGINE)) for name, each in checkpoints.items()}
    yield loops
    for loop in loops.values():
        loop.stop()


@pytest.fixture(scope="session")
def models(loops: dict[str, LocalLoop], served: Callable[..., ServedModel]) -> list[ServedModel]:
    return [served(name, loop.engine.checkpoint, LoopBackend(loop)) for name, loop in loops.items()]


@pytest.fixture(scope="session")
def app(models: list[ServedModel], app_of: Callable[..., FastAPI]) -> FastAPI:
    """Return an application over both engines, with default settings."""
    return app_of(*models)


@pytest.fixture(scope="session")
def client_of() -> Callable[..., Client]:
    def make(app: FastAPI, **options: Any) -> Client:
        transport = httpx2.ASGITransport(app)
        return Client(transport=transport, base_url="http://server", **options)

    return make


@pytest.fixture(scope="session")
def client_over(
    mars: Checkpoint,
    served: Callable[..., ServedModel],
    app_of: Callable[..., FastAPI],
    client_of: Callable[..., Client],
) -> Callable[..., Client]:
    """Make a client of one model: ``client_over(backend, checkpoint, **settings)``."""

    def make(backend: Backend, checkpoint: Checkpoint = mars, **settings: Any) -> Client:
        return client_of(app_of(served("mars", checkpoint, backend), **settings))

    return make


@pytest.fixture
async def client(app: FastAPI, client_of: Callable[..., Client]) -> AsyncIterator[Client]:
    async with client_of(app) as client:
        yield client


@pytest.fixture
async def official(client: httpx2.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="none", base_url="http://server/v1", http_client=client, max_retries=0
    )
