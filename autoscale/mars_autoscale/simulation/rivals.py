"""Other autoscalers to compare with: Ray Serve's, Knative's, and a PI controller on τ.

Ray's arithmetic is Ray's own code. Knative's follows its documentation, "About autoscaling" and
"Configuring the autoscaler (KPA)": stable and panic window, panic threshold, rates of change.
Requests wait as they do in each, see `mars_autoscale.simulation.dispatch`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ray.serve.config import AutoscalingConfig

from mars_autoscale.model.capacity import Rung
from mars_autoscale.policy.inner_loop import InnerLoop, InnerLoopDecision, Look
from mars_autoscale.policy.observe import Snapshot
from mars_autoscale.simulation.dispatch import Activator, Dispatch, TwoChoices
from mars_autoscale.simulation.policies import InnerLoopPolicy, Joint, Target
from mars_platform.cluster.ray_private import autoscaled
from mars_platform.method.live import LiveDecoding


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
        return TwoChoices(seed)


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
class ProportionalIntegral:
    """An inner loop that sets τ by a PI controller on the load, without a model of speed."""

    rungs: tuple[Rung, ...]
    """Rungs with falling τ."""
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
        return InnerLoopDecision(LiveDecoding(rung.threshold))


class ModelReplicas(Joint):
    """The joint policy without a lower τ: replicas by token rate, which lose nothing."""

    def decide(self, snapshot: Snapshot, /) -> Target:
        """Take the joint policy's decision, and leave out its range of τ."""
        return Target(super().decide(snapshot).num_replicas)

    def inner_loop(self) -> InnerLoopPolicy:
        """Make an inner loop that only chooses between the modes that lose nothing."""
        return InnerLoop(replace(self.capacity, rungs=self._lossless), self.inner)

    @property
    def _lossless(self) -> tuple[Rung, ...]:
        return tuple(rung for rung in self.capacity.rungs if rung.threshold == 1.0)
