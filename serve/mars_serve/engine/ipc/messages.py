"""What an engine's worker and its loop send each other."""

from __future__ import annotations

from dataclasses import dataclass

from mars_autoscale.policy.control import Plan
from mars_serve.engine.request import EngineStatus, LiveDecoding, Request, StepOutput


@dataclass(frozen=True)
class Cancel:
    """Asks an engine to drop a request."""

    request_id: str


@dataclass(frozen=True)
class SetLive:
    """Asks an engine to decode otherwise from the next step on."""

    live: LiveDecoding


Order = Request | Cancel | SetLive
"""What an engine is sent; a request is one to run."""


@dataclass(frozen=True)
class Ready:
    """An engine's first message."""

    max_requests: int
    """That may wait or run at once."""
    live: LiveDecoding
    status: EngineStatus
    plan: Plan | None
    """Of its autoscaling, where it takes part in one."""


@dataclass(frozen=True)
class NotLoaded:
    """The first message in its place, where the model cannot be served."""

    reason: str


@dataclass(frozen=True)
class StepReport:
    """What an engine sends after a step, and whenever its status has changed."""

    outputs: list[StepOutput]
    status: EngineStatus
