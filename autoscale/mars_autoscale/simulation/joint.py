"""The joint policy in the simulator: the decisions and the inner loop of the real server."""

from __future__ import annotations

from dataclasses import dataclass, field

from mars_autoscale.model.capacity import Capacity
from mars_autoscale.policy.decide import decide
from mars_autoscale.policy.decision import OuterState
from mars_autoscale.policy.inner_loop import InnerLoop
from mars_autoscale.policy.observe import Snapshot
from mars_autoscale.policy.settings import InnerSettings, OuterSettings
from mars_autoscale.simulation.dispatch import Dispatch, ServerQueue
from mars_autoscale.simulation.policies import InnerLoopPolicy, Target


@dataclass
class Joint:
    """Carries sudden load by a lower τ, and lasting load by replicas."""

    capacity: Capacity
    outer: OuterSettings
    inner: InnerSettings
    state: OuterState = field(default_factory=OuterState)

    @property
    def period_s(self) -> float:
        """Seconds between two decisions of the outer loop."""
        return self.outer.period_s

    def decide(self, snapshot: Snapshot, /) -> Target:
        """Take a decision."""
        decision, self.state = decide(snapshot, self.state, self.capacity, self.outer)
        return Target(decision.num_replicas, decision.range)

    def inner_loop(self) -> InnerLoopPolicy:
        """Make the inner loop of a new replica."""
        return InnerLoop(self.capacity, self.inner)

    def dispatch(self, _: int, /) -> Dispatch:
        """Make the server's queue."""
        return ServerQueue()
