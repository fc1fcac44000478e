"""The commands ``marsray simulate`` and ``marsray promote``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mars_autoscale.simulation.config import SimulationConfig
    from mars_autoscale.traces import TraceRequest

_FILE_WIDTH = 140  # of a table that goes to a file or pipe, where rich assumes 80


def simulate(
    config: Annotated[Path, typer.Argument(help="YAML: replicas, ladder, policies' constants.")],
    trace: Annotated[
        Path | None,
        typer.Option(help="Requests to replay; may end in .gz. Else the config's synthetic ones."),
    ] = None,
    trace_format: Annotated[
        str | None, typer.Option(help="azure, mooncake or csv; else guessed from the file.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value of the config; may be repeated.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File to write the figures to.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Picture to draw; its suffix says the format.")
    ] = None,
) -> None:
    """Replay a request trace against autoscaling policies, and compare them."""
    from functools import partial

    from rich.console import Console

    from mars_autoscale.simulation.compare import compare
    from mars_autoscale.simulation.config import SimulationConfig
    from mars_autoscale.simulation.report import check_files, table_of, write_files
    from mars_platform.config import load_settings
    from mars_platform.progress import progress_display

    check_files(json_file, plot)
    settings = load_settings(config, SimulationConfig, set_ or [])
    requests = _requests(settings, trace, trace_format)
    console = Console(stderr=True)
    with progress_display(console) as display:
        comparison = compare(settings, requests, partial(display.update, "simulate"))
    terminal = Console()
    width = None if terminal.is_terminal else _FILE_WIDTH
    Console(width=width).print(table_of(comparison, settings.objective_ttft_s))
    write_files(comparison, json_file, plot)


def _requests(
    settings: SimulationConfig, trace: Path | None, trace_format: str | None
) -> list[TraceRequest]:
    """The file's, or the config's made-up ones."""
    from mars_autoscale.synthetic import generate
    from mars_autoscale.traces import TraceFormat, read_trace
    from mars_platform.errors import UserError

    if trace_format is not None and trace_format not in list(TraceFormat):
        known = ", ".join(TraceFormat)
        raise UserError(f"--trace-format: {trace_format} is not one of {known}")
    if trace is not None:
        return read_trace(trace, TraceFormat(trace_format) if trace_format else None)
    if settings.synthetic is None:
        raise UserError("--trace: give a file, or make a trace by the config's synthetic")
    return generate(settings.synthetic, settings.seeds[0])


def promote(
    candidate: Annotated[Path, typer.Argument(help="Checkpoint directory, with frontier.json.")],
    service: Annotated[
        Path, typer.Option(help="Symbolic link to the checkpoint in service; may not exist yet.")
    ],
    max_loss: Annotated[
        float, typer.Option(min=0, help="Points of quality that it may be worse by.")
    ] = 1.0,
    max_slower: Annotated[
        float, typer.Option(min=0, help="Share of tokens a pass that it may give fewer.")
    ] = 0.05,
    force: Annotated[
        bool,
        typer.Option("--force", help="Do not compare it with the one that is there; to go back."),
    ] = False,
) -> None:
    """Put a checkpoint in service, unless it is worse than the one that is there.

    Both must have been calibrated on the same conversations, with an answer to check in each row.
    All files of the new one are compared with its manifest, which is written if there is none. The
    link changes in one step; servers that are to serve the new checkpoint are deployed again.
    """
    from rich.console import Console
    from rich.table import Table

    from mars_autoscale.promote import Gate
    from mars_autoscale.promote import promote as put_in_service
    from mars_platform.config import build_settings

    gate = build_settings({"max_loss": max_loss, "max_slower": max_slower}, Gate, source="options")
    before = service.resolve() if service.is_symlink() else None
    compared = put_in_service(candidate, service, None if force else gate)
    console = Console()
    if compared:
        table = Table("", "quality", "in service", "tokens a pass", "in service")
        for each in compared:
            new, old = each.candidate, each.current
            table.add_row(
                "mode ar" if old.mode == "ar" else f"τ {old.threshold:g}",
                f"{new.quality:.1f}",
                f"{old.quality:.1f}",
                f"{new.tokens_per_forward:.2f}",
                f"{old.tokens_per_forward:.2f}",
            )
        console.print(table)
    console.print(f"{service} is now {service.resolve()}", highlight=False, soft_wrap=True)
    if before is not None:
        console.print(f"before, it was {before}", highlight=False, soft_wrap=True)
