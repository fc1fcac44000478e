"""The command ``marsray demo``."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from mars_platform.cli.options import with_options
from mars_platform.config import Settings


class DemoOptions(Settings):
    """Options of ``marsray demo``."""

    keep: Path | None = None
    """Keep the data and the checkpoint in this new directory."""
    json_file: Annotated[Path | None, typer.Option("--json")] = None
    """Write the figures to this file."""
    svg: Path | None = None
    """Draw the results into this SVG file."""
    items: int = Field(default=200, ge=10, le=10_000)
    """Held-out questions to ask."""
    serve: Annotated[bool, typer.Option("--serve")] = False
    """Keep the server up afterwards, until Ctrl-C."""


@with_options
def demo(options: DemoOptions) -> None:
    """Train a tiny model, serve it, and compare its decoding modes."""
    from rich.console import Console

    from mars_platform.demo.show import run_demo

    run_demo(Console(), options)
