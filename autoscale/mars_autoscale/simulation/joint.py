"""The joint policy as the simulator steers with it: the real decisions, and the real inner loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from mars_autoscale.model.capacity import Capacity
from mars_autoscale.policy.decide import Decision, OuterSettings, OuterState, decide
from mars_autoscale.policy.inner_loop import LocalController, LocalSettings
from mars_autoscale.policy.observe import Snapshot
from mars_autoscale.simulation.policies import Target


@dataclass
class Joint:
    """τ carries what comes suddenly, replicas what stays."""

    capacity: Capacity
    outer: OuterSettings
    inner: LocalSettings
    state: OuterState = field(default_factory=OuterState)
    decisions: list[Decision] = field(default_factory=list)

    @property
    def period_s(self) -> float:
        """Of the outer loop."""
        return self.outer.period_s

    def decide(self, snapshot: Snapshot, /) -> Target:
        """Take a decision, and remember it."""
        decision, self.state = decide(snapshot, self.state, self.capacity, self.outer)
        self.decisions.append(decision)
        return Target(
            decision.num_replicas,
            decision.floor_threshold,
            decision.feed_forward,
            decision.flex_floor_threshold,
            decision.is_saturated,
        )

    def local(self) -> LocalController:
        """A new replica's."""
        return LocalController(self.capacity, self.inner)
