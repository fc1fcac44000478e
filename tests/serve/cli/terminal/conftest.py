"""A server without Ray at a port of this machine, for commands that ask one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
import yaml

from decoding.local_engine_client import LocalEngineClient
from mars_platform.checkpoint.directory import read_checkpoint
from mars_serve.engine.engine import Engine
from rest.api_keys import key_entry
from rest.rest_server import ENGINE, SingleEngineBackend, app_of, served

USER = "the key of a user"


@pytest.fixture
def url(mars_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a server of one model, mars."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [key_entry(USER)]}), encoding="utf-8")
    monkeypatch.setenv("USER_KEY", USER)
    monkeypatch.setenv("OTHER_KEY", "no key of the server")
    checkpoint = read_checkpoint(mars_dir)
    loop = LocalEngineClient(Engine(checkpoint, ENGINE))
    app = app_of(served("mars", checkpoint, SingleEngineBackend(loop)), keys={"file": str(keys)})
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        loop.stop()
        listener.close()
