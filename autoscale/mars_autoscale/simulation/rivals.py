"""Other autoscalers, to compare with: Ray Serve's own, Knative's, and static thresholds with them.

Ray's arithmetic is Ray's own code. Knative's follows its documentation, "About autoscaling" and
"Configuring the autoscaler (KPA)": stable and panic window, panic threshold, rates of change.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray.serve.autoscaling_policy import _apply_delay_logic, _apply_scaling_factors
from ray.serve.config import AutoscalingConfig

from mars_autoscale.model.capacity import Capacity, Rung
from mars_autoscale.policy.decide import OuterSettings, OuterState, decide
from mars_autoscale.policy.inner_loop import Stage
from mars_autoscale.policy.observe import Look, Snapshot
from mars_autoscale.simulation.policies import FixedRung, Local, Target


class _Mean:
    """Of what was observed within a window."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._values: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, value: float) -> float:
        """Observe, and the mean."""
        self._values.append((now_s, value))
        while self._values[0][0] <= now_s - self._window_s:
            self._values.popleft()
        return sum(value for _, value in self._values) / len(self._values)


def _concurrency(snapshot: Snapshot) -> float:
    return sum(load.num_running + load.num_waiting for load in snapshot.replicas)


@dataclass
class RayDefault:
    """``autoscaling_config`` of a deployment."""

    target_ongoing_requests: float
    local_of: Callable[[], Local]
    period_s: float = 1.0
    config: AutoscalingConfig = field(init=False)
    _num_replicas: int | None = None
    _state: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = AutoscalingConfig(
            max_replicas=1_000, target_ongoing_requests=self.target_ongoing_requests
        )
        self._mean = _Mean(self.config.look_back_period_s)

    def decide(self, snapshot: Snapshot, /) -> Target:
        """As Ray Serve's controller does."""
        current = self._num_replicas or len(snapshot.replicas) + snapshot.num_starting
        mean = self._mean.add(snapshot.now_s, _concurrency(snapshot))
        desired = _apply_scaling_factors(mean / self.target_ongoing_requests, current, self.config)
        number, self._state = _apply_delay_logic(
            max(desired, 1), current, self.config, self._state, snapshot.now_s
        )
        self._num_replicas = number
        return Target(number)

    def local(self) -> Local:
        """As given."""
        return self.local_of()


@dataclass
class Knative:
    """Knative's pod autoscaler on concurrency."""

    target: float
    """Concurrent requests of a replica, utilisation included."""
    local_of: Callable[[], Local]
    period_s: float = 2.0
    max_replicas: int = 16
    stable_window_s: float = 60.0
    panic_window_s: float = 6.0
    panic_threshold: float = 2.0
    max_scale_down_rate: float = 2.0
    _panic_until_s: float | None = None
    _panic_replicas: int = 0

    def __post_init__(self) -> None:
        self._stable = _Mean(self.stable_window_s)
        self._panic = _Mean(self.panic_window_s)

    def decide(self, snapshot: Snapshot, /) -> Target:
        """As its autoscaler does at each tick."""
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

    def local(self) -> Local:
        """As given."""
        return self.local_of()


@dataclass
class ProportionalIntegral:
    """τ by a PI controller on a replica's load alone, without a model of speed."""

    rungs: tuple[Rung, ...]
    max_num_seqs: int
    setpoint: float = 0.9
    proportional: float = 2.0
    integral_per_s: float = 0.2
    period_s: float = 0.5
    _integral: float = 0.0

    def update(self, look: Look, /) -> Stage:
        """A rung by how far the load is above the set point; it knows no gains."""
        error = look.load / self.max_num_seqs - self.setpoint
        most = len(self.rungs) - 1
        grown = self._integral + self.integral_per_s * error * self.period_s * most
        self._integral = min(max(grown, 0.0), float(most))
        wanted = round(self.proportional * error * most + self._integral)
        rung = self.rungs[min(max(wanted, 0), most)]
        return Stage(rung, rung)


@dataclass
class ModelReplicas:
    """The joint policy's replicas alone: by token rate, at τ = 1."""

    capacity: Capacity
    outer: OuterSettings
    state: OuterState = field(default_factory=OuterState)

    @property
    def period_s(self) -> float:
        """Of its decisions."""
        return self.outer.period_s

    def decide(self, snapshot: Snapshot, /) -> Target:
        """Take the decision and leave its range of τ out."""
        decision, self.state = decide(snapshot, self.state, self.capacity, self.outer)
        return Target(decision.num_replicas)

    def local(self) -> Local:
        """τ = 1."""
        return FixedRung(self.capacity.rungs[0])
