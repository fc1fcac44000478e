"""Options that several of the server's commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

Page = Annotated[
    Path | None, typer.Option("--html", help="HTML page to write, with figure and tables.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def let_idle_threads_sleep() -> None:
    """Make CPU kernels that are loaded later let their idle threads sleep.

    Threads that spin while idle slow a run down many times if other processes need their cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
