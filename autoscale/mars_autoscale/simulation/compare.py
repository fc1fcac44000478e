"""Compares policies on a trace: the figures of each, as means over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mars_autoscale.simulation.bound import Bound, clairvoyant
from mars_autoscale.simulation.config import Family, SimulationConfig, families, mean_or_infinite
from mars_autoscale.simulation.policies import Policy
from mars_autoscale.simulation.run import Result, Sample, Simulation
from mars_autoscale.synthetic import changed
from mars_autoscale.traces import TraceRequest

_HOURS_SLACK = 1.01
"""Times the joint policy's replica-hours that a rival's best variant may take."""


@dataclass(frozen=True)
class Figures:
    """What a policy made of a trace."""

    slo_attainment: float
    """Share of requests whose first token came in time; rejected ones did not."""
    ttft_p50_s: float
    ttft_p99_s: float
    quality_loss_mean: float
    """Points, mean over output tokens."""
    quality_loss_p99: float
    """Points of the request at that quantile."""
    replica_hours: float
    threshold_changes: float
    """Of all replicas."""
    replica_changes: float
    rejected: float


@dataclass(frozen=True)
class Compared:
    """A policy with the best of its variants."""

    name: str
    variant: str
    """Which one it is; empty where there is one only."""
    figures: Figures
    samples: list[Sample]
    """Of the first seed."""


@dataclass(frozen=True)
class Comparison:
    """All policies, and what was possible."""

    policies: list[Compared]
    """The joint one first."""
    bounds: list[Bound]
    """Of each seed: the least loss for as many replica-hours as the joint policy took."""


def figures_of(result: Result, config: SimulationConfig) -> Figures:
    """Measure a run."""
    counted = [
        served for served in result.served if served.request.arrival_s >= config.measured_from_s
    ]
    ttft = np.array([served.ttft_s for served in counted])
    tokens = sum(served.request.output_tokens for served in counted)
    losses = np.array([served.loss_tokens / served.request.output_tokens for served in counted])
    return Figures(
        slo_attainment=float((ttft <= config.objective_ttft_s).mean()),
        ttft_p50_s=float(np.quantile(ttft, 0.5)),
        ttft_p99_s=float(np.quantile(ttft, 0.99, method="higher")),
        quality_loss_mean=sum(served.loss_tokens for served in counted) / tokens,
        quality_loss_p99=float(np.quantile(losses, 0.99)),
        replica_hours=result.replica_seconds / 3600,
        threshold_changes=result.num_threshold_changes,
        replica_changes=result.num_replica_changes,
        rejected=sum(served.is_rejected for served in counted),
    )


def compare(
    config: SimulationConfig,
    trace: Sequence[TraceRequest],
    on_progress: Callable[[int, int, str], None],
) -> Comparison:
    """Run every policy on every seed's version of a trace.

    Args:
        config: the setting.
        trace: as it was read.
        on_progress: called with the runs that are done, their number and the policy's name.
    """
    versions = [changed(trace, config.trace, seed) for seed in config.seeds]
    groups = families(config)
    num_runs = sum(len(variants) for _, variants in groups) * len(versions)
    done, compared = 0, list[Compared]()
    for family in groups:
        found = list[Compared]()
        for item in _variants(config, family, versions):
            done += len(versions)
            on_progress(done, num_runs, family[0])
            found.append(item)
        hours = compared[0].figures.replica_hours if compared else float("inf")
        compared.append(_best(found, hours))
    hours = compared[0].figures.replica_hours
    return Comparison(compared, [_bound(config, version, hours) for version in versions])


def _bound(config: SimulationConfig, trace: Sequence[TraceRequest], hours: float) -> Bound:
    return clairvoyant(
        trace,
        config.capacity(),
        config.cluster(trace),
        objective_s=config.objective_ttft_s,
        max_replica_hours=hours,
    )


def _variants(
    config: SimulationConfig, family: Family, versions: Sequence[Sequence[TraceRequest]]
) -> Iterator[Compared]:
    name, variants = family
    for variant, make in variants:
        results = [_run(config, version, make()) for version in versions]
        each = [figures_of(result, config) for result in results]
        fields = Figures.__dataclass_fields__
        means = {key: mean_or_infinite([getattr(one, key) for one in each]) for key in fields}
        yield Compared(name, variant, Figures(**means), results[0].samples)


def _run(config: SimulationConfig, trace: Sequence[TraceRequest], policy: Policy) -> Result:
    return Simulation(trace, config.capacity(), config.cluster(trace), policy).run()


def _best(found: Sequence[Compared], hours: float) -> Compared:
    """The highest attainment for no more replica-hours; else the fewest of these."""
    fair = [each for each in found if each.figures.replica_hours <= hours * _HOURS_SLACK]
    if fair:
        return max(fair, key=lambda each: each.figures.slo_attainment)
    return min(found, key=lambda each: each.figures.replica_hours)
