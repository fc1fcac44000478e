"""Servers that a benchmark starts, one at a time, as child processes, and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mars_platform.cluster.processes import end_process, wait_until_ready

_START_TIMEOUT_S = 180.0


@contextmanager
def running(
    command: list[str], ready_url: str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A server for the length of the block, once ``ready_url`` answers with 200.

    Raises:
        CommandFailed: it ended, or was not ready in time; names the log.
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
        wait_until_ready(
            process, ready_url, name=f"the server, see {log},", timeout_s=_START_TIMEOUT_S
        )
        yield process
    finally:
        end_process(process)


def marsray_command(models: Mapping[str, Path], port: int, options: list[str]) -> list[str]:
    """``marsray serve`` of some models on a loopback port."""
    command = [sys.executable, "-m", "mars_platform", "serve", "--port", str(port)]
    for name, path in models.items():
        command += ["--model", f"{name}={path}"]
    return command + options


def configured_command(config: Path) -> list[str]:
    """``marsray serve`` of a settings file, which names the port, too."""
    return [sys.executable, "-m", "mars_platform", "serve", str(config)]


def _leave(number: int, _: object) -> None:
    sys.exit(128 + number)
