"""The figures of a simulated run, and their means over runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mars_autoscale.simulation.cluster import Served
from mars_autoscale.simulation.run import Result
from mars_platform.tier import Tier


@dataclass(frozen=True)
class ClassFigures:
    """What a policy made of some of a trace's requests."""

    slo_attainment: float
    """Share whose first token came in time; of those that were refused none did."""
    ttft_p50_s: float
    """Infinite where so many were refused."""
    ttft_p99_s: float
    quality_loss_mean: float
    """Points, mean over output tokens."""
    quality_loss_p99: float
    """Points of the request at that quantile."""
    rejected: float
    """Requests that were refused."""


@dataclass(frozen=True)
class Figures(ClassFigures):
    """What a policy made of a trace."""

    replica_hours: float
    threshold_changes: float
    """Of all replicas; a class default and flex that change at once are one."""
    replica_changes: float
    by_class: dict[Tier, ClassFigures]
    """Of the classes that the trace has."""


def titles(objective_ttft_s: float) -> tuple[str, ...]:
    """Columns of a table with a row for each policy.

    Args:
        objective_ttft_s: see `figures_of`.
    """
    return (
        "policy",
        f"first token in {objective_ttft_s:g} s",
        "p50, s",
        "p99, s",
        "loss, points",
        "p99",
        "replica-hours",
        "τ changes",
        "replica changes",
        "rejected",
    )


def figures_of(result: Result, *, measured_from_s: float, objective_ttft_s: float) -> Figures:
    """Measure a run.

    Args:
        result: of the run; some request must have arrived late enough to count.
        measured_from_s: requests that arrived earlier do not count.
        objective_ttft_s: seconds to the first token that are in time.
    """
    counted = [each for each in result.served if each.request.arrival_s >= measured_from_s]
    groups = dict[Tier, list[Served]]()
    for name in Tier:
        if group := [each for each in counted if each.request.tier is name]:
            groups[name] = group
    return Figures(
        **vars(_figures(counted, objective_ttft_s)),
        replica_hours=result.replica_seconds / 3600,
        threshold_changes=result.num_threshold_changes,
        replica_changes=result.num_replica_changes,
        by_class={name: _figures(group, objective_ttft_s) for name, group in groups.items()},
    )


def _figures(requests: Sequence[Served], objective_ttft_s: float) -> ClassFigures:
    ttft = np.array([served.ttft_s for served in requests])
    kept = [served for served in requests if not served.is_rejected]
    tokens = sum(served.request.output_tokens for served in kept)
    losses = [served.loss_tokens / served.request.output_tokens for served in kept]
    return ClassFigures(
        slo_attainment=float((ttft <= objective_ttft_s).mean()),
        ttft_p50_s=float(np.quantile(ttft, 0.5, method="higher")),
        ttft_p99_s=float(np.quantile(ttft, 0.99, method="higher")),
        quality_loss_mean=sum(served.loss_tokens for served in kept) / max(tokens, 1),
        quality_loss_p99=float(np.quantile(losses or [0.0], 0.99)),
        rejected=len(requests) - len(kept),
    )


def mean_figures(runs: Sequence[Figures]) -> Figures:
    """Mean of each figure over runs; a class's over those that have it."""
    names = [name for name in Tier if any(name in each.by_class for each in runs)]
    own = [key for key in Figures.__dataclass_fields__ if key != "by_class"]
    return Figures(
        **{key: mean_or_infinite([getattr(each, key) for each in runs]) for key in own},
        by_class={
            name: _mean_of_class([each.by_class[name] for each in runs if name in each.by_class])
            for name in names
        },
    )


def _mean_of_class(runs: Sequence[ClassFigures]) -> ClassFigures:
    keys = ClassFigures.__dataclass_fields__
    return ClassFigures(
        **{key: mean_or_infinite([getattr(each, key) for each in runs]) for key in keys}
    )


def mean_or_infinite(values: Sequence[float]) -> float:
    """Mean; infinite where any is."""
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.inf
