"""Messages between an engine's worker and the event loop that uses it."""

from dataclasses import dataclass

from mars_autoscale.model.step_times import StepTimes
from mars_autoscale.policy.outer_loop import AutoscalingBasis
from mars_autoscale.policy.reports import EngineStatus
from mars_autoscale.queueing.estimate import LateRule
from mars_platform.method.mode import LiveDecoding
from mars_serve.engine.ipc.listener import Address
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request


@dataclass(frozen=True)
class Condition:
    """Whether an engine should get requests: an order to tell all who send them, or that news."""

    is_overdue: bool = False
    """Whether the engine shows no sign of life; what waits at it is better sent elsewhere."""
    is_draining: bool = False
    """Whether the engine is about to end, once its requests have."""


@dataclass(frozen=True)
class Cancel:
    """An order to drop a request."""

    request_id: str


@dataclass(frozen=True)
class SetLateRule:
    """An order to refuse requests that would come too late from now on."""

    rule: LateRule | None
    """The rule to refuse by; None if no request comes too late."""


@dataclass(frozen=True)
class Demand:
    """An order to count requests that wait before the engine, and will come to it or to another.

    Whoever sends requests divides what waits among its engines, so that the sum over all engines is
    right.
    """

    num_wanted: int
    """Requests that would have been sent by now if there were credits, since the connection began;
    see `Credit.report`."""
    share: int
    """Part of the requests that wait that is counted here."""


Order = Request | Cancel | LiveDecoding | SetLateRule | Condition | Demand
"""Any message to an engine: a `Request` is an order to run it, a `LiveDecoding` to decode so from
the next step on."""


@dataclass(frozen=True)
class Ready:
    """The first message of an engine that has loaded its model."""

    max_requests: int
    """Most requests that may wait or run at the same time."""
    live: LiveDecoding
    status: EngineStatus
    basis: AutoscalingBasis | None
    """Figures by which the model is autoscaled; None if it is not."""
    times: StepTimes | None
    """Times that steps are expected to take; None if they were not measured."""
    address: Address | None = None
    """Address of further connections; only the engine's starter is told."""


@dataclass(frozen=True)
class NotLoaded:
    """The first message of an engine that cannot serve its model."""

    reason: str
    """Error message for the user."""


@dataclass(frozen=True)
class Begun:
    """A report that requests are in a step for the first time, sent before the step starts.

    So it is known which requests still waited if the step ends the engine's process.
    """

    request_ids: list[str]


@dataclass(frozen=True)
class StepReport:
    """A report that an engine sends after a step, and when it refuses a request."""

    outputs: list[StepOutput]
    """Outputs of the requests that came over this connection."""


@dataclass(frozen=True)
class LoadUpdate:
    """A report on all requests of an engine, sent to its starter a few times a second."""

    status: EngineStatus
    activity: object
    """The engine's `Observer` with its counts."""


@dataclass(frozen=True)
class CreditGrant:
    """A report that a number of requests may be sent, counted since the connection began."""

    limit: int


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life from an engine that has had nothing else to say for a while."""
