"""``marsray simulate``: the table, its JSON, and the pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Group, RenderableType
from rich.table import Table

from mars_autoscale.simulation.compare import Compared, Comparison
from mars_autoscale.simulation.figures import titles
from mars_platform.cli.output_files import check_output_file, check_plot_file
from mars_platform.errors import UserError

_TIMELINES = ("joint", "ray", "knative")
"""Policies that are drawn over time: more lines cannot be told apart."""


def check_files(json_file: Path | None, plot: Path | None) -> None:
    """Refuse files that `write_files` could not write, before anything is simulated.

    Raises:
        UserError: a directory is missing, or the picture's suffix names no format.
    """
    if json_file is not None:
        check_output_file(json_file, "--json")
    if plot is not None:
        check_plot_file(plot)


def write_files(comparison: Comparison, json_file: Path | None, plot: Path | None) -> None:
    """Write the figures and draw the picture, where a file is given.

    Raises:
        UserError: one cannot be written.
    """
    try:
        if json_file is not None:
            text = json.dumps(json_of(comparison), indent=1) + "\n"
            json_file.write_text(text, encoding="utf-8")
        if plot is not None:
            picture_of(comparison).savefig(plot)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written ({error.strerror})") from error


def table_of(comparison: Comparison, objective_s: float) -> RenderableType:
    """One row a policy, and one for what was possible; where the trace has several classes, a
    second table with a row for each of each policy.
    """
    table = _policies(comparison, objective_s)
    if len(comparison.policies[0].figures.by_class) < 2:
        return table
    return Group(table, _classes(comparison, objective_s))


def _policies(comparison: Comparison, objective_s: float) -> Table:
    table = Table(*titles(objective_s))
    for each in comparison.policies:
        figures = each.figures
        table.add_row(
            _name_of(each),
            f"{figures.slo_attainment:.1%}",
            f"{figures.ttft_p50_s:.2f}",
            f"{figures.ttft_p99_s:.1f}",
            f"{figures.quality_loss_mean:.2f}",
            f"{figures.quality_loss_p99:.1f}",
            f"{figures.replica_hours:.2f}",
            f"{figures.threshold_changes:.0f}",
            f"{figures.replica_changes:.0f}",
            f"{figures.rejected:.0f}",
        )
    served, loss, hours = _bound_of(comparison)
    table.add_section()
    table.add_row("clairvoyant", f"{served:.1%}", "", "", f"{loss:.2f}", "", f"{hours:.2f}")
    return table


def _classes(comparison: Comparison, objective_s: float) -> Table:
    table = Table(
        "policy",
        "class",
        f"first token in {objective_s:g} s",
        "p50, s",
        "p99, s",
        "loss, points",
        "p99",
        "rejected",
    )
    for each in comparison.policies:
        for i, (name, figures) in enumerate(each.figures.by_class.items()):
            table.add_row(
                "" if i else _name_of(each),
                name,
                f"{figures.slo_attainment:.1%}",
                f"{figures.ttft_p50_s:.2f}",
                f"{figures.ttft_p99_s:.1f}",
                f"{figures.quality_loss_mean:.2f}",
                f"{figures.quality_loss_p99:.1f}",
                f"{figures.rejected:.0f}",
            )
    return table


def _name_of(compared: Compared) -> str:
    return f"{compared.name} ({compared.variant})" if compared.variant else compared.name


def _bound_of(comparison: Comparison) -> tuple[float, float, float]:
    """Means of what is served, of the loss and of the replica-hours."""
    bounds = comparison.bounds
    return (
        fmean(bound.served for bound in bounds),
        fmean(bound.quality_loss_mean for bound in bounds),
        fmean(bound.replica_hours for bound in bounds),
    )


def json_of(comparison: Comparison) -> dict[str, Any]:
    """What ``--json`` writes; times that are infinite, since too many were refused, as null."""
    served, loss, hours = _bound_of(comparison)
    return {
        "policies": [
            {"name": each.name, "variant": each.variant, **_finite(asdict(each.figures))}
            for each in comparison.policies
        ],
        "clairvoyant": {
            "slo_attainment": served,
            "quality_loss_mean": loss,
            "replica_hours": hours,
        },
    }


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {
        key: _finite(value) if isinstance(value, dict) else value if math.isfinite(value) else None
        for key, value in figures.items()
    }


def picture_of(comparison: Comparison) -> Figure:
    """Load, replicas, τ and queue over time of the first seed, and last, loss against replica-hours
    of all policies.
    """
    compared, bound = comparison.policies, comparison.bounds[0]
    figure = Figure(figsize=(11, 11), layout="constrained")
    load, replicas, threshold, queue, trade = figure.subplots(5, 1, height_ratios=[1, 1, 1, 1, 2])
    _draw_load(load, compared[0])
    for each in [one for one in compared if one.name in _TIMELINES]:
        times = [sample.time_s for sample in each.samples]
        replicas.step(times, [sample.num_ready for sample in each.samples], label=each.name)
        threshold.step(times, [sample.threshold for sample in each.samples])
        queue.plot(times, [sample.num_waiting for sample in each.samples])
    times = [bound.span_s * index for index in range(len(bound.num_replicas))]
    replicas.step(times, bound.num_replicas, label="clairvoyant", color="gray", linestyle=":")
    replicas.set_ylabel("replicas ready")
    replicas.legend(loc="upper right", fontsize="small")
    threshold.set_ylabel("τ, mean")
    queue.set_ylabel("waiting")
    queue.set_yscale("symlog")
    queue.set_xlabel("time, s")
    _draw_trade(trade, compared)
    _, loss, hours = _bound_of(comparison)
    trade.scatter(hours, loss, color="gray", marker="x")
    return figure


def _draw_load(axes: Axes, joint: Compared) -> None:
    times = [sample.time_s for sample in joint.samples]
    axes.plot(times, [sample.requests_per_s for sample in joint.samples], color="black")
    axes.set_ylabel("requests/s")


def _draw_trade(axes: Axes, compared: Sequence[Compared]) -> None:
    for each in compared:
        figures = each.figures
        axes.scatter(figures.replica_hours, figures.quality_loss_mean)
        text = f"{each.name}\n{figures.slo_attainment:.1%}"
        place = (figures.replica_hours, figures.quality_loss_mean)
        axes.annotate(text, place, xytext=(4, 4), textcoords="offset points", fontsize="small")
    axes.set_xlabel("replica-hours")
    axes.set_ylabel("loss, points")
