"""Messages between an engine's worker and the event loop that uses it."""

from __future__ import annotations

from dataclasses import dataclass

from mars_autoscale.policy.outer_loop import AutoscalingBasis
from mars_platform.method.live import LiveDecoding
from mars_serve.engine.adaptive.step_times import StepTimes
from mars_serve.engine.outputs import EngineStatus, StepOutput
from mars_serve.engine.request import Request


@dataclass(frozen=True)
class Cancel:
    """An order to drop a request."""

    request_id: str


@dataclass(frozen=True)
class SetLive:
    """An order to change the live decoding from the next step on."""

    live: LiveDecoding


Order = Request | Cancel | SetLive
"""Any message to an engine; a `Request` is an order to run it."""


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
    """A report that an engine sends after a step and whenever its status has changed."""

    outputs: list[StepOutput]
    status: EngineStatus
