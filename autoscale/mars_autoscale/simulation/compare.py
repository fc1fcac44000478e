"""Compares policies on a trace: the figures of each, as means over seeds."""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice

from mars_autoscale.simulation.config import SimulationConfig, families
from mars_autoscale.simulation.figures import PolicyFigures, figures_of, mean_figures
from mars_autoscale.simulation.policies import Policy, StaticReplicas
from mars_autoscale.simulation.run import ClusterSample, Simulation, SimulationResult
from mars_autoscale.traces.files import TraceRequest
from mars_autoscale.traces.synthetic import changed
from mars_platform.errors import UserError

_HOURS_SLACK = 1.01
"""Replica-hours that a rival's best variant may take, as a multiple of the joint policy's."""
_FEW_REQUESTS = 100_000
"""Requests, summed over the runs, up to which starting processes would take longer than to run."""
_MAX_PROCESSES = 8
"""Most processes at once; each takes a few hundred MB and some seconds to start."""


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
    """All policies, and what to tell of them."""

    policies: list[ComparedPolicy]
    """Every policy, the joint one first."""
    has_prefixes: bool
    """Whether the trace tells which prompts begin alike."""


_Task = tuple[SimulationConfig, Sequence[TraceRequest], Callable[[], Policy], int]
"""The comparison, a version of the trace, a function that makes the policy, and the seed."""
_Outcome = tuple[PolicyFigures, list[ClusterSample]]
"""A run's figures and course."""
_RunAll = Callable[[Iterable[_Task]], Iterable[_Outcome]]
"""Runs tasks, and gives their outcomes in the same order."""


def compare(
    config: SimulationConfig,
    trace: Sequence[TraceRequest],
    on_progress: Callable[[int, int, str], None],
) -> PolicyComparison:
    """Run every policy on every seed's version of a trace, if they are long in several processes.

    ``on_progress`` gets the runs done, the total of runs and the policy's name.

    Raises:
        UserError: the changes of the trace leave no request, far too many, or none late enough to
            count.
    """
    versions = [changed(trace, config.trace, seed) for seed in config.seeds]
    _check_counted(versions, config.measured_from_s)
    groups = families(config)
    tasks: list[_Task] = [
        (config, version, make_policy, seed)
        for _, variants in groups
        for _, make_policy in variants
        for seed, version in zip(config.seeds, versions, strict=True)
    ]
    compared, num_done = list[ComparedPolicy](), 0
    is_long = sum(len(version) for _, version, _, _ in tasks) > _FEW_REQUESTS
    with processes(is_long) as run_all:
        outcomes = iter(run_all(tasks))
        for name, variants in groups:
            ran = list[ComparedPolicy]()
            for variant, _ in variants:
                figures, samples = zip(*islice(outcomes, len(versions)), strict=True)
                ran.append(ComparedPolicy(name, variant, mean_figures(figures), samples[0]))
                num_done += len(versions)
                on_progress(num_done, len(tasks), name)
            joint = compared[0] if compared else ran[0]
            compared.append(_best(ran, joint.figures.replica_hours))
    return PolicyComparison(compared, any(request.prefix for request in trace))


@contextmanager
def processes(is_long: bool) -> Iterator[_RunAll]:
    """Give a function that runs tasks and yields their outcomes in order."""
    num = min(os.cpu_count() or 1, _MAX_PROCESSES)
    if not is_long or num == 1:
        yield partial(map, _outcome)
        return
    # a fork of a process with threads, such as the one that draws the progress, may hang
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num, mp_context=context) as executor:
        yield partial(executor.map, _outcome)


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
        queue_wait_s=config.queue_wait_s,
        clients=config.clients,
    ).run()


def _outcome(task: _Task) -> _Outcome:
    config, trace, make_policy, seed = task
    result = _run(config, trace, make_policy(), seed)
    figures = figures_of(
        result,
        measured_from_s=config.measured_from_s,
        objective_ttft_s=config.objective_ttft_s,
    )
    return figures, result.samples


def _check_counted(versions: Sequence[Sequence[TraceRequest]], measured_from_s: float) -> None:
    last_s = min(version[-1].arrival_s for version in versions)
    if last_s < measured_from_s:
        raise UserError(
            f"measured_from_s: {measured_from_s:g} is later than the trace's last request, which "
            f"comes at {last_s:g} s; lower it, or take more of the trace"
        )


def _best(variants: Sequence[ComparedPolicy], max_hours: float) -> ComparedPolicy:
    """Return the variant of highest attainment within the replica-hours, else the cheapest."""
    fair = [each for each in variants if each.figures.replica_hours <= max_hours * _HOURS_SLACK]
    if fair:
        return max(fair, key=lambda each: each.figures.slo_attainment)
    return min(variants, key=lambda each: each.figures.replica_hours)
