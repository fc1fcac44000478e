"""A server without Ray at a port of this machine, for commands that ask one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
import yaml

from decoding.local_loop import LocalLoop
from mars_platform.checkpoint.directory import read_checkpoint
from mars_serve.engine.engine import Engine
from mars_serve.observability.replica_telemetry import ReplicaTelemetry
from rest.api_keys import key_entry
from rest.rest_server import ENGINE, LoopBackend, app_of, served

ADMIN, USER = "the key of an administrator", "the key of a user"


class MeasuredBackend(LoopBackend):
    """A backend whose replica also gives its metrics."""

    async def metrics(self) -> list[str]:
        return [ReplicaTelemetry("mars", "only", self.loop).exposition()]


@contextmanager
def _listening(model: Path, keys: Path, port: int) -> Iterator[int]:
    checkpoint = read_checkpoint(model)
    loop = LocalLoop(Engine(checkpoint, ENGINE))
    app = app_of(served("mars", checkpoint, MeasuredBackend(loop)), keys={"file": str(keys)})
    listener = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        loop.stop()
        listener.close()


@pytest.fixture
def listening(
    mars_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., object]:
    """Function that serves a model for the length of a block, and gives the port."""
    keys = tmp_path / "keys.yaml"
    entries = [key_entry(ADMIN, admin=True), key_entry(USER)]
    keys.write_text(yaml.safe_dump({"keys": entries}), encoding="utf-8")
    monkeypatch.setenv("ADMIN_KEY", ADMIN)
    monkeypatch.setenv("USER_KEY", USER)
    monkeypatch.setenv("OTHER_KEY", "no key of the server")
    return lambda port=0: _listening(mars_dir, keys, port)


@pytest.fixture
def url(listening: Callable[..., object]) -> Iterator[str]:
    """Address of a server of one model, mars."""
    with listening() as port:  # type: ignore[attr-defined]
        yield f"http://127.0.0.1:{port}"
