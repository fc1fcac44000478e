"""Shows a measured frontier: table, notes and figures for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from mars_autoscale.model.capacity import Rung
from mars_autoscale.model.frontier import FrontierPoint
from mars_autoscale.policy.settings import InnerSettings
from mars_serve.measure.frontier.measure import MeasuredFrontier
from mars_serve.measure.frontier.step_fit import LinearSteps

_COLUMNS = ("log p / token", "tok/fwd", "pos/row", "tok/s", "gain", "break-even", "hull")


def rungs_of(measured: MeasuredFrontier) -> dict[tuple[str, float], Rung]:
    """Rung of each point, by mode and τ."""
    frontier, ar = measured.frontier, measured.capacity.rungs[0]
    below = {("threshold", rung.threshold): rung for rung in measured.capacity.rungs[1:]}
    exact = frontier.exact_rung()
    return {("ar", 1.0): ar, **below, **({("exact", 1.0): exact} if exact else {})}


def useful_rungs(measured: MeasuredFrontier) -> tuple[Rung, ...]:
    """Those that the autoscaler walks with all slots taken, see `Capacity.useful`."""
    return measured.capacity.useful(InnerSettings().min_gain)


def frontier_table(measured: MeasuredFrontier) -> Table:
    """A row for each way to decode; brackets are 95% intervals."""
    table = Table()
    table.add_column("mode", no_wrap=True)
    for title in (f"{measured.frontier.measure}, %", *_COLUMNS):
        table.add_column(title, justify="right", overflow="fold")
    rungs, useful = rungs_of(measured), useful_rungs(measured)
    for point in measured.frontier.points:
        rung = rungs[point.mode, point.threshold]
        table.add_row(
            f"τ {point.threshold:g}" if point.mode == "threshold" else point.mode,
            f"{point.quality:.1f} [{point.quality_low:.1f}, {point.quality_high:.1f}]",
            _likelihood(point),
            f"{point.tokens_per_forward:.2f}",
            f"{point.positions_per_row:.2f}",
            *_speed_cells(measured, rung),
            "yes" if rung in useful else "",
        )
    return table


def frontier_notes(measured: MeasuredFrontier, file: Path) -> list[str]:
    """What the table's figures are of."""
    frontier, slots = measured.frontier, measured.max_num_seqs
    steps = frontier.step_seconds.at_stored(slots * measured.stored_tokens)
    few, many = steps.positions[0], steps.positions[-1]
    answers = (
        "Accuracy is over the conversations with an answer"
        if frontier.measure == "accuracy"
        else "No row has an answer: agreement is the share of outputs equal to mode ar's"
    )
    few_s, many_s = (f"{1e3 * steps.at(places):.3g} ms" for places in (few, many))
    return [
        f"{answers}, {frontier.num_items} of them; brackets are 95% intervals. log p is the mean "
        "log-likelihood of an output token under the AR model. τ is compared with raw probability.",
        f"Speeds are of {slots} rows with all masks that read {measured.stored_tokens:.0f} stored "
        f"tokens each. A step of {few:g} positions takes {few_s}, of {many:g} {many_s}. Prompts "
        f"are read at {frontier.prefill_tokens_per_s:,.0f} tokens/s. {frontier.hardware}.",
        _steps(measured.steps),
        "break-even: rows up to which it is faster than ar. hull: ar and the thresholds that are "
        f"{InnerSettings().min_gain:g} times faster and lie on the concave hull of speed over "
        "loss. Mode exact loses nothing and stands beside it.",
        f"Written to {file}",
    ]


def frontier_figures(measured: MeasuredFrontier, file: Path) -> dict[str, Any]:
    """The file's content but for its checksum, and what follows from it."""
    rungs, useful, capacity = rungs_of(measured), useful_rungs(measured), measured.capacity
    figures: Mapping[str, Any] = measured.frontier.model_dump(mode="json", exclude_none=True)
    return {
        **figures,
        "file": str(file),
        "num_slots": measured.max_num_seqs,
        "stored_tokens_per_row": measured.stored_tokens,
        "step_time": _step_figures(measured.steps),
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


def _steps(found: LinearSteps | None) -> str:
    if found is None:
        return "t0 and K: none, steps grow faster than a straight line."
    positions = found.positions_to_double
    many = f"{positions:.0f}" if math.isfinite(positions) else "none, steps do not grow"
    return (
        f"As t0 * (1 + positions / K): t0 {1e3 * found.t0_s:.3g} ms, K {many}; measured steps are "
        f"off by {found.error_mean:.0%} on average, {found.error_max:.0%} at the most."
    )


def _step_figures(found: LinearSteps | None) -> dict[str, float | None] | None:
    if found is None:
        return None
    positions = found.positions_to_double
    return asdict(found) | {"positions_to_double": positions if math.isfinite(positions) else None}


def _likelihood(point: FrontierPoint) -> str:
    found = point.log_likelihood
    return f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]" if found else ""


def _speed_cells(measured: MeasuredFrontier, rung: Rung) -> list[str]:
    """Tokens a second with all slots taken, gain over plain AR decoding, break-even batch."""
    capacity = measured.capacity
    speed = f"{capacity.tokens_per_s(rung):,.0f}"
    if rung == capacity.rungs[0]:
        return [speed, "", ""]
    return [speed, f"{capacity.gain(rung):.2f}", f"{capacity.break_even_batch(rung)}"]
