"""Shows what ``marsray calibrate`` measured: tables with their notes, or JSON."""

from typing import Any

from rich.console import Console

from mars_platform.checkpoint.calibration import NUM_BINS
from mars_platform.cli.report import figure_column, print_json, print_notes, table_of
from mars_serve.measure.calibrate import CalibrationRun
from mars_serve.measure.frontier.report import frontier_figures, frontier_notes, frontier_table

_COLUMNS = (
    figure_column("depth", "depth"),
    figure_column("fitted on", "num_fitted", ","),
    figure_column("checked on", "num_checked", ","),
    figure_column("right", "accuracy", ".1%"),
    figure_column("temperature", "temperature", ".3f"),
    figure_column("ECE", "ece_before", ".4f"),
    figure_column("calibrated", "ece_after", ".4f"),
    figure_column("Brier", "brier_before", ".4f"),
    figure_column("calibrated", "brier_after", ".4f"),
)


def print_calibration(run: CalibrationRun, console: Console, *, as_json: bool) -> None:
    """Print the result as tables with their notes, or as JSON."""
    if as_json:
        frontier = frontier_figures(run.frontier, run.frontier_file)
        print_json(console, _figures(run) | {"frontier": frontier})
        return
    depths = run.measured.calibration.depths
    rows = [{"depth": depth, **vars(each)} for depth, each in enumerate(depths)]
    console.print(table_of(_COLUMNS, rows))
    print_notes(console, _notes(run))
    console.print(frontier_table(run.frontier))
    print_notes(console, frontier_notes(run.frontier, run.frontier_file))


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
    options = run.options
    return {
        "model": options.model,
        "data": options.data,
        "file": run.file,
        "max_tokens": options.max_tokens,
        "num_cursors": run.measured.num_cursors,
        "device": run.device,
        "dtype": run.dtype,
        **run.measured.calibration.model_dump(mode="json"),
    }
