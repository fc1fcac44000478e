"""A server for tests: an application over engines in this process, and clients that check it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
from fastapi import FastAPI
from prometheus_client.core import Metric

from decoding.local_engine_client import LocalEngineClient
from mars_autoscale.policy.reports import ReplicaReport
from mars_platform.checkpoint.directory import Checkpoint
from mars_serve.config.served import (
    Backend,
    Explanation,
    Picture,
    PublishedThreshold,
    ServedModel,
)
from mars_serve.config.settings import ModelSettings, ServeSettings
from mars_serve.engine.engine import Engine
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings
from mars_serve.http.app import create_app
from mars_serve.replica.local_backend import LocalBackend

CREATED = 1_700_000_000
ENGINE = EngineSettings(page_size=8, num_pages=128, max_num_seqs=4, max_num_batched_tokens=65)


class SingleEngineBackend(LocalBackend[LocalEngineClient]):
    """A backend over an engine in this process."""


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

    async def trust_frontier(self) -> None:
        pass

    async def metrics(self) -> list[Metric]:
        return []

    async def picture(self, since_s: int | None) -> Picture:
        raise self.error


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

    async def ids_of(self, **body: Any) -> list[int]:
        """Return the token ids of a prompt or conversation of the first model."""
        found: list[int] = (await self.answer("/tokenize", {"model": "mars", **body}))["tokens"]
        return found

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


def served(name: str, checkpoint: Checkpoint, backend: Backend, **settings: Any) -> ServedModel:
    """Make a served model over a backend; its mode is threshold unless ``settings`` say more."""
    if checkpoint.adapter is not None:
        settings["adapter"] = str(checkpoint.adapter.path)
    settings = {"name": name, "path": str(checkpoint.path), "mode": "threshold"} | settings
    entry = ModelSettings(engine=ENGINE, **settings)
    return ServedModel(entry, checkpoint, backend, CREATED)


def app_of(*models: ServedModel, **settings: Any) -> FastAPI:
    """Make an application over some models."""
    entries = [model.settings for model in models]
    by_name = {model.settings.name: model for model in models}
    return create_app(by_name, ServeSettings(models=entries, **settings))


def client_of(app: FastAPI, **options: Any) -> Client:
    """Make a client of an application."""
    return Client(transport=httpx2.ASGITransport(app), base_url="http://localhost", **options)


async def until_idle(engine: Engine) -> None:
    """Wait until an engine has no work left and holds no page."""
    for _ in range(200):
        if not engine.has_work:
            break
        await asyncio.sleep(0.01)
    assert not engine.has_work
    assert engine.status().num_free_pages == engine.settings.num_pages
