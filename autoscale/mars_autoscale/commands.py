"""The command ``marsray simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mars_autoscale.traces.files import TraceFormat, TraceRequest, read_trace
from mars_platform.cli.options import with_options
from mars_platform.config import Settings

if TYPE_CHECKING:
    from mars_autoscale.simulation.config import SimulationConfig

_FILE_WIDTH = 140
"""Columns of a table that is written to a file or pipe, for which rich assumes 80."""


class SimulateOptions(Settings):
    """Options of ``marsray simulate``."""

    config: Annotated[Path, typer.Argument()]
    """YAML file: replicas, ladder, settings of policies."""
    trace: Path | None = None
    """Trace to replay, may end in .gz; by default the config's synthetic one."""
    trace_format: TraceFormat | None = None
    """Format of the trace; by default guessed from the file."""
    overrides: Annotated[tuple[str, ...], typer.Option("--set")] = ()
    """Override a setting: key.sub=value. May be repeated."""
    json_file: Annotated[Path | None, typer.Option("--json")] = None
    """File to write the figures to; - prints them instead."""
    plot: Path | None = None
    """Picture to draw; its suffix says the format."""


@with_options
def simulate(options: SimulateOptions) -> None:
    """Replay a request trace against autoscaling policies."""
    from functools import partial

    from mars_autoscale.simulation.compare import compare
    from mars_autoscale.simulation.config import SimulationConfig
    from mars_autoscale.simulation.report import comparison_table, figures_json, picture_of
    from mars_platform.cli.pictures import write_picture
    from mars_platform.cli.progress import progress_display
    from mars_platform.cli.report import (
        STANDARD_OUTPUT,
        check_output_files,
        output_console,
        write_json,
    )
    from mars_platform.config import load_settings

    json_file = options.json_file
    check_output_files({"--json": json_file, "--plot": options.plot})
    settings = load_settings(options.config, SimulationConfig, options.overrides)
    requests = _requests(settings, options)
    with progress_display() as display:
        comparison = compare(settings, requests, partial(display.update, "simulate"))
    if json_file != STANDARD_OUTPUT:
        table = comparison_table(comparison, settings.objective_ttft_s)
        output_console(_FILE_WIDTH).print(table)
    if json_file is not None:
        write_json(json_file, figures_json(comparison))
    write_picture(lambda: picture_of(comparison), options.plot)


def _requests(settings: SimulationConfig, options: SimulateOptions) -> list[TraceRequest]:
    from mars_autoscale.traces.synthetic import generate
    from mars_platform.errors import UserError

    if options.trace is not None:
        return read_trace(options.trace, options.trace_format)
    if settings.synthetic is None:
        raise UserError("--trace: give a file, or make a trace by the config's synthetic")
    return generate(settings.synthetic, settings.seeds[0])
