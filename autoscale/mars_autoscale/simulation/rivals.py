"""Other autoscalers: Ray Serve's and KEDA's.

Ray's arithmetic is Ray's own code. KEDA's is that of Kubernetes' HorizontalPodAutoscaler, as the
documentation of both has it. Requests wait as they do in each, see
`mars_autoscale.simulation.dispatch`.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray.serve.config import AutoscalingConfig

from mars_autoscale.policy.observe import Snapshot
from mars_autoscale.simulation.dispatch import Dispatch, ServerQueue, TwoChoices
from mars_autoscale.simulation.policies import InnerLoopPolicy, Target
from mars_platform.cluster.ray_private import autoscaled


class _WindowMean:
    """Mean of the values that were observed within a window."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._values: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, value: float) -> float:
        self._values.append((now_s, value))
        while self._values[0][0] <= now_s - self._window_s:
            self._values.popleft()
        return sum(value for _, value in self._values) / len(self._values)


@dataclass
class RayDefault:
    """Ray Serve's default autoscaling on concurrency."""

    target_ongoing_requests: float
    inner_loop: Callable[[], InnerLoopPolicy]
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
        ongoing = sum(replica.num_running + replica.num_waiting for replica in snapshot.replicas)
        mean = self._mean.add(snapshot.now_s, ongoing)
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
    inner_loop: Callable[[], InnerLoopPolicy]
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

    def dispatch(self, _: int, /) -> Dispatch:
        """Make the server's queue."""
        return ServerQueue()
