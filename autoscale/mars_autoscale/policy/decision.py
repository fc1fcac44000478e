"""The outer loop's decision, its state, and the record of a decision that REST gives."""

from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

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
    """The arriving requests need more replicas."""
    QUEUE = "queue"
    """The queue has been longer than the objective allows, whatever the arrivals should need."""
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
    reason: Reason
    decode_tokens_per_s: float
    """Output tokens that the arriving requests need each second; 0 if unknown."""
    needed: float
    """Replicas that the arrivals, or recurring bursts, need at their pace, before rounding."""
    debt: float
    """Seconds at the lowest allowed τ that no replica has paid for yet."""
    is_overspent: bool = False
    """Whether tier default's budget of quality is spent."""
    is_refuted: bool = False
    """Whether audits contradict the frontier, so that nothing may be lost."""
    pace: float = 1.0
    """Measured speed of the replicas as a share of the frontier's, at most 1."""


@dataclass(frozen=True)
class OuterState:
    """The memory of `decide` from one decision to the next; plain data that can be pickled."""

    num_replicas: int = 0
    """Replicas ordered by the last decision; 0 before the first."""
    demand_history: demand.History = ()
    """Demand at the base within the sizing window, in replicas as the frontier describes them."""
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
    pace: float = 1.0
    late_queue: demand.History = ()
    """(time in s, requests that run or wait) at each decision since the queue has been longer than
    the objective allows and no replica has been starting."""


class AutoscalerDecision(BaseModel):
    """One decision of the autoscaler, with its figures."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    time_s: float
    """Time of the decision in Unix time, in seconds."""
    reason: Reason
    num_replicas: int
    """Number of replicas requested by this decision."""
    replicas_before: int
    num_ready: int
    num_starting: int
    needed: float
    """Number of replicas that the load needs, before rounding."""
    pace: float
    """Measured speed of the replicas as a share of frontier.json's, at most 1."""
    debt: float
    """Seconds spent at the lowest τ that have not yet been answered by more replicas."""
    requests_per_s: float | None
    """Requests arriving per second; null if unknown."""
    prompt_tokens_per_s: float | None
    mean_output_tokens: float | None
    decode_tokens_per_s: float
    num_running: float
    num_waiting: float
    threshold: float | None
    """Mean τ of tier default over the replicas."""
    flex_threshold: float | None
    floor_threshold: float
    """Lowest τ that replicas may choose for tier default."""
    flex_floor_threshold: float
    feed_forward: float
    """Gain over the base that the ready replicas need to serve the arriving load."""
    is_saturated: bool
    """Whether neither τ nor replicas can help further, so that late requests are refused."""
    is_overspent: bool
    """Whether tier default has spent its budget of quality loss."""
    is_refuted: bool
    """Whether audits contradict frontier.json, so that nothing may be lost."""
    problem: str | None
    """Error that occurred in this decision, if any."""
