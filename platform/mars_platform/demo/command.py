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
    svg: Annotated[Path | None, typer.Option(help="Draw the results into this SVG file.")] = None,
    items: Annotated[
        int, typer.Option(min=10, max=10_000, help="Held-out questions to ask.")
    ] = 200,
    serve: Annotated[
        bool, typer.Option("--serve", help="Keep the server up afterwards, until Ctrl-C.")
    ] = False,
) -> None:
    """Train a tiny model, serve it, and compare its decoding modes."""
    from rich.console import Console

    from mars_platform.demo.show import DemoOptions, run_demo

    run_demo(Console(), DemoOptions(keep, json_file, svg, items, serve))
