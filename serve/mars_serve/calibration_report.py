"""``marsray calibrate``: measures, writes ``calibration.json``, and shows a table and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from mars_platform.calibration import (
    NUM_BINS,
    Bin,
    DepthCalibration,
    check_writable,
    write_calibration,
)
from mars_platform.checkpoint import read_checkpoint
from mars_platform.errors import UserError
from mars_platform.progress import progress_display
from mars_serve.bench.report import check_plot_file
from mars_serve.calibration import Measured, check_halves, measure_calibration
from mars_serve.evaluation import read_items

_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class CalibrateOptions:
    """What ``marsray calibrate`` is asked for."""

    model: str
    """Checkpoint directory or hub id."""
    data: Sequence[Path]
    """JSONL and Parquet files of conversations."""
    max_items: int | None = None
    """Conversations, the first ones of the files."""
    max_cursors: int = 4000
    """Places at which tokens are proposed, over all conversations; at least 2."""
    max_tokens: int = 256
    """Output tokens of a conversation; what the context leaves may be less."""
    batch: int = 32
    """Conversations that decode at once."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Auto is CUDA where there is a device."""
    dtype: Literal["float32", "bf16"] | None = None
    """Of the weights; None for float32 on the CPU and bf16 on CUDA."""
    plot: Path | None = None
    """Picture to draw; its suffix says the format."""


@dataclass(frozen=True)
class CalibrationRun:
    """The result."""

    options: CalibrateOptions
    file: Path
    """Where the calibration was written."""
    device: str
    dtype: str
    measured: Measured


def calibrate_model(options: CalibrateOptions, console: Console) -> CalibrationRun:
    """Measure, write the file, draw the plot if there is to be one; progress on ``console``.

    Raises:
        UserError: the model, the data or an option is unusable.
    """
    if options.plot is not None:
        check_plot_file(options.plot)
    device = _device(options.device)
    dtype = options.dtype or ("float32" if device == "cpu" else "bf16")
    # what is replaced need not be readable
    checkpoint = read_checkpoint(options.model, with_calibration=False)
    if checkpoint.metadata is None:
        raise UserError(
            f"model: {options.model} is a plain AR checkpoint without mars.json: it proposes one "
            "token a pass and has nothing to calibrate; name one trained with MARS"
        )
    check_writable(checkpoint.path)
    items = read_items(
        options.data,
        checkpoint.tokenizer,
        max_length=checkpoint.max_length,
        max_items=options.max_items,
    )
    check_halves(items)
    with progress_display(console) as display:
        measured = measure_calibration(
            checkpoint,
            items,
            max_tokens=options.max_tokens,
            max_cursors=options.max_cursors,
            max_batch=options.batch,
            dtype=_DTYPES[dtype],
            device=device,
            on_progress=display.update,
        )
    file = write_calibration(checkpoint.path, measured.calibration)
    run = CalibrationRun(options, file, device, dtype, measured)
    if options.plot is not None:
        plot_reliability(run, options.plot)
    return run


def print_calibration(run: CalibrationRun, console: Console, *, as_json: bool) -> None:
    """Print the result as a table with its notes, or as JSON."""
    if as_json:
        console.print_json(json.dumps(_figures(run)))
        return
    console.print(_table(run.measured.calibration.depths))
    for note in _notes(run):
        console.print(note, style="dim", highlight=False, markup=False)


def plot_reliability(run: CalibrationRun, path: Path) -> None:
    """Draw accuracy over confidence before and after, a line for each depth from 1.

    Args:
        run: what was measured.
        path: the picture; its suffix says the format.
    """
    figure = Figure(figsize=(10, 5), layout="constrained")
    before, after = figure.subplots(1, 2, sharex=True, sharey=True)
    diagrams = run.measured.reliability[1:]
    temperatures = run.measured.calibration.temperatures[1:]
    _draw(before, "before", [(diagram.before, 1.0) for diagram in diagrams])
    after_bins = [diagram.after for diagram in diagrams]
    _draw(after, "after", list(zip(after_bins, temperatures, strict=True)))
    before.set_ylabel("share of proposed tokens that are right")
    figure.suptitle(f"{run.options.model}: reliability by depth", fontsize="medium")
    figure.savefig(path, dpi=110)


def _draw(axis: Axes, title: str, lines: Sequence[tuple[list[Bin], float]]) -> None:
    """One panel: bins and temperature of each depth from 1."""
    axis.plot([0, 1], [0, 1], color="grey", linestyle=":", linewidth=1)
    for depth, (bins, temperature) in enumerate(lines, start=1):
        if bins:
            axis.plot(
                [part.confidence for part in bins],
                [part.accuracy for part in bins],
                marker=".",
                linewidth=1,
                label=f"depth {depth}, T = {temperature:.2f}",
            )
    axis.set_title(title, fontsize="small")
    axis.set_xlabel("confidence (mean of the bin)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small", loc="lower right")


def _table(depths: Sequence[DepthCalibration]) -> Table:
    table = Table()
    columns = ("depth", "fitted on", "checked on", "right", "temperature")
    for title in (*columns, "ECE", "calibrated", "Brier", "calibrated"):
        table.add_column(title, justify="right", overflow="fold")
    for depth, found in enumerate(depths):
        table.add_row(
            str(depth),
            f"{found.num_fitted:,}",
            f"{found.num_checked:,}",
            "" if found.accuracy is None else f"{100 * found.accuracy:.1f}%",
            f"{found.temperature:.3f}",
            *map(
                _cell,
                (found.ece_before, found.ece_after, found.brier_before, found.brier_after),
            ),
        )
    return table


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _notes(run: CalibrationRun) -> list[str]:
    options, calibration = run.options, run.measured.calibration
    notes = [
        f"{calibration.num_items} conversations, at most {options.max_tokens} output tokens, "
        f"{run.measured.num_cursors:,} cursors; {run.dtype} on {run.device}. A proposed token is "
        "right if mode ar gives it at that place. Depth 0 is mode ar's own prediction.",
        f"ECE is over {NUM_BINS} bins of equal size. All figures are over the half that was not "
        "fitted on.",
    ]
    temperatures = calibration.temperatures
    kept = [str(depth) for depth in range(1, len(temperatures)) if temperatures[depth] == 1.0]
    if kept:
        notes.append(
            f"Temperature 1 at depth {', '.join(kept)}: there is nothing to correct, or the half "
            "to fit on holds no token that is right or none that is wrong."
        )
    notes.append(f"Written to {run.file}")
    return notes


def _figures(run: CalibrationRun) -> dict[str, Any]:
    options, calibration = run.options, run.measured.calibration
    return {
        "model": options.model,
        "data": [str(path) for path in options.data],
        "file": str(run.file),
        "max_tokens": options.max_tokens,
        "num_cursors": run.measured.num_cursors,
        "device": run.device,
        "dtype": run.dtype,
        **calibration.model_dump(mode="json"),
    }


def _device(device: str) -> str:
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UserError("--device: there is no CUDA device on this machine; use cpu")
    return "cuda" if available and device != "cpu" else "cpu"
