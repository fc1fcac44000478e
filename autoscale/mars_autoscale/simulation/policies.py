"""What a simulated cluster is steered by: the interface, and the simplest policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mars_autoscale.model.capacity import Rung
from mars_autoscale.policy.inner_loop import Stage
from mars_autoscale.policy.observe import Look, Snapshot


@dataclass(frozen=True)
class Target:
    """What a policy wants from now on."""

    num_replicas: int
    floor_threshold: float = 1.0
    """The lowest τ that replicas may go down to by themselves for class default."""
    feed_forward: float = 1.0
    """Gain in speed over plain AR decoding that replicas need for what arrives."""
    flex_floor_threshold: float = 1.0
    """The lowest τ for class flex."""
    is_saturated: bool = False
    """Whether what would come too late is to be refused."""


class Local(Protocol):
    """What chooses a replica's τ."""

    def update(self, look: Look, /) -> Stage:
        """What to decode with from now on."""


class Policy(Protocol):
    """Steers a cluster."""

    @property
    def period_s(self) -> float:
        """Seconds between two decisions."""

    def decide(self, snapshot: Snapshot, /) -> Target:
        """How many replicas there should be, those that start included, and their range of τ."""

    def local(self) -> Local:
        """The inner loop of a new replica."""


@dataclass
class FixedRung:
    """A replica that always decodes with one τ, whatever the class but priority."""

    rung: Rung

    def update(self, _: Look, /) -> Stage:
        """The same; its gain is left at 1, as it is no choice of its own."""
        return Stage(self.rung, self.rung)


@dataclass
class StaticReplicas:
    """As many replicas as ever, at one τ."""

    num_replicas: int
    rung: Rung
    period_s: float = 10.0

    def decide(self, _: Snapshot, /) -> Target:
        """The same."""
        return Target(self.num_replicas)

    def local(self) -> Local:
        """One τ."""
        return FixedRung(self.rung)
