"""Computes the figures of a simulated run and their means over runs, and lists their columns."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mars_autoscale.simulation.cluster import Served
from mars_autoscale.simulation.run import SimulationResult
from mars_platform.cli.report import Column
from mars_platform.tier import Tier


@dataclass(frozen=True)
class TierFigures:
    """Figures of a policy for the requests of one tier, or of all tiers together."""

    slo_attainment: float
    """Share of the requests whose first token came in time; rejected requests count as late."""
    ttft_p50_s: float
    """Median seconds to the first token; infinite if half of the requests were rejected."""
    ttft_p99_s: float
    """99th percentile of the seconds to the first token, infinite likewise."""
    quality_loss_mean: float
    """Points of quality lost, mean over output tokens."""
    quality_loss_p99: float
    """Points of quality lost by a request, 99th percentile over the served requests."""
    rejected: float


@dataclass(frozen=True)
class PolicyFigures(TierFigures):
    """All figures of a policy for a trace."""

    replica_hours: float
    """Hours of all replicas, from their request to their end."""
    threshold_changes: float
    """Number of changes of τ over all replicas; tiers that change at once count as one change."""
    replica_changes: float
    prefix_hit_rate: float
    """Share of the served prompts' tokens that the replicas had cached."""
    by_class: dict[Tier, TierFigures]


def policy_columns(objective_ttft_s: float, *, has_prefixes: bool) -> list[Column]:
    """Return the columns of a table with one row for each policy.

    If the trace ``has_prefixes``, one tells how much of the prompts was cached.
    """
    first, *quality, rejected = tier_columns(objective_ttft_s)
    return [
        first,
        *quality,
        Column("replica-hours", "replica_hours", ".2f"),
        Column("τ changes", "threshold_changes", ".0f"),
        Column("replica changes", "replica_changes", ".0f"),
        *([Column("cached", "prefix_hit_rate", ".1%")] if has_prefixes else []),
        rejected,
    ]


def tier_columns(objective_ttft_s: float) -> list[Column]:
    """Return the columns of `TierFigures`, after the name of the policy."""
    return [
        Column("policy", "policy"),
        Column(f"first token in {objective_ttft_s:g} s", "slo_attainment", ".1%"),
        Column("p50, s", "ttft_p50_s", ".2f"),
        Column("p99, s", "ttft_p99_s", ".1f"),
        Column("loss, points", "quality_loss_mean", ".2f"),
        Column("p99", "quality_loss_p99", ".1f"),
        Column("rejected", "rejected", ".0f"),
    ]


def figures_of(
    result: SimulationResult, *, measured_from_s: float, objective_ttft_s: float
) -> PolicyFigures:
    """Compute the figures of a run; first tokens should come within ``objective_ttft_s``.

    Requests that arrived before ``measured_from_s`` do not count; at least one came later.
    """
    counted = [each for each in result.served if each.request.arrival_s >= measured_from_s]
    by_tier = {tier: [each for each in counted if each.request.tier is tier] for tier in Tier}
    return PolicyFigures(
        **vars(_figures(counted, objective_ttft_s)),
        replica_hours=result.replica_seconds / 3600,
        threshold_changes=result.num_threshold_changes,
        replica_changes=result.num_replica_changes,
        prefix_hit_rate=_prefix_hit_rate(counted),
        by_class={
            tier: _figures(group, objective_ttft_s) for tier, group in by_tier.items() if group
        },
    )


def _prefix_hit_rate(requests: Sequence[Served]) -> float:
    tokens = sum(served.request.prompt_tokens for served in requests if not served.is_rejected)
    return sum(served.cached_tokens for served in requests) / max(tokens, 1)


def _figures(requests: Sequence[Served], objective_ttft_s: float) -> TierFigures:
    ttft = np.array([served.ttft_s for served in requests])
    kept = [served for served in requests if not served.is_rejected]
    tokens = sum(served.request.output_tokens for served in kept)
    losses = [served.loss_tokens / served.request.output_tokens for served in kept]
    return TierFigures(
        slo_attainment=float((ttft <= objective_ttft_s).mean()),
        ttft_p50_s=float(np.quantile(ttft, 0.5, method="higher")),
        ttft_p99_s=float(np.quantile(ttft, 0.99, method="higher")),
        quality_loss_mean=sum(served.loss_tokens for served in kept) / max(tokens, 1),
        quality_loss_p99=float(np.quantile(losses or [0.0], 0.99)),
        rejected=len(requests) - len(kept),
    )


def mean_figures(runs: Sequence[PolicyFigures]) -> PolicyFigures:
    """Return the mean of each figure over the runs, and of a tier over the runs that have it."""
    tiers = [tier for tier in Tier if any(tier in each.by_class for each in runs)]
    by_tier = {
        tier: [each.by_class[tier] for each in runs if tier in each.by_class] for tier in tiers
    }
    return PolicyFigures(
        **_means(runs, set(PolicyFigures.__dataclass_fields__) - {"by_class"}),
        by_class={
            tier: TierFigures(**_means(figures, TierFigures.__dataclass_fields__))
            for tier, figures in by_tier.items()
        },
    )


def _means(runs: Sequence[TierFigures], names: Iterable[str]) -> dict[str, float]:
    return {name: mean_or_infinite([getattr(each, name) for each in runs]) for name in names}


def mean_or_infinite(values: Sequence[float]) -> float:
    """Return the mean of the values, infinite if one of them is."""
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.inf
