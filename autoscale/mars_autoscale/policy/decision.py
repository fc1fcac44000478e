"""The outer loop's decision, its state, and the record of a decision."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from mars_autoscale.policy import budget, demand


@dataclass(frozen=True)
class ThresholdRange:
    """How far the inner loops may lower τ, and how much speed the arrivals need."""

    floor_threshold: float = 1.0
    """Lowest τ for tier default; at 1 its τ stays at the target."""
    flex_floor_threshold: float = 1.0
    """Lowest τ for tier flex."""
    feed_forward: float = 1.0
    """Gain over the base that the ready replicas need to carry the arrivals."""
    is_saturated: bool = False
    """Whether nothing is left to give: the highest number of replicas is ordered, and those that
    serve are full and at their lowest τ. Requests that would come too late should be refused, as a
    replica that is starting does not help them."""


AT_TARGET = ThresholdRange()
"""The range in which τ stays at the target."""
ANY_THRESHOLD = ThresholdRange(floor_threshold=0.0, flex_floor_threshold=0.0)
"""The range without floors."""


class Reason(StrEnum):
    """Why a decision gives its number of replicas."""

    STEADY = "steady"
    """There are as many replicas as needed."""
    LOAD = "load"
    """The arriving or waiting requests need more replicas."""
    DEBT = "debt"
    """τ has been low for long: quality pays for work that one more replica should do."""
    BURSTS = "bursts"
    """The arrivals need fewer replicas, but bursts that have recurred need all of them."""
    IDLE = "idle"
    """Fewer replicas are needed, and have been for a while."""
    WAITING = "waiting"
    """Fewer are needed, but not for long enough, or τ is still low, or a replica is silent."""
    HELD = "held"
    """The reports are too old or not finite: nothing changes."""


@dataclass(frozen=True)
class Decision:
    """How many replicas there should be, how far τ may go, and why."""

    num_replicas: int
    range: ThresholdRange
    """Limits of τ for every replica."""
    reason: Reason
    decode_tokens_per_s: float
    """Output tokens that the arriving requests need each second; 0 if unknown."""
    needed: float
    """Replicas that the arrivals, or recurring bursts, need, before rounding."""
    debt: float
    """Seconds at the lowest allowed τ that no replica has paid for yet."""
    is_overspent: bool = False
    """Whether tier default's budget of quality is spent."""
    is_refuted: bool = False
    """Whether audits contradict the frontier, so that nothing may be lost."""


@dataclass(frozen=True)
class OuterState:
    """The memory of `decide` from one decision to the next; plain data that can be pickled."""

    num_replicas: int = 0
    """Replicas ordered by the last decision; 0 before the first."""
    demand_history: demand.History = ()
    """Demand at the base within the sizing window."""
    wanted_history: tuple[tuple[float, int], ...] = ()
    """(time in s, replicas wanted) within the scale-in window."""
    debt: float = 0.0
    """Seconds at the lowest allowed τ that no replica has paid for yet."""
    decided_s: float | None = None
    """Time of the last decision in seconds; None before the first."""
    losses: budget.Losses = ()
    """Losses of tier default within the budget's hour."""
    is_overspent: bool = False
    """Whether the losses have reached the budget, and not enough of it has come back."""
    bursts: demand.History = ()
    """Each remembered burst: when it began, and its highest demand at the lowest τ."""


@dataclass(frozen=True)
class DecisionRecord:
    """A decision with the numbers behind it."""

    time_s: float
    """Seconds since 1970."""
    replicas_before: int
    """Replicas ordered by the decision before."""
    decision: Decision
    num_ready: int
    """Replicas that report."""
    num_starting: int
    """Replicas that are ordered and do not serve yet."""
    num_running: float
    """Running requests of all replicas."""
    num_waiting: float
    """Waiting requests of all replicas."""
    threshold: float | None
    """Mean τ of tier default over the replicas that report; None if none does."""
    flex_threshold: float | None
    """Mean τ of tier flex over the replicas that report; None if none does."""
    requests_per_s: float | None
    """Arriving requests each second; None if unknown."""
    prompt_tokens_per_s: float | None
    """Prompt tokens to compute each second; None if unknown."""
    mean_output_tokens: float | None
    """Mean length of an output, running ones included; None if unknown."""
    problem: str | None = None
    """Error that prevented a decision; None if there was none."""

    def as_dict(self) -> dict[str, Any]:
        """Return one flat JSON object."""
        content = asdict(self)
        decision = content.pop("decision")
        return {**decision.pop("range"), **decision, **content}
