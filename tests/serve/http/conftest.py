"""An application over engines in this process, and its clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from fastapi import FastAPI
from fastapi.utils import create_model_field
from transformers import PreTrainedTokenizerBase

from decoding.local_engine_client import LocalEngineClient
from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.checkpoint.weights import load_model
from mars_platform.method import reference
from mars_serve.config.served import Backend, ServedModel
from mars_serve.engine.engine import Engine
from rest.rest_server import ENGINE, Client, SingleEngineBackend, app_of, client_of, served


@pytest.fixture(autouse=True, scope="session")
def _fields_made_once() -> Iterator[None]:
    """Compile the models of routes once: tests make hundreds of applications."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastapi.routing.create_model_field", cache(create_model_field))
        yield


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
def make_loop() -> Iterator[Callable[..., LocalEngineClient]]:
    """Make an engine for one test: ``make_loop(checkpoint, **sizes)``."""
    made = []

    def make(checkpoint: Checkpoint, **sizes: Any) -> LocalEngineClient:
        made.append(LocalEngineClient(Engine(checkpoint, ENGINE.model_copy(update=sizes))))
        return made[-1]

    yield make
    for loop in made:
        loop.stop()


@pytest.fixture(scope="session")
def loops(mars: Checkpoint, plain_dir: Path) -> Iterator[dict[str, LocalEngineClient]]:
    """Return the engines of a MARS checkpoint and of a plain AR one."""
    checkpoints = {"mars": mars, "plain": read_checkpoint(plain_dir)}
    loops = {name: LocalEngineClient(Engine(each, ENGINE)) for name, each in checkpoints.items()}
    yield loops
    for loop in loops.values():
        loop.stop()


@pytest.fixture(scope="session")
def models(loops: dict[str, LocalEngineClient]) -> list[ServedModel]:
    return [
        served(name, loop.engine.checkpoint, SingleEngineBackend(loop))
        for name, loop in loops.items()
    ]


@pytest.fixture(scope="session")
def app(models: list[ServedModel]) -> FastAPI:
    """Return an application over both engines, with default settings."""
    return app_of(*models)


@pytest.fixture(scope="session")
def client_over(mars: Checkpoint) -> Callable[..., Client]:
    """Make a client of one model: ``client_over(backend, checkpoint, **settings)``."""

    def make(backend: Backend, checkpoint: Checkpoint = mars, **settings: Any) -> Client:
        return client_of(app_of(served("mars", checkpoint, backend), **settings))

    return make


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[Client]:
    async with client_of(app) as client:
        yield client


@pytest.fixture
async def official(client: httpx2.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="none", base_url="http://localhost/v1", http_client=client, max_retries=0
    )
