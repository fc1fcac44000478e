"""Shows a measured frontier: table, notes, and figures for JSON."""

from pathlib import Path
from typing import Any

from rich.table import Table

from mars_autoscale.model.capacity import Rung
from mars_autoscale.model.frontier import Frontier
from mars_autoscale.model.frontier_points import FrontierPoint
from mars_autoscale.policy.settings import InnerSettings
from mars_platform.cli.report import Column, figure_column, interval, table_of
from mars_platform.method.mode import Mode
from mars_platform.statistics import Estimate
from mars_serve.measure.frontier.measure import MeasuredFrontier


def rungs_of(measured: MeasuredFrontier) -> list[tuple[FrontierPoint, Rung]]:
    """Return the points that make up the ladder, each with its rung."""
    return [
        (point, measured.capacity.rung(point.mode, point.threshold))
        for point in measured.frontier.points
    ]


def useful_rungs(measured: MeasuredFrontier) -> tuple[Rung, ...]:
    """Return the rungs that the autoscaler uses with a full batch, see `Capacity.ladder`."""
    return measured.capacity.ladder(InnerSettings().min_gain)


def name_of_rung(rung: Rung) -> str:
    """Return the name of a rung in tables and pictures."""
    return f"τ {rung.threshold:g}" if rung.mode is Mode.THRESHOLD else f"mode {rung.mode}"


def frontier_table(measured: MeasuredFrontier) -> Table:
    """Return a table with a row for each setting; brackets are 95% intervals."""
    columns = [
        Column("", "name", no_wrap=True),
        figure_column(f"{measured.frontier.measure}, %", "quality", ".1f"),
        figure_column("points lost", "loss"),
        figure_column("differ", "diverged", ".0%"),
        figure_column("tok/fwd", "tokens_per_forward", ".2f"),
        figure_column("pos/row", "positions_per_row", ".2f"),
        figure_column("tok/s", "tokens_per_s", ",.0f"),
        figure_column("gain", "gain", ".2f"),
        figure_column("break-even", "break_even"),
        figure_column("ladder", "ladder"),
    ]
    return table_of(columns, _rows(measured))


def _rows(measured: MeasuredFrontier) -> list[dict[str, Any]]:
    capacity, useful = measured.capacity, useful_rungs(measured)
    rows = []
    for point, rung in rungs_of(measured):
        loss, divergence, window = point.loss, point.divergence, capacity.window(rung)
        ladder = "base" if rung == capacity.base() else "yes" if rung in useful else ""
        rows.append(
            {
                "name": name_of_rung(rung),
                "quality": point.quality,
                "loss": loss and interval(Estimate(loss.value, loss.low, loss.high), ".1f"),
                "diverged": divergence and divergence.num_diverged / divergence.num_outputs,
                "tokens_per_forward": window.tokens_per_forward,
                "positions_per_row": window.positions,
                "tokens_per_s": capacity.tokens_per_s(rung),
                "gain": capacity.gain(rung),
                "break_even": capacity.break_even_batch(rung) or None,
                "ladder": ladder,
            }
        )
    return rows


def frontier_notes(measured: MeasuredFrontier, file: Path) -> list[str]:
    """Return the notes of the table."""
    frontier, num_rows = measured.frontier, measured.max_num_seqs
    steps = frontier.step_seconds.times().at_cached(num_rows * measured.cached_tokens)
    few, many = steps.positions[0], steps.positions[-1]
    base = name_of_rung(measured.capacity.base())
    few_s, many_s = (f"{1e3 * steps.at(positions):.3g} ms" for positions in (few, many))
    return [
        _quality_note(frontier),
        f"Speeds are of {num_rows} rows that read {measured.cached_tokens:.0f} stored tokens each, "
        f"with the number of masks that is fastest for them. A step of {few:g} positions takes "
        f"{few_s}, of {many:g} {many_s}. Prompts are read at "
        f"{frontier.prefill_tokens_per_s:,.0f} tokens/s. {frontier.hardware}.",
        f"Base, the fastest that loses nothing with {num_rows} rows: {base}; gains are over it. "
        "break-even: most rows at which a setting is faster than those that lose nothing. ladder: "
        f"settings at least {InnerSettings().min_gain:g} times as fast as the base, on the concave "
        "hull of speed over the loss's upper end.",
        f"Written to {file}",
    ]


def _quality_note(frontier: Frontier) -> str:
    """Return what quality and loss are, and how small a loss the items can show."""
    kind = (
        "Accuracy is over the conversations with an answer"
        if frontier.measure == "accuracy"
        else "No row has an answer: quality is the likelihood of an output token under the AR "
        "model, as a percentage of that of mode ar's own outputs"
    )
    lossy = [point.loss for point in frontier.points if point.mode is Mode.THRESHOLD and point.loss]
    width = max((loss.high - loss.value for loss in lossy), default=0.0)
    return (
        f"{kind}, {frontier.num_items} of them; brackets are 95% intervals. Points lost are paired "
        "by conversation with mode ar. The autoscaler counts the upper end of a τ's interval, "
        f"which is up to {width:.1f} points above the estimate; more conversations bring it "
        "closer. differ: outputs that are not, token for token, those of mode ar. τ is compared "
        "with raw probability."
    )


def frontier_figures(measured: MeasuredFrontier, file: Path) -> dict[str, Any]:
    """Return the content of ``frontier.json`` without its checksum, and what follows from it."""
    useful, capacity = useful_rungs(measured), measured.capacity
    return {
        **measured.frontier.model_dump(mode="json", exclude_none=True),
        "file": file,
        "num_slots": measured.max_num_seqs,
        "stored_tokens_per_row": measured.cached_tokens,
        "base": name_of_rung(capacity.base()),
        "rungs": [
            {
                "mode": rung.mode,
                "threshold": rung.threshold,
                "loss": rung.loss,
                "tokens_per_forward": capacity.window(rung).tokens_per_forward,
                "tokens_per_s": capacity.tokens_per_s(rung),
                "gain": capacity.gain(rung),
                "break_even_batch": capacity.break_even_batch(rung) or None,
                "useful": rung in useful,
            }
            for _, rung in rungs_of(measured)
        ],
    }
