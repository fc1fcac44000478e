"""The interface by which policies steer a simulated cluster, the joint policy, and the simplest."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from mars_autoscale.model.capacity import Capacity
from mars_autoscale.policy.decide import decide
from mars_autoscale.policy.decision import AT_TARGET, OuterState, ThresholdRange
from mars_autoscale.policy.inner_loop import EngineSample, InnerLoop, InnerLoopDecision
from mars_autoscale.policy.observe import Snapshot
from mars_autoscale.policy.settings import InnerSettings, OuterSettings
from mars_autoscale.simulation.dispatch import Dispatch, ServerQueue
from mars_platform.method.mode import LiveDecoding


@dataclass(frozen=True)
class Target:
    """A policy's decision, which holds until the next one."""

    num_replicas: int
    """Replicas to order, including those that are starting."""
    range: ThresholdRange = AT_TARGET


class InnerLoopPolicy(Protocol):
    """Chooses one replica's τ."""

    def update(self, sample: EngineSample, /) -> InnerLoopDecision:
        """Choose how to decode from now on."""


class Policy(Protocol):
    """Chooses the number of replicas, gives each an inner loop, and makes the queue before all."""

    @property
    def period_s(self) -> float:
        """Seconds between two decisions."""

    def decide(self, snapshot: Snapshot, /) -> Target:
        """Choose the number of replicas and their range of τ."""

    def inner_loop(self) -> InnerLoopPolicy:
        """Make the inner loop of a new replica."""

    def dispatch(self, seed: int, /) -> Dispatch:
        """Make the queue before the replicas, which is random by the seed if at all."""


@dataclass
class Joint:
    """The real server's policy: carries sudden load by a lower τ, and lasting load by replicas."""

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


@dataclass
class FixedThreshold:
    """An inner loop that always decodes tiers default and flex with one τ."""

    threshold: float
    is_exact: bool = False
    """Whether rows at τ = 1 run in mode exact."""

    def update(self, _: EngineSample, /) -> InnerLoopDecision:
        """Return the same decision at every look.

        It reports a gain of 1 and no loss, as a constant τ is no debt and spends no budget.
        """
        return InnerLoopDecision(LiveDecoding(self.threshold, is_exact=self.is_exact))


@dataclass
class StaticReplicas:
    """A constant number of replicas."""

    num_replicas: int
    inner_loop: Callable[[], InnerLoopPolicy] = field(default=partial(FixedThreshold, 1.0))
    period_s: float = 10.0

    def decide(self, _: Snapshot, /) -> Target:
        """Return the same number at every decision."""
        return Target(self.num_replicas)

    def dispatch(self, _: int, /) -> Dispatch:
        """Make the server's queue."""
        return ServerQueue()
