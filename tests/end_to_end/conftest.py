"""Servers as child processes, as a user starts them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

_START_TIMEOUT_S = 120
_STOP_TIMEOUT_S = 60


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(f"{address}/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.2)
    pytest.fail(f"not ready in time: {log.read_text()}")


@contextmanager
def _serve(settings: dict[str, Any], directory: Path) -> Iterator[str]:
    port, log, config = _free_port(), directory / "log", directory / "serve.yaml"
    config.write_text(yaml.safe_dump({"port": port, **settings}))
    command = [sys.executable, "-m", "mars_platform", "serve", str(config)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        status = process.wait(_STOP_TIMEOUT_S)
    assert status == 0, log.read_text()


@pytest.fixture(scope="session")
def serve() -> Callable[[dict[str, Any], Path], AbstractContextManager[str]]:
    """``marsray serve`` for the length of a block: ``serve(settings, directory)`` is its address.

    Settings are those of a configuration file, without the port; the log goes to the directory.
    """
    return _serve
