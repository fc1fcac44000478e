"""The command ``marsray simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mars_autoscale.traces.files import TraceFormat, TraceRequest, read_trace
from mars_platform.cli.options import Overrides, Page

if TYPE_CHECKING:
    from mars_autoscale.simulation.config import SimulationConfig

_FILE_WIDTH = 140
"""Columns of a table that is written to a file or pipe, for which rich assumes 80."""


def simulate(
    config: Annotated[
        Path, typer.Argument(help="YAML file: replicas, ladder, settings of policies.")
    ],
    trace: Annotated[
        Path | None,
        typer.Option(help="Trace to replay, may end in .gz; default: the config's synthetic one."),
    ] = None,
    trace_format: Annotated[
        TraceFormat | None,
        typer.Option(help="Its layout; default: guessed from the file."),
    ] = None,
    set_: Overrides = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="File to write the figures to; - prints them instead."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Picture to draw; its suffix says the format.")
    ] = None,
    page: Page = None,
) -> None:
    """Replay a request trace against autoscaling policies."""
    from functools import partial

    from mars_autoscale.simulation.compare import compare
    from mars_autoscale.simulation.config import SimulationConfig
    from mars_autoscale.simulation.report import comparison_table, figures_json, picture_of
    from mars_platform.cli.pictures import write_pictures
    from mars_platform.cli.progress import progress_display
    from mars_platform.cli.report import (
        STANDARD_OUTPUT,
        check_output_files,
        output_console,
        write_json,
    )
    from mars_platform.config import load_settings

    check_output_files({"--json": json_file, "--plot": plot, "--html": page})
    settings = load_settings(config, SimulationConfig, set_ or [])
    requests = _requests(settings, trace, trace_format)
    with progress_display() as display:
        comparison = compare(settings, requests, partial(display.update, "simulate"))
    table = comparison_table(comparison, settings.objective_ttft_s)
    if json_file != STANDARD_OUTPUT:
        output_console(_FILE_WIDTH).print(table)
    if json_file is not None:
        write_json(json_file, figures_json(comparison))
    write_pictures(
        lambda: picture_of(comparison),
        title=f"marsray simulate {config.name}",
        show=lambda console: console.print(table),
        plot=plot,
        page=page,
    )


def _requests(
    settings: SimulationConfig, trace: Path | None, trace_format: TraceFormat | None
) -> list[TraceRequest]:
    """Read the trace file, or generate the config's synthetic trace."""
    from mars_autoscale.traces.synthetic import generate
    from mars_platform.errors import UserError

    if trace is not None:
        return read_trace(trace, trace_format)
    if settings.synthetic is None:
        raise UserError("--trace: give a file, or make a trace by the config's synthetic")
    return generate(settings.synthetic, settings.seeds[0])
