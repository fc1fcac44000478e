"""Runs marsray's own commands as child processes and ends them."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mars_platform.cluster.processes import (
    CommandFailed,
    end_process,
    running_server,
    start_process,
)

_COMMAND = [sys.executable, "-m", "mars_platform"]


@dataclass(frozen=True)
class DemoServer:
    """A running server."""

    base_url: str
    page_url: str
    _process: subprocess.Popen[bytes]

    def wait(self) -> None:
        """Wait until the server ends by itself."""
        _check("serve", self._process.wait())


def run_command(arguments: list[str], environment: dict[str, str]) -> None:
    """Run one marsray command, with its output on the terminal, until it ends."""
    process = start_process([*_COMMAND, *arguments], environment)
    try:
        status = process.wait()
    except BaseException:
        end_process(process)
        raise
    _check(arguments[0], status)


def _check(command: str, status: int) -> None:
    if status != 0:
        raise CommandFailed(f"marsray {command} ended with status {status}")


@contextmanager
def serving(
    models: dict[str, Path], port: int, environment: dict[str, str]
) -> Iterator[DemoServer]:
    """Run ``marsray serve`` for the length of the block.

    Raises:
        CommandFailed: the server ended, or was not ready in time.
    """
    arguments = ["serve", "--port", str(port)]
    for name, path in models.items():
        arguments += ["--model", f"{name}={path}"]
    # of requests that name none; a model without masks has mode ar only
    arguments += [part for i in range(len(models)) for part in ("--set", f"models.{i}.mode=exact")]
    address = f"http://127.0.0.1:{port}"
    command = [*_COMMAND, *arguments]
    with running_server(command, f"{address}/ready", environment, name="marsray serve") as process:
        yield DemoServer(f"{address}/v1", f"{address}/", process)
