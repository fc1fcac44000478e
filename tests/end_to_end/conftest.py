"""Servers as child processes, as a user starts them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from mars_platform.cluster.processes import free_port, wait_until_ready

_START_TIMEOUT_S = 120
_STOP_TIMEOUT_S = 60


@contextmanager
def _serve(settings: dict[str, Any], directory: Path) -> Iterator[str]:
    port, log, config = free_port(), directory / "log", directory / "serve.yaml"
    config.write_text(yaml.safe_dump({"port": port, **settings}))
    command = [sys.executable, "-m", "mars_platform", "serve", str(config)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{port}"
        name = f"marsray serve, see {log},"
        wait_until_ready(process, f"{address}/ready", name=name, timeout_s=_START_TIMEOUT_S)
        yield address
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
