"""Replicas whose engines run in threads of this process, behind a stand-in for Ray's handle."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from transformers import PreTrainedModel

from clusters.local_replicas import LocalReplica, ReplicaHandle
from decoding.failing_engines import ControlledEngine
from decoding.local_engine_client import LOOPBACK, LocalEngineClient
from mars_platform.checkpoint.directory import SpecialTokens
from mars_serve.engine.engine import Engine

SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 3}))

Start = Callable[..., LocalReplica]


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an ingress look for replicas more often than ten times a second."""
    monkeypatch.setattr("mars_serve.deploy.engine_clients._POLL_S", 0.01)
    monkeypatch.setattr("mars_serve.deploy.engine_clients._RETRY_S", 0.05)


@pytest.fixture
async def start(
    tiny_model: Callable[[str], PreTrainedModel], make_engine: Callable[..., Engine]
) -> AsyncIterator[Start]:
    """Start a replica that no handle knows yet: ``start(name, engine_class, **sizes)``."""
    made = list[LocalReplica]()

    def make(
        name: str, engine_class: type[Engine] = ControlledEngine, **sizes: int
    ) -> LocalReplica:
        engine = make_engine(tiny_model("qwen2"), SPECIAL, engine_class=engine_class, **sizes)
        made.append(LocalReplica(name, LocalEngineClient(engine, LOOPBACK)))
        made[-1].loop.attach()
        return made[-1]

    yield make
    for replica in made:
        if isinstance(replica.loop.engine, ControlledEngine):
            replica.loop.engine.may_step.set()
        replica.loop.stop()


@pytest.fixture
def handle() -> ReplicaHandle:
    """A handle to no replicas yet."""
    return ReplicaHandle()
