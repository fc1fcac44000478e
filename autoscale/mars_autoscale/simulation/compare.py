"""Compares policies on a trace: the figures of each, as means over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mars_autoscale.simulation.bound import Bound, clairvoyant
from mars_autoscale.simulation.config import Family, SimulationConfig, families
from mars_autoscale.simulation.figures import Figures, figures_of, mean_figures
from mars_autoscale.simulation.policies import Policy, StaticReplicas
from mars_autoscale.simulation.run import Result, Sample, Simulation
from mars_autoscale.traces.files import TraceRequest
from mars_autoscale.traces.synthetic import changed
from mars_platform.errors import UserError

_HOURS_SLACK = 1.01
"""Times the joint policy's replica-hours that a rival's best variant may take."""


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

    Raises:
        UserError: what is done to the trace leaves no request, far too many, or none late enough to
            count.
    """
    versions = [changed(trace, config.trace, seed) for seed in config.seeds]
    _check_counted(versions, config.measured_from_s)
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


def _check_counted(versions: Sequence[Sequence[TraceRequest]], measured_from_s: float) -> None:
    last_s = min(version[-1].arrival_s for version in versions)
    if last_s < measured_from_s:
        raise UserError(
            f"measured_from_s: {measured_from_s:g} is later than the trace's last request, which "
            f"comes at {last_s:g} s; lower it, or take more of the trace"
        )


def _bound(config: SimulationConfig, trace: Sequence[TraceRequest], hours: float) -> Bound:
    return clairvoyant(
        trace,
        config.capacity,
        config.replicas,
        objective_s=config.objective_ttft_s,
        max_replica_hours=hours,
    )


def _variants(
    config: SimulationConfig, family: Family, versions: Sequence[Sequence[TraceRequest]]
) -> Iterator[Compared]:
    name, variants = family
    for variant, make in variants:
        results = [_run(config, version, make()) for version in versions]
        figures = [
            figures_of(
                result,
                measured_from_s=config.measured_from_s,
                objective_ttft_s=config.objective_ttft_s,
            )
            for result in results
        ]
        yield Compared(name, variant, mean_figures(figures), results[0].samples)


def _run(config: SimulationConfig, trace: Sequence[TraceRequest], policy: Policy) -> Result:
    replicas = config.replicas
    if isinstance(policy, StaticReplicas):  # all of them have always been there
        replicas = replicas.model_copy(update={"initial": policy.num_replicas})
    return Simulation(
        trace, config.capacity, replicas, policy, objective_ttft_s=config.objective_ttft_s
    ).run()


def _best(found: Sequence[Compared], hours: float) -> Compared:
    """The highest attainment for no more replica-hours; else the fewest of these."""
    fair = [each for each in found if each.figures.replica_hours <= hours * _HOURS_SLACK]
    if fair:
        return max(fair, key=lambda each: each.figures.slo_attainment)
    return min(found, key=lambda each: each.figures.replica_hours)
