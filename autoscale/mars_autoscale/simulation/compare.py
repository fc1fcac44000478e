"""Compares policies on a trace: the figures of each, as means over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mars_autoscale.simulation.bound import Bound, clairvoyant
from mars_autoscale.simulation.config import Family, SimulationConfig, families
from mars_autoscale.simulation.figures import PolicyFigures, figures_of, mean_figures
from mars_autoscale.simulation.policies import Policy, StaticReplicas
from mars_autoscale.simulation.run import ClusterSample, Simulation, SimulationResult
from mars_autoscale.traces.files import TraceRequest
from mars_autoscale.traces.synthetic import changed
from mars_platform.errors import UserError

_HOURS_SLACK = 1.01
"""Replica-hours that a rival's best variant may take, as a multiple of the joint policy's."""


@dataclass(frozen=True)
class ComparedPolicy:
    """A policy with the best of its variants."""

    name: str
    variant: str
    """Name of the best variant; empty if there is only one."""
    figures: PolicyFigures
    samples: list[ClusterSample]
    """Course of the run with the first seed."""


@dataclass(frozen=True)
class PolicyComparison:
    """All policies, and the best that was possible."""

    policies: list[ComparedPolicy]
    """Every policy, the joint one first."""
    bounds: list[Bound]
    """Least loss for as many replica-hours as the joint policy took, for each seed."""


def compare(
    config: SimulationConfig,
    trace: Sequence[TraceRequest],
    on_progress: Callable[[int, int, str], None],
) -> PolicyComparison:
    """Run every policy on every seed's version of a trace.

    Args:
        config: replicas, policies and changes of the trace.
        trace: the trace as it was read.
        on_progress: called with the runs done, the total of runs and the policy's name.

    Raises:
        UserError: the changes of the trace leave no request, far too many, or none late enough to
            count.
    """
    versions = [changed(trace, config.trace, seed) for seed in config.seeds]
    _check_counted(versions, config.measured_from_s)
    groups = families(config)
    num_runs = sum(len(variants) for _, variants in groups) * len(versions)
    num_done, compared = 0, list[ComparedPolicy]()
    for family in groups:
        variants = list[ComparedPolicy]()
        for variant in _run_variants(config, family, versions):
            num_done += len(versions)
            on_progress(num_done, num_runs, family[0])
            variants.append(variant)
        max_hours = compared[0].figures.replica_hours if compared else float("inf")
        compared.append(_best(variants, max_hours))
    hours = compared[0].figures.replica_hours
    return PolicyComparison(compared, [_bound(config, version, hours) for version in versions])


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


def _run_variants(
    config: SimulationConfig, family: Family, versions: Sequence[Sequence[TraceRequest]]
) -> Iterator[ComparedPolicy]:
    name, variants = family
    for variant, make_policy in variants:
        results = [
            _run(config, version, make_policy(), seed)
            for seed, version in zip(config.seeds, versions, strict=True)
        ]
        figures = [
            figures_of(
                result,
                measured_from_s=config.measured_from_s,
                objective_ttft_s=config.objective_ttft_s,
            )
            for result in results
        ]
        yield ComparedPolicy(name, variant, mean_figures(figures), results[0].samples)


def _run(
    config: SimulationConfig, trace: Sequence[TraceRequest], policy: Policy, seed: int
) -> SimulationResult:
    replicas = config.replicas
    if isinstance(policy, StaticReplicas):  # all of its replicas are there from the start
        replicas = replicas.model_copy(update={"initial": policy.num_replicas})
    return Simulation(
        trace,
        config.capacity,
        replicas,
        policy,
        objective_ttft_s=config.objective_ttft_s,
        seed=seed,
    ).run()


def _best(variants: Sequence[ComparedPolicy], max_hours: float) -> ComparedPolicy:
    """Return the variant of highest attainment within the replica-hours, else the cheapest."""
    fair = [each for each in variants if each.figures.replica_hours <= max_hours * _HOURS_SLACK]
    if fair:
        return max(fair, key=lambda each: each.figures.slo_attainment)
    return min(variants, key=lambda each: each.figures.replica_hours)
