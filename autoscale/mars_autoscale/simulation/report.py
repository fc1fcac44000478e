"""Shows what ``marsray simulate`` compared: tables, JSON and a picture."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from rich.console import Group, RenderableType

from mars_autoscale.simulation.compare import ComparedPolicy, PolicyComparison
from mars_autoscale.simulation.figures import policy_columns, tier_columns
from mars_platform.cli.report import Column, table_of

_TIMELINES = ("joint", "ray", "keda")
"""Policies that are drawn over time: more lines cannot be told apart."""
_SHOWN_THRESHOLD = 0.9
"""τ down to which the diagram of τ reaches at least, so that a τ of 1 is at its top."""
_BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "fontsize": "small"}
"""Options of a legend that stands to the right of a diagram."""


def comparison_table(comparison: PolicyComparison, objective_ttft_s: float) -> RenderableType:
    """Return a table with a row for each policy.

    If the trace has several tiers, a second table has a row for each tier of each policy.
    """
    rows = [{"policy": _name_of(each), **vars(each.figures)} for each in comparison.policies]
    columns = policy_columns(objective_ttft_s, has_prefixes=comparison.has_prefixes)
    table = table_of(columns, rows)
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


def figures_json(comparison: PolicyComparison) -> dict[str, Any]:
    """Return the content of the JSON file; a time that never came becomes null."""
    policies = [
        {"name": each.name, "variant": each.variant, **vars(each.figures)}
        for each in comparison.policies
    ]
    return {"policies": policies}


def picture_of(comparison: PolicyComparison) -> Figure:
    """Draw load, replicas, τ and queue of the first seed over time, and the policies' trade-off.

    The last diagram shows the quality loss of every policy against its replica-hours.
    """
    figure = Figure(figsize=(13, 12), layout="constrained")
    *timelines, trade = figure.subplots(5, 1, height_ratios=[1, 1.3, 1.3, 1, 2])
    _draw_timelines(comparison, timelines)
    _draw_trade(comparison, trade)
    return figure


def _draw_timelines(comparison: PolicyComparison, axes: Sequence[Axes]) -> None:
    compared = comparison.policies
    load, replicas, threshold, queue = axes
    samples = compared[0].samples
    times = [sample.time_s for sample in samples]
    load.plot(times, [sample.requests_per_s for sample in samples], color="black")
    load.set_ylabel("requests/s")
    drawn = [one for one in compared if one.name in _TIMELINES]
    for i, each in enumerate(drawn):
        # the joint policy, which is first, is drawn on top
        line: dict[str, Any] = {"color": f"C{i}", "zorder": 3 - i / len(drawn), "linewidth": 1.2}
        times = [sample.time_s for sample in each.samples]
        ready = [sample.num_ready for sample in each.samples]
        replicas.step(times, ready, where="post", label=_name_of(each), **line)
        thresholds = [sample.threshold for sample in each.samples]
        threshold.step(times, thresholds, where="post", **line)
        queue.plot(times, [sample.num_waiting for sample in each.samples], **line)
    replicas.set_ylabel("replicas ready")
    replicas.legend(**_BESIDE)
    threshold.set_ylabel("τ, mean of replicas")
    threshold.set_ylim(min(*threshold.get_ylim(), _SHOWN_THRESHOLD), 1.01)
    queue.set_ylabel("waiting")
    queue.set_yscale("symlog")
    queue.set_xlabel("time, s")
    for axis in axes:
        axis.sharex(load)
        axis.margins(x=0.01)


def _draw_trade(comparison: PolicyComparison, axes: Axes) -> None:
    for each in comparison.policies:
        figures = each.figures
        label = f"{each.name}: {figures.slo_attainment:.1%} in time"
        axes.scatter(figures.replica_hours, figures.quality_loss_mean, label=label)
    axes.set_xscale("log")  # as many static replicas as allowed take several times the hours
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("replica-hours")
    axes.set_ylabel("loss, points")
    axes.legend(**_BESIDE)
