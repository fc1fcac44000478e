"""The command ``marsray demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    keep: Annotated[
        Path | None, typer.Option(help="Keep the data and the checkpoint in this new directory.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
    items: Annotated[int, typer.Option(min=10, help="Held-out questions to ask.")] = 600,
) -> None:
    """Train a tiny model, serve it, and compare thresholds."""
    from rich.console import Console

    from mars_platform.demo.show import run_demo

    run_demo(Console(), keep=keep, json_file=json_file, num_items=items)
