"""``marsray simulate``: the table, its JSON, and the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from mars_autoscale.simulation.compare import Compared

_TIMELINES = ("joint", "ray", "knative")
"""Policies that are drawn over time: more lines cannot be told apart."""


def table_of(compared: Sequence[Compared], objective_s: float) -> Table:
    """One row a policy."""
    table = Table(
        "policy",
        f"first token in {objective_s:g} s",
        "p50, s",
        "p99, s",
        "loss, points",
        "p99",
        "replica-hours",
        "τ changes",
        "replica changes",
        "rejected",
    )
    for each in compared:
        figures = each.figures
        table.add_row(
            f"{each.name} ({each.variant})" if each.variant else each.name,
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
    return table


def json_of(compared: Sequence[Compared]) -> dict[str, Any]:
    """What ``--json`` writes."""
    return {
        "policies": [
            {"name": each.name, "variant": each.variant, **asdict(each.figures)}
            for each in compared
        ]
    }


def draw(compared: Sequence[Compared], path: Path) -> None:
    """Load, replicas, τ and queue over time, and loss against replica-hours of all policies.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(11, 11), layout="constrained")
    load, replicas, threshold, queue, trade = figure.subplots(5, 1, height_ratios=[1, 1, 1, 1, 2])
    _draw_load(load, compared[0])
    for each in [one for one in compared if one.name in _TIMELINES]:
        times = [sample.time_s for sample in each.samples]
        replicas.step(times, [sample.num_ready for sample in each.samples], label=each.name)
        threshold.step(times, [sample.threshold for sample in each.samples])
        queue.plot(times, [sample.num_waiting for sample in each.samples])
    replicas.set_ylabel("replicas ready")
    replicas.legend(loc="upper right", fontsize="small")
    threshold.set_ylabel("τ, mean")
    queue.set_ylabel("waiting")
    queue.set_yscale("symlog")
    queue.set_xlabel("time, s")
    _draw_trade(trade, compared)
    figure.savefig(path)


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
