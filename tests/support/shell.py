"""Runs a script for bash as a user would, with this environment's programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from mars_platform.cluster.processes import free_port

_PORT = "8000"
"""Port that the documentation's commands name, instead of which a free one is used."""


def run_script(script: str, directory: Path, *, timeout_s: float = 900) -> str:
    """Run a script, end all processes that it leaves behind, and return what it printed.

    Raises:
        AssertionError: the script failed; the message has its output.
    """
    programs = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    log = directory / "output.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["/bin/bash", "-c", script.replace(_PORT, str(free_port()))],
            cwd=directory,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_s)
        finally:
            _end(process)
    printed = log.read_text(encoding="utf-8", errors="replace")
    assert status == 0, f"status {status}:\n{printed}"
    return printed


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    process.wait()
