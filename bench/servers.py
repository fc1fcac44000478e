"""Starts a server as a child process for a benchmark, and ends it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mars_platform.cluster.processes import end_process, wait_until_ready

SERVE = [sys.executable, "-m", "mars_platform", "serve"]
"""The command ``marsray serve``, without its arguments."""
_START_TIMEOUT_S = 600.0  # a busy machine may start Ray several times


@contextmanager
def running(
    command: list[str], ready_url: str, log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server for the length of the block, which begins when the server is ready.

    The server is ready when ``ready_url`` gives status 200. Its output is appended to ``log``.

    Raises:
        CommandFailed: The server ended or was not ready in time; the message names the log.
    """
    # runs the block below when the benchmark is terminated
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - a command of the caller's, no shell
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        wait_until_ready(
            process, ready_url, name=f"the server, see {log},", timeout_s=_START_TIMEOUT_S
        )
        yield process
    finally:
        end_process(process)
