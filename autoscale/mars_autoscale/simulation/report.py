"""Shows what ``marsray simulate`` compared: tables, JSON and a picture."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from rich.console import Group, RenderableType

from mars_autoscale.simulation.compare import ComparedPolicy, PolicyComparison
from mars_autoscale.simulation.figures import policy_columns, tier_columns
from mars_platform.cli.report import Column, table_of, write_json, write_picture

_TIMELINES = ("joint", "ray", "knative")
"""Policies that are drawn over time: more lines cannot be told apart."""


def comparison_table(comparison: PolicyComparison, objective_ttft_s: float) -> RenderableType:
    """Return a table with a row for each policy, and a last row for the clairvoyant bound.

    If the trace has several tiers, a second table has a row for each tier of each policy.
    """
    rows = [{"policy": _name_of(each), **vars(each.figures)} for each in comparison.policies]
    bound = {"policy": "clairvoyant", **_bound_of(comparison)}
    columns = policy_columns(objective_ttft_s, has_prefixes=comparison.has_prefixes)
    table = table_of(columns, rows, [bound])
    if len(comparison.policies[0].figures.by_class) < 2:
        return table
    policy, *others = tier_columns(objective_ttft_s)
    by_tier = [policy, Column("class", "class"), *others]
    tiers = [
        {"policy": "" if i else _name_of(each), "class": tier, **vars(figures)}
        for each in comparison.policies
        for i, (tier, figures) in enumerate(each.figures.by_class.items())
    ]
    return Group(table, table_of(by_tier, tiers))


def _name_of(compared: ComparedPolicy) -> str:
    return f"{compared.name} ({compared.variant})" if compared.variant else compared.name


def _bound_of(comparison: PolicyComparison) -> dict[str, float]:
    """Means over the seeds of what a clairvoyant scaler would reach."""
    bounds = comparison.bounds
    return {
        "slo_attainment": fmean(bound.served for bound in bounds),
        "quality_loss_mean": fmean(bound.quality_loss_mean for bound in bounds),
        "replica_hours": fmean(bound.replica_hours for bound in bounds),
    }


def write_files(comparison: PolicyComparison, json_file: Path | None, plot: Path | None) -> None:
    """Write the figures and draw the picture, each if its file is given.

    A time that is infinite because too many requests were rejected is null in the JSON.

    Raises:
        UserError: a file cannot be written.
    """
    if json_file is not None:
        policies = [
            {"name": each.name, "variant": each.variant, **vars(each.figures)}
            for each in comparison.policies
        ]
        write_json(json_file, {"policies": policies, "clairvoyant": _bound_of(comparison)})
    if plot is not None:
        write_picture(plot, picture_of(comparison))


def picture_of(comparison: PolicyComparison) -> Figure:
    """Draw load, replicas, τ and queue of the first seed over time, and the policies' trade-off.

    The last diagram shows the quality loss of every policy against its replica-hours.
    """
    compared, bound = comparison.policies, comparison.bounds[0]
    figure = Figure(figsize=(11, 11), layout="constrained")
    load, replicas, threshold, queue, trade = figure.subplots(5, 1, height_ratios=[1, 1, 1, 1, 2])
    samples = compared[0].samples
    times = [sample.time_s for sample in samples]
    load.plot(times, [sample.requests_per_s for sample in samples], color="black")
    load.set_ylabel("requests/s")
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
    for each in compared:
        figures = each.figures
        place = (figures.replica_hours, figures.quality_loss_mean)
        trade.scatter(*place)
        text = f"{each.name}\n{figures.slo_attainment:.1%}"
        trade.annotate(text, place, xytext=(4, 4), textcoords="offset points", fontsize="small")
    trade.set_xlabel("replica-hours")
    trade.set_ylabel("loss, points")
    means = _bound_of(comparison)
    trade.scatter(means["replica_hours"], means["quality_loss_mean"], color="gray", marker="x")
    return figure
