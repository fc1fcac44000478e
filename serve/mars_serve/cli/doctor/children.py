"""Runs the checks of a library in a process of its own, which may crash or hang."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mars_serve.cli.doctor.finding import Finding, State, failed

_LIMIT_S = 60.0
"""Seconds after which a process is ended; a cold disk may take half of that to load torch."""
_LAST_CHARACTERS = 200


class Child:
    """A running process that prints findings.

    Args:
        group: the process's checks, as in `mars_serve.cli.doctor.import_checks.GROUPS`.
        model: a checkpoint directory; None for none.
        adapter: directory of an adapter of the model; None for none.
    """

    def __init__(self, group: str, model: Path | None, adapter: Path | None = None) -> None:
        self.group = group
        self._began_s = time.monotonic()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        command = [sys.executable, "-m", "mars_serve.cli.doctor.import_checks", group]
        self._process = subprocess.Popen(  # noqa: S603 - our own module, no shell
            [*command, str(model or ""), str(adapter or "")],
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def findings(self) -> Iterator[Finding]:
        """Wait for the end of the process and yield its findings, with how it failed if it did."""
        left_s = max(_LIMIT_S - (time.monotonic() - self._began_s), 0.1)
        try:
            output, _ = self._process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired:
            self.end()
            output, _ = self._process.communicate()
            yield from _parsed(output)
            remedy = f"run python -c 'import {self.group.lower()}' to see what it waits for"
            yield failed(self.group, f"its checks took more than {_LIMIT_S:.0f} s", remedy)
            return
        yield from _parsed(output)
        if self._process.returncode:
            yield failed(self.group, self._how_it_ended(), f"install {self.group.lower()} again")

    def _how_it_ended(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        last = lines[-1][-_LAST_CHARACTERS:] if lines else "it printed nothing"
        status = self._process.returncode
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return f"the process that checks it ended with {how}: {last}"

    def end(self) -> None:
        """End the process if it runs."""
        if self._process.poll() is None:
            self._process.kill()

    def close(self) -> None:
        """End the process, and release what belongs to it."""
        self.end()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()


@contextmanager
def running_children(
    groups: list[str], model: Path | None, adapter: Path | None = None
) -> Iterator[list[Child]]:
    """Start all processes at once, and end those that still run after the block."""
    children = list[Child]()
    try:
        for group in groups:
            children.append(Child(group, model, adapter))
        yield children
    finally:
        for child in children:
            child.close()


def _parsed(output: bytes) -> Iterator[Finding]:
    for line in output.splitlines():
        content = json.loads(line)
        yield Finding(**{**content, "state": State(content["state"])})
