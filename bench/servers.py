"""Servers that a benchmark starts, one at a time, as child processes, and ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

_START_TIMEOUT_S, _STOP_TIMEOUT_S, _POLL_S = 180.0, 60.0, 0.2


@contextmanager
def running(
    command: list[str], ready_url: str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A server for the length of the block, once ``ready_url`` answers with 200.

    Raises:
        RuntimeError: it ended, or was not ready in time; names the log.
    """
    signal.signal(signal.SIGTERM, _leave)  # a benchmark that is ended ends its server, too
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - a command of the caller's, no shell
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, ready_url, log)
        yield process
    finally:
        _end(process)


def marsray_command(models: Mapping[str, Path], port: int, options: list[str]) -> list[str]:
    """``marsray serve`` of some models on a loopback port."""
    command = [sys.executable, "-m", "mars_platform", "serve", "--port", str(port)]
    for name, path in models.items():
        command += ["--model", f"{name}={path}"]
    return command + options


def free_port() -> int:
    """A loopback port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _leave(number: int, _: object) -> None:
    sys.exit(128 + number)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}; see {log}")
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(_POLL_S)
    raise RuntimeError(f"the server was not ready within {_START_TIMEOUT_S:.0f} s; see {log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue
