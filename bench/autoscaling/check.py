"""Compares the simulator with the server on the same trace, frontier, limits and constants.

The simulation gets the real lengths and sending times of the server's requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench.autoscaling.figures import Window, draw_replicas, draw_threshold, quantile, save, stacked
from bench.autoscaling.live import (
    OBJECTIVE_TTFT_S,
    WARM_UP_REQUESTS,
    Bench,
    Contender,
    Request,
    Run,
)

from mars_autoscale.model.frontier import Frontier
from mars_autoscale.policy.inner_loop import InnerLoop, InnerLoopDecision, Look
from mars_autoscale.policy.lengths import counts_of
from mars_autoscale.simulation.policies import Joint
from mars_autoscale.simulation.replicas import ReplicaSettings
from mars_autoscale.simulation.run import Simulation, SimulationResult
from mars_autoscale.traces.files import TraceRequest

_BEGIN_S = -10.0
"""Time at which a simulation begins: the server was idle while the load test started."""


@dataclass(frozen=True)
class Side:
    """Figures of a trace that was replayed by the server or by the simulator."""

    tokens_per_s: float
    """Output tokens of all requests, per second until the last one ended."""
    burst_ended_per_s: float
    """Requests per second that ended during the burst."""
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    attainment: float
    threshold: float
    """Mean of the live τ over time and replicas."""
    replica_s: float
    """Replica-seconds during the trace, counted from each replica's order to its end."""


@dataclass(frozen=True)
class Simulated:
    """A simulation, and its number of requests at each update of the inner loops."""

    result: SimulationResult
    in_flight: dict[float, float]
    """Number of requests by time, twice a second."""


class _RecordingLoop(InnerLoop):
    """An inner loop that records its replica's number of requests."""

    in_flight: dict[float, float]

    def update(self, look: Look, /) -> InnerLoopDecision:
        self.in_flight[look.now_s] = self.in_flight.get(look.now_s, 0.0) + look.load
        return super().update(look)


@dataclass
class _RecordingJoint(Joint):
    """The joint policy; its inner loops all record into ``in_flight``."""

    def __post_init__(self) -> None:
        self.in_flight = dict[float, float]()

    def inner_loop(self) -> InnerLoop:
        controller = _RecordingLoop(self.capacity, self.inner)
        controller.in_flight = self.in_flight
        return controller


def simulate(run: Run, bench: Bench, contender: Contender, frontier: Frontier) -> Simulated:
    """Simulate the requests that a server got.

    Args:
        run: The server's run.
        bench: The server's limits.
        contender: The joint policy.
        frontier: Frontier of the served model.
    """
    settings = bench.settings(contender)
    autoscaling, tiers = settings.autoscaling, settings.tiers
    assert autoscaling is not None, "the model is autoscaled"
    outer = autoscaling.model_copy(
        update={
            "floor_threshold": max(autoscaling.floor_threshold, tiers.default_min_threshold),
            "flex_floor_threshold": max(autoscaling.flex_floor_threshold, tiers.flex_min_threshold),
        }
    )
    replicas = ReplicaSettings(
        min=outer.min_replicas,
        max=outer.max_replicas,
        initial=outer.min_replicas,
        cold_start_s=outer.cold_start_s,
    )
    capacity = frontier.capacity(bench.cluster.max_num_seqs)
    policy = _RecordingJoint(capacity, outer, outer.inner)
    trace = _as_sent(run.requests)
    usual = round(fmean(each.output_tokens for each in trace))
    result = Simulation(
        trace,
        capacity,
        replicas,
        policy,
        objective_ttft_s=outer.objective_ttft_s,
        lengths=counts_of([usual] * WARM_UP_REQUESTS, num_begun=WARM_UP_REQUESTS),
        begin_s=_BEGIN_S,
    ).run()
    return Simulated(result, policy.in_flight)


def _as_sent(requests: Sequence[Request]) -> list[TraceRequest]:
    """Return the trace as it was sent; requests that were not served get the mean length."""
    mean = round(fmean(each.completion_tokens for each in requests if each.completion_tokens))
    return [
        TraceRequest(each.sent_s, each.prompt_tokens, each.completion_tokens or mean, each.tier)
        for each in requests
    ]


def live_side(run: Run, burst: Window, replica_s: float) -> Side:
    """Return the figures of a server's run.

    Args:
        run: The run.
        burst: The burst of its trace.
        replica_s: Replica-seconds; see `figures.Figures`.
    """
    requests, samples = run.requests, run.load["samples"]
    ttft = [each.ttft_s for each in requests]
    ended = sum(burst.holds(each.sent_s + each.e2e_s) for each in requests)
    live = [each["live_threshold"] for each in samples if each["live_threshold"] is not None]
    tokens_per_s = run.load["all"]["tokens_per_s"]
    return _side(tokens_per_s, ended, burst, ttft, fmean(live), replica_s)


def simulated_side(simulated: Simulated, burst: Window) -> Side:
    """Return the figures of a simulation; its τ is the mean over its decisions."""
    result, in_flight = simulated.result, simulated.in_flight
    served = [each for each in result.served if not each.is_rejected]
    tokens = sum(each.request.output_tokens for each in served)
    end_s = max(time_s for time_s, load in in_flight.items() if load)
    begun, ended = (_num_ended(simulated, time_s) for time_s in (burst.begin_s, burst.end_s))
    ttft = [each.ttft_s for each in result.served]
    thresholds = fmean(each.threshold for each in result.samples)
    return _side(tokens / end_s, ended - begun, burst, ttft, thresholds, result.replica_seconds)


def _num_ended(simulated: Simulated, time_s: float) -> float:
    """Return the number of requests that ended until the last update before a time."""
    look_s = max(each for each in simulated.in_flight if each <= time_s)
    arrived = sum(
        each.request.arrival_s <= look_s and not each.is_rejected
        for each in simulated.result.served
    )
    return arrived - simulated.in_flight[look_s]


def _side(
    tokens_per_s: float,
    num_ended: float,
    burst: Window,
    ttft: Sequence[float],
    threshold: float,
    replica_s: float,
) -> Side:
    return Side(
        tokens_per_s=tokens_per_s,
        burst_ended_per_s=num_ended / (burst.end_s - burst.begin_s),
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p95_s=quantile(ttft, 0.95),
        ttft_p99_s=quantile(ttft, 0.99),
        attainment=fmean(seconds <= OBJECTIVE_TTFT_S for seconds in ttft),
        threshold=threshold,
        replica_s=replica_s,
    )


def draw_check(run: Run, simulated: Simulated, file: Path) -> None:
    """Draw load, τ and replicas of the server and of the simulator over time."""
    told, seen = run.load["samples"], simulated.result.samples
    figure, (load, threshold, replicas) = stacked(3)
    times, looks = [each["time_s"] for each in told], [each.time_s for each in seen]
    load.step(times, [each["requests_per_s"] for each in told], where="post", color="black")
    load.set_ylabel("requests/s")
    draw_threshold(threshold, looks, [each.threshold for each in seen], "C1", "simulator, ")
    draw_threshold(threshold, times, [each["live_threshold"] for each in told], "C0", "server, ")
    asked = [each.num_ready + each.num_starting for each in seen]
    replicas.step(looks, asked, where="post", color="C1", linestyle=":")
    ready = [each.num_ready for each in seen]
    replicas.step(looks, ready, where="post", color="C1", label="simulator")
    draw_replicas(replicas, run, "C0", "server, ")
    save(figure, file)
