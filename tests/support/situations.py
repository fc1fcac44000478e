"""Situations in which a cluster is not what its model says, and the ladders they are tried with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import ladders
from mars_autoscale.model.capacity import AR, Capacity
from mars_autoscale.model.step_times import StepTime
from mars_autoscale.policy.settings import InnerSettings, OuterSettings
from mars_autoscale.simulation.policies import Joint
from mars_autoscale.simulation.replicas import ReplicaSettings, SpeedChange
from mars_autoscale.simulation.run import Simulation, SimulationResult
from mars_autoscale.traces.files import TraceRequest
from mars_autoscale.traces.synthetic import ClosedLoop, Lengths, Spike, SyntheticTrace, generate

LENGTH_S = 400.0
CHANGE_S = 100.0
"""Time at which load or lengths change in the situations in which they do."""
OBJECTIVE_S = 1.0
TOKENS = 100
"""Tokens of a prompt and of an output."""
_UTILIZATION = OuterSettings().utilization

PAPER = ladders.CAPACITY
"""16 rows, where a lower τ is faster."""
EXACT_ALONE = Capacity(
    StepTime((8, 24, 48), (0.0197, 0.0285, 0.0335)),
    (
        AR,
        ladders.exact_rung(2.34, 6),
        ladders.threshold_rung(0.95, 1.8, 3.0),
        ladders.threshold_rung(0.9, 2.0, 6.0),
    ),
    max_num_seqs=8,
    prefill_tokens_per_s=20_000,
)
"""Eight rows on two cores, where no τ is as fast as mode exact; all times are eight times those
that were measured, so that a simulation has fewer steps."""
PLAIN = replace(PAPER, rungs=(AR,))
"""A replica without a frontier, whose plain steps are known from its start."""


@dataclass(frozen=True)
class Situation:
    """A load, and in which way replicas differ from their model."""

    demand: float = 1.2
    """Replicas that the load keeps busy by the model, at the base."""
    speed: tuple[SpeedChange, ...] = ()
    real_rows_share: float = 1.0
    """Share of the slots for which there are pages."""
    num_clients: int | None = None
    rate_times: float = 1.0
    """Factor of the rate from `CHANGE_S` on."""
    length_times: int = 1
    """Factor of the outputs' length from `CHANGE_S` on."""
    loss_budget: float = OuterSettings().loss_budget
    """Points that may be lost; 0 keeps τ at 1."""

    @property
    def is_quick(self) -> bool:
        """Whether it is cheap to simulate, or replicas are not what the model says."""
        return bool(self.speed) or self.real_rows_share < 1 or self == Situation()

    def rows(self, capacity: Capacity) -> int:
        """Return the rows that a replica really runs."""
        return round(self.real_rows_share * capacity.max_num_seqs)

    def needed(self, capacity: Capacity, speed: float) -> int:
        """Return the replicas of a mean real speed that carry the load at the end."""
        full = capacity.tokens_per_s(capacity.base())
        speed *= capacity.tokens_per_s(capacity.base(), self.rows(capacity)) / full
        if self.num_clients is None:
            demand = self.demand * self.rate_times * self.length_times
            return math.ceil(demand / speed / _UTILIZATION)
        for num in range(1, self.num_clients):
            rows = min(self.num_clients / num, self.rows(capacity))
            busy = num * capacity.tokens_per_s(capacity.base(), rows) / full
            if busy <= num * _UTILIZATION:
                return num
        return self.num_clients

    def replicas(self, capacity: Capacity) -> ReplicaSettings:
        """Return the replicas as they really are."""
        return ReplicaSettings(
            min=1, max=16, initial=1, cold_start_s=30, real_rows=self.rows(capacity),
            real_speed=self.speed,
        )  # fmt: skip

    def trace(self, capacity: Capacity) -> list[TraceRequest]:
        """Return a load that follows a Poisson process."""
        size = Lengths(mean=TOKENS, max=TOKENS)
        settings = SyntheticTrace(
            duration_s=LENGTH_S,
            mean_rate_per_s=self.demand / capacity.busy_s(TOKENS, TOKENS),
            spikes=(Spike(at_s=CHANGE_S, for_s=LENGTH_S, times=self.rate_times),),
            prompt=size,
            output=size,
        )
        return [
            replace(each, output_tokens=TOKENS * self.length_times)
            if each.arrival_s >= CHANGE_S
            else each
            for each in generate(settings, seed=0)
        ]

    def run(self, capacity: Capacity) -> SimulationResult:
        """Simulate it under the joint policy, which knows the model alone."""
        outer = OuterSettings(cold_start_s=30, max_replicas=16, loss_budget=self.loss_budget)
        return Simulation(
            self.trace(capacity),
            capacity,
            self.replicas(capacity),
            Joint(capacity, outer, InnerSettings()),
            objective_ttft_s=OBJECTIVE_S,
            queue_wait_s=30,
            clients=None if self.num_clients is None else ClosedLoop(num=self.num_clients),
        ).run()


def _slower(times: float, one_in: int = 1) -> tuple[SpeedChange, ...]:
    return (SpeedChange(times=1 / times, one_in=one_in),)


SITUATIONS = {
    "right model": Situation(),
    "all 5x slower": Situation(speed=_slower(5)),
    "one in three 5x slower": Situation(demand=3.0, speed=_slower(5, one_in=3)),
    "answers 5x longer": Situation(demand=0.8, length_times=5),
    "rate x10": Situation(demand=0.6, rate_times=10),
    "40 clients": Situation(num_clients=40),
    "40 clients, 5x slower": Situation(num_clients=40, speed=_slower(5)),
    "pages for half the rows": Situation(demand=3.0, real_rows_share=0.5),
}
"""Situations that are tried with `PAPER` and `EXACT_ALONE`."""
WITHOUT_FRONTIER = {
    "rate x3": Situation(demand=1.2, rate_times=3),
    "3x slower": Situation(speed=_slower(3)),
}
"""Situations that are tried with `PLAIN`."""
NO_BUDGET = Situation(speed=_slower(5), loss_budget=0.0)
"""A situation that is tried with `PAPER`, whose τ may not be lowered."""


def cases() -> dict[str, tuple[Situation, Capacity]]:
    """Return every situation with its ladder, by name."""
    both = {"paper": PAPER, "exact alone": EXACT_ALONE}
    return {
        **{
            f"{name}, {ladder}": (each, capacity)
            for name, each in SITUATIONS.items()
            for ladder, capacity in both.items()
        },
        **{f"{name}, no frontier": (each, PLAIN) for name, each in WITHOUT_FRONTIER.items()},
        "no budget, 5x slower, paper": (NO_BUDGET, PAPER),
    }


def in_time_at_end(result: SimulationResult, last_s: float = 100.0) -> float:
    """Return the share in time of the requests of the last seconds."""
    last = [each for each in result.served if each.request.arrival_s >= LENGTH_S - last_s]
    return sum(each.ttft_s <= OBJECTIVE_S for each in last) / max(len(last), 1)


def ordered(result: SimulationResult) -> Sequence[int]:
    """Return the replicas that were ordered, over time, since the load has changed."""
    late = [each for each in result.samples if each.time_s >= CHANGE_S]
    return [each.num_ready + each.num_starting for each in late]
