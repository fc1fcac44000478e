"""Shows what ``marsray calibrate`` measured: tables with their notes, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from mars_platform.checkpoint.calibration import NUM_BINS, DepthCalibration
from mars_serve.measure.calibration.run import CalibrationRun
from mars_serve.measure.frontier.report import frontier_figures, frontier_notes, frontier_table


def print_calibration(run: CalibrationRun, console: Console, *, as_json: bool) -> None:
    """Print the result as tables with their notes, or as JSON."""
    if as_json:
        frontier = frontier_figures(run.frontier, run.frontier_file)
        console.print_json(json.dumps(_figures(run) | {"frontier": frontier}))
        return
    console.print(_table(run.measured.calibration.depths))
    _print_notes(console, _notes(run))
    console.print(frontier_table(run.frontier))
    _print_notes(console, frontier_notes(run.frontier, run.frontier_file))


def _print_notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        console.print(note, style="dim", highlight=False, markup=False)


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
