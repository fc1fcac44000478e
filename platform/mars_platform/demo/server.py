"""Runs marsray's own commands as child processes, and ends them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 60.0
_POLL_S = 0.25


class CommandFailed(RuntimeError):
    """A child command ended with an error; it has said on stderr what it was."""


def run_command(arguments: list[str], environment: dict[str, str]) -> None:
    """Run one marsray command to its end, its output going to the terminal.

    Raises:
        CommandFailed: its exit status is not 0.
    """
    process = _start(arguments, environment)
    try:
        status = process.wait()
    except BaseException:
        _end(process)
        raise
    if status != 0:
        raise CommandFailed(f"marsray {arguments[0]} ended with status {status}")


@contextmanager
def running_server(
    models: dict[str, Path], port: int, environment: dict[str, str]
) -> Iterator[str]:
    """``marsray serve`` for the length of the block; yields the API's base URL.

    Raises:
        CommandFailed: it ended, or was not ready in time.
    """
    arguments = ["serve", "--port", str(port)]
    for name, path in models.items():
        arguments += ["--model", f"{name}={path}"]
    process = _start(arguments, environment)
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}/ready")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        _end(process)


def free_port() -> int:
    """A loopback port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _start(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mars_platform", *arguments]
    # A session of its own: an interrupt on the terminal reaches it once, through `_end`.
    return subprocess.Popen(  # noqa: S603 - our own command, no shell
        command, env={**os.environ, **environment}, start_new_session=True
    )


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CommandFailed(f"marsray serve ended with status {process.returncode}")
        try:
            if httpx.get(url, timeout=5.0).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(_POLL_S)
    raise CommandFailed(f"marsray serve was not ready within {_START_TIMEOUT_S:.0f} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a command to end, and make it if it does not."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue
