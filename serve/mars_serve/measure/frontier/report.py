"""Shows a measured frontier: table, notes, and figures for JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from mars_autoscale.model.capacity import Rung
from mars_autoscale.policy.settings import InnerSettings
from mars_platform.cli.report import Column, figure_column, interval, table_of
from mars_platform.statistics import Estimate
from mars_serve.measure.frontier.measure import MeasuredFrontier
from mars_serve.measure.frontier.step_fit import LinearSteps


def rungs_of(measured: MeasuredFrontier) -> dict[tuple[str, float], Rung]:
    """Return the rung of each point, by mode and τ."""
    frontier, ar = measured.frontier, measured.capacity.rungs[0]
    below = {("threshold", rung.threshold): rung for rung in measured.capacity.rungs[1:]}
    exact = frontier.exact_rung()
    return {("ar", 1.0): ar, **below, **({("exact", 1.0): exact} if exact else {})}


def useful_rungs(measured: MeasuredFrontier) -> tuple[Rung, ...]:
    """Return the rungs that the autoscaler uses with a full batch, see `Capacity.useful`."""
    return measured.capacity.useful(InnerSettings().min_gain)


def frontier_table(measured: MeasuredFrontier) -> Table:
    """Return a table with a row for each setting; brackets are 95% intervals."""
    columns = [
        Column("mode", "mode", no_wrap=True),
        figure_column(f"{measured.frontier.measure}, %", "quality"),
        figure_column("log p / token", "log_likelihood"),
        figure_column("tok/fwd", "tokens_per_forward", ".2f"),
        figure_column("pos/row", "positions_per_row", ".2f"),
        figure_column("tok/s", "tokens_per_s", ",.0f"),
        figure_column("gain", "gain", ".2f"),
        figure_column("break-even", "break_even"),
        figure_column("hull", "hull"),
    ]
    return table_of(columns, _rows(measured))


def _rows(measured: MeasuredFrontier) -> list[dict[str, Any]]:
    capacity, useful, rungs = measured.capacity, useful_rungs(measured), rungs_of(measured)
    rows = []
    for point in measured.frontier.points:
        rung = rungs[point.mode, point.threshold]
        quality = Estimate(point.quality, point.quality_low, point.quality_high)
        found = point.log_likelihood
        row = {
            "mode": f"τ {point.threshold:g}" if point.mode == "threshold" else point.mode,
            "quality": interval(quality, ".1f"),
            "log_likelihood": found
            and interval(Estimate(found.mean, found.low, found.high), ".3f"),
            "tokens_per_forward": point.tokens_per_forward,
            "positions_per_row": point.positions_per_row,
            "tokens_per_s": capacity.tokens_per_s(rung),
            "hull": "yes" if rung in useful else "",
        }
        if rung != capacity.rungs[0]:
            row |= {"gain": capacity.gain(rung), "break_even": capacity.break_even_batch(rung)}
        rows.append(row)
    return rows


def frontier_notes(measured: MeasuredFrontier, file: Path) -> list[str]:
    """Return the notes of the table."""
    frontier, num_rows = measured.frontier, measured.max_num_seqs
    steps = frontier.step_seconds.at_cached(num_rows * measured.cached_tokens)
    few, many = steps.positions[0], steps.positions[-1]
    answers = (
        "Accuracy is over the conversations with an answer"
        if frontier.measure == "accuracy"
        else "No row has an answer: agreement is the share of outputs equal to mode ar's"
    )
    few_s, many_s = (f"{1e3 * steps.at(positions):.3g} ms" for positions in (few, many))
    return [
        f"{answers}, {frontier.num_items} of them; brackets are 95% intervals. log p is the mean "
        "log-likelihood of an output token under the AR model. τ is compared with raw probability.",
        f"Speeds are of {num_rows} rows with all masks that read {measured.cached_tokens:.0f} "
        f"stored tokens each. A step of {few:g} positions takes {few_s}, of {many:g} {many_s}. "
        f"Prompts are read at {frontier.prefill_tokens_per_s:,.0f} tokens/s. {frontier.hardware}.",
        _step_note(measured.steps),
        "break-even: rows up to which it is faster than ar. hull: ar and the thresholds that are "
        f"{InnerSettings().min_gain:g} times faster and lie on the concave hull of speed over "
        "loss. Mode exact loses nothing and stands beside it.",
        f"Written to {file}",
    ]


def frontier_figures(measured: MeasuredFrontier, file: Path) -> dict[str, Any]:
    """Return the content of ``frontier.json`` without its checksum, and what follows from it."""
    rungs, useful, capacity = rungs_of(measured), useful_rungs(measured), measured.capacity
    return {
        **measured.frontier.model_dump(mode="json", exclude_none=True),
        "file": file,
        "num_slots": measured.max_num_seqs,
        "stored_tokens_per_row": measured.cached_tokens,
        "step_time": measured.steps and asdict(measured.steps),
        "rungs": [
            {
                "mode": mode,
                "threshold": threshold,
                "loss": rung.loss,
                "tokens_per_forward": rung.tokens_per_forward,
                "tokens_per_s": capacity.tokens_per_s(rung),
                "gain": capacity.gain(rung),
                "break_even_batch": None if mode == "ar" else capacity.break_even_batch(rung),
                "useful": rung in useful,
            }
            for (mode, threshold), rung in rungs.items()
        ],
    }


def _step_note(fitted: LinearSteps | None) -> str:
    if fitted is None:
        return "t0 and K: none, steps grow faster than a straight line."
    positions = fitted.positions_to_double
    many = f"{positions:.0f}" if math.isfinite(positions) else "none, steps do not grow"
    return (
        f"As t0 * (1 + positions / K): t0 {1e3 * fitted.t0_s:.3g} ms, K {many}; measured steps are "
        f"off by {fitted.error_mean:.0%} on average, {fitted.error_max:.0%} at the most."
    )
