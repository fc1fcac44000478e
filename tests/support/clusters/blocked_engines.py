"""Sends requests by an ingress's queue, and stops the engines behind it."""

from __future__ import annotations

import asyncio
from typing import Any

from clusters.local_replicas import LocalReplica
from decoding.engine_requests import make_request
from decoding.failing_engines import ControlledEngine
from mars_serve.deploy.backend import ReplicaBackend
from mars_serve.engine.ipc.client import EngineClient
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from waiting import soon


def links_of(backend: ReplicaBackend) -> list[EngineClient]:
    return list(backend._clients._all.values())


def request(name: str = "r", max_tokens: int = 1, **fields: Any) -> Request:
    own = {each: fields.pop(each) for each in ("key", "session", "deadline_s") if each in fields}
    made = make_request(name, fields.pop("prompt", 5), max_tokens, **{"threshold": 1.0, **fields})
    for name_of_field, value in own.items():
        setattr(made, name_of_field, value)
    return made


def engine_of(replica: LocalReplica) -> ControlledEngine:
    engine = replica.loop.engine
    assert isinstance(engine, ControlledEngine)
    return engine


def ids_at(replica: LocalReplica) -> list[str]:
    return [each.id for each in engine_of(replica).received]


async def block(
    backend: ReplicaBackend, *replicas: LocalReplica, name: str = "block"
) -> list[asyncio.Task[Any]]:
    """Stop the engines' steps and take all credits, by requests called block-0 and so on."""
    for replica in replicas:
        engine_of(replica).may_step.clear()
    num = sum(client.credit.num_free for client in links_of(backend))
    before = sum(len(ids_at(each)) for each in replicas)
    tasks = [spawn(backend, request(f"{name}-{index}")) for index in range(num)]
    await soon(lambda: sum(len(ids_at(each)) for each in replicas) == before + num)
    return tasks


def unblock(*replicas: LocalReplica) -> None:
    for replica in replicas:
        engine_of(replica).may_step.set()


def spawn(backend: ReplicaBackend, wanted: Request) -> asyncio.Task[list[StepOutput]]:
    return asyncio.create_task(backend.complete(wanted))


async def spawn_waiting(
    backend: ReplicaBackend, *wanted: Request
) -> list[asyncio.Task[list[StepOutput]]]:
    """Send requests that have to wait, and return once they do."""
    num = len(backend._queue) + len(wanted)
    tasks = [spawn(backend, each) for each in wanted]
    await soon(lambda: len(backend._queue) == num)
    return tasks
