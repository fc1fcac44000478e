"""Other autoscalers: Ray Serve's, Knative's, KEDA's, and two controllers of τ without replicas.

Ray's arithmetic is Ray's own code. Knative's follows its documentation, "About autoscaling" and
"Configuring the autoscaler (KPA)": stable and panic window, panic threshold, rates of change.
KEDA's is that of Kubernetes' HorizontalPodAutoscaler, as the documentation of both has it.
Requests wait as they do in each, see `mars_autoscale.simulation.dispatch`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ray.serve.config import AutoscalingConfig

from mars_autoscale.model.capacity import Capacity, Rung
from mars_autoscale.policy.decision import ThresholdRange
from mars_autoscale.policy.inner_loop import InnerLoop, InnerLoopDecision, Look
from mars_autoscale.policy.observe import Snapshot
from mars_autoscale.policy.settings import InnerSettings
from mars_autoscale.simulation.dispatch import Activator, Dispatch, ServerQueue, TwoChoices
from mars_autoscale.simulation.policies import InnerLoopPolicy, Joint, StaticReplicas, Target
from mars_platform.cluster.ray_private import autoscaled
from mars_platform.method.live import LiveDecoding
from mars_platform.method.mode import Mode


class _WindowMean:
    """Mean of the values that were observed within a window."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._values: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, value: float) -> float:
        """Add a value, and return the mean."""
        self._values.append((now_s, value))
        while self._values[0][0] <= now_s - self._window_s:
            self._values.popleft()
        return sum(value for _, value in self._values) / len(self._values)


def _concurrency(snapshot: Snapshot) -> float:
    return sum(replica.num_running + replica.num_waiting for replica in snapshot.replicas)


@dataclass
class RayDefault:
    """Ray Serve's default autoscaling on concurrency."""

    target_ongoing_requests: float
    inner_loop: Callable[[], InnerLoopPolicy]
    """Makes the inner loop of a new replica."""
    routing: Callable[[int], Dispatch] = TwoChoices
    """Makes the routing by its seed."""
    period_s: float = 1.0
    config: AutoscalingConfig = field(init=False)
    _num_replicas: int | None = None
    _state: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = AutoscalingConfig(
            max_replicas=1_000, target_ongoing_requests=self.target_ongoing_requests
        )
        self._mean = _WindowMean(self.config.look_back_period_s)

    def decide(self, snapshot: Snapshot, /) -> Target:
        """Choose the number of replicas as Ray Serve's controller does."""
        current = self._num_replicas or len(snapshot.replicas) + snapshot.num_starting
        mean = self._mean.add(snapshot.now_s, _concurrency(snapshot))
        number, self._state = autoscaled(
            mean / self.target_ongoing_requests,
            current,
            self.config,
            self._state,
            snapshot.now_s,
        )
        self._num_replicas = number
        return Target(number)

    def dispatch(self, seed: int, /) -> Dispatch:
        """Make Ray Serve's routing."""
        return self.routing(seed)


@dataclass
class Knative:
    """Knative's pod autoscaler on concurrency."""

    target: float
    """Concurrent requests per replica, with Knative's target utilisation already applied."""
    inner_loop: Callable[[], InnerLoopPolicy]
    """Makes the inner loop of a new replica."""
    queue: Callable[[], Dispatch] = Activator
    """Makes the queue before the replicas."""
    period_s: float = 2.0
    max_replicas: int = 16
    stable_window_s: float = 60.0
    panic_window_s: float = 6.0
    panic_threshold: float = 2.0
    max_scale_down_rate: float = 2.0
    _panic_until_s: float | None = None
    _panic_replicas: int = 0

    def __post_init__(self) -> None:
        self._stable = _WindowMean(self.stable_window_s)
        self._panic = _WindowMean(self.panic_window_s)

    def decide(self, snapshot: Snapshot, /) -> Target:
        """Choose the number of replicas as Knative's autoscaler does at each tick."""
        now, ready = snapshot.now_s, max(len(snapshot.replicas), 1)
        concurrency = _concurrency(snapshot)
        least = math.floor(ready / self.max_scale_down_rate)
        stable = max(math.ceil(self._stable.add(now, concurrency) / self.target), least)
        panic = max(math.ceil(self._panic.add(now, concurrency) / self.target), least)
        if panic >= self.panic_threshold * ready:
            self._panic_until_s = now + self.stable_window_s
        elif self._panic_until_s is not None and now >= self._panic_until_s:
            self._panic_until_s, self._panic_replicas = None, 0
        if self._panic_until_s is None:
            return Target(stable)
        self._panic_replicas = max(self._panic_replicas, min(panic, self.max_replicas), stable)
        return Target(self._panic_replicas)

    def dispatch(self, _: int, /) -> Dispatch:
        """Make the queue before the replicas."""
        return self.queue()


@dataclass
class Keda:
    """KEDA with two triggers: requests that wait, and the rate of output tokens.

    KEDA gives the metrics of its triggers to a HorizontalPodAutoscaler, which asks every 15 s ("The
    ScaledObject specification": ``pollingInterval`` only counts for scaling from and to zero unless
    ``useCachedMetrics`` is set). That computes ceil(metric / target) for each metric of type
    ``AverageValue``, but keeps the number while the metric is within a tolerance of 10%, and takes
    the highest. It at most doubles the pods or adds 4, whichever is more, in 15 s, and goes down to
    the highest number of the last 300 s ("Horizontal Pod Autoscaling": algorithm details and
    default behavior). KEDA has no queue of its own; here requests wait in the server's.
    """

    waiting_target: float
    """Waiting requests per replica."""
    tokens_per_s_target: float
    """Output tokens per second and replica."""
    make_inner_loop: Callable[[], InnerLoopPolicy]
    """Makes the inner loop of a new replica."""
    max_replicas: int = 16
    rate_window_s: float = 60.0
    """Seconds over which the rate is averaged: a common range of Prometheus' ``rate``."""
    period_s: float = 15.0
    tolerance: float = 0.1
    stabilization_s: float = 300.0
    _num_replicas: int | None = None

    def __post_init__(self) -> None:
        self._rate = _WindowMean(self.rate_window_s)
        self._wanted = deque[tuple[float, int]]()
        """(time in s, replicas) of the recommendations within the stabilization window."""

    def decide(self, snapshot: Snapshot, /) -> Target:
        """Choose the number of replicas as the HorizontalPodAutoscaler does at each sync."""
        now, current = snapshot.now_s, self._num_replicas
        if current is None:
            current = len(snapshot.replicas) + snapshot.num_starting
            self._wanted.append((now, current))  # so does the autoscaler, not to go down at once
        num_waiting = sum(replica.num_waiting for replica in snapshot.replicas)
        assert snapshot.arrivals is not None, "simulations know the arrivals"
        tokens_per_s = self._rate.add(now, snapshot.arrivals.output_tokens_per_s)
        wanted = max(
            self._wanted_for(num_waiting, self.waiting_target, current),
            self._wanted_for(tokens_per_s, self.tokens_per_s_target, current),
        )
        wanted = min(wanted, self.max_replicas)
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - self.stabilization_s:
            self._wanted.popleft()
        stabilized = max(number for _, number in self._wanted) if wanted < current else wanted
        most = max(2 * current, current + 4)
        # a recommendation of the past never raises the number
        number = min(stabilized, most if wanted >= current else current)
        self._num_replicas = max(number, 1)
        return Target(self._num_replicas)

    def _wanted_for(self, metric: float, target: float, current: int) -> int:
        if abs(metric / (target * current) - 1) <= self.tolerance:
            return current
        return math.ceil(metric / target)

    def inner_loop(self) -> InnerLoopPolicy:
        """Make the inner loop of a new replica."""
        return self.make_inner_loop()

    def dispatch(self, _: int, /) -> Dispatch:
        """Make the server's queue."""
        return ServerQueue()


@dataclass(frozen=True)
class FollowFloor:
    """An inner loop that decodes with the lowest τ that it may."""

    is_exact: bool
    """Whether rows at τ = 1 run in mode exact."""

    def update(self, look: Look, /) -> InnerLoopDecision:
        """Take the floor of tier default for all tiers that τ moves."""
        threshold = look.allowed.floor_threshold or 1.0  # there is no floor before a decision
        return InnerLoopDecision(LiveDecoding(threshold, is_exact=self.is_exact))


class DeadlineThreshold(StaticReplicas):
    """One τ for a fixed number of replicas, by the deadline of what waits, without tiers.

    It follows what the abstract of DiLaServe (arXiv 2606.29094) tells, and no more is known here:
    thresholds are lowered under load so that deadlines are met, and chosen anew periodically. Each
    time it takes the highest τ at which, by the model of speed, the last request that waits now,
    and the last one that will wait at the next time, get their first token within the objective.
    """

    def __init__(
        self,
        num_replicas: int,
        capacity: Capacity,
        floor_threshold: float,
        objective_ttft_s: float,
        period_s: float,
    ) -> None:
        """Start at the base.

        Args:
            num_replicas: fixed number of replicas.
            capacity: speed of each.
            floor_threshold: lowest τ that may be chosen.
            objective_ttft_s: seconds in which the first token should come.
            period_s: seconds between two choices.
        """
        base = capacity.base()
        is_exact = base.mode is Mode.EXACT
        super().__init__(num_replicas, partial(FollowFloor, is_exact), period_s=period_s)
        self._capacity = capacity
        self._objective_s = objective_ttft_s
        ladder = capacity.ladder(min_gain=1.0)
        self._rungs = [rung for rung in ladder if rung.threshold >= floor_threshold]

    def decide(self, snapshot: Snapshot, /) -> Target:
        """Choose the highest τ that meets the deadlines, or the lowest that there is."""
        in_time = [rung for rung in self._rungs if self._is_in_time(rung, snapshot)]
        threshold = (in_time or self._rungs[-1:])[0].threshold
        return Target(self.num_replicas, ThresholdRange(threshold, threshold))

    def _is_in_time(self, rung: Rung, snapshot: Snapshot) -> bool:
        arrivals, num = snapshot.arrivals, max(len(snapshot.replicas), 1)
        if arrivals is None or not arrivals.requests_per_s:
            return True
        mean_prompt = arrivals.prompt_tokens_per_s / arrivals.requests_per_s
        each_s = self._capacity.busy_s(
            arrivals.mean_output_tokens, mean_prompt, self._capacity.gain(rung)
        )
        num_waiting = sum(replica.num_waiting for replica in snapshot.replicas)
        now_s = each_s * num_waiting / num
        utilization = each_s * arrivals.requests_per_s / num
        next_s = now_s + self.period_s * (utilization - 1)
        prompt_s = mean_prompt / self._capacity.prefill_tokens_per_s
        return max(now_s, next_s) + prompt_s <= self._objective_s


@dataclass
class ProportionalIntegral:
    """An inner loop that sets τ by a PI controller on the load, without a model of speed."""

    rungs: tuple[Rung, ...]
    """Rungs with falling τ and rising speed."""
    max_num_seqs: int
    setpoint: float = 0.9
    """(running + waiting) / max_num_seqs to keep."""
    proportional: float = 2.0
    integral_per_s: float = 0.2
    period_s: float = 0.5
    _integral: float = 0.0

    def update(self, look: Look, /) -> InnerLoopDecision:
        """Choose a rung by how far the load is above the set point. It reports a gain of 1."""
        error = look.load / self.max_num_seqs - self.setpoint
        most = len(self.rungs) - 1
        grown = self._integral + self.integral_per_s * error * self.period_s * most
        self._integral = min(max(grown, 0.0), float(most))
        wanted = round(self.proportional * error * most + self._integral)
        rung = self.rungs[min(max(wanted, 0), most)]
        is_exact = self.rungs[0].mode is Mode.EXACT
        return InnerLoopDecision(LiveDecoding(rung.threshold, is_exact=is_exact))


class ModelReplicas(Joint):
    """The joint policy without a lower τ: replicas by token rate, which lose nothing."""

    def decide(self, snapshot: Snapshot, /) -> Target:
        """Take the joint policy's decision, and leave out its range of τ."""
        return Target(super().decide(snapshot).num_replicas)

    def inner_loop(self) -> InnerLoopPolicy:
        """Make an inner loop that only chooses between the modes that lose nothing."""
        return lossless_loop(self.capacity, self.inner)


def lossless_loop(capacity: Capacity, settings: InnerSettings) -> InnerLoop:
    """Return an inner loop that takes the fastest mode that loses nothing, by its load."""
    lossless = tuple(rung for rung in capacity.rungs if rung.threshold == 1.0)
    return InnerLoop(replace(capacity, rungs=lossless, target_threshold=1.0), settings)
