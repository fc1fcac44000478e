"""Engines that are slow, hang or fail when a test wants it, to be run by a `LocalEngineClient`."""

from __future__ import annotations

import threading
import time
from typing import Any

from mars_serve.engine.engine import Engine
from mars_serve.engine.execution.fault_isolation import Step
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request


class SlowEngine(Engine):
    """An engine whose long requests do not end within a test unless they are cancelled."""

    def begin_step(self) -> Step | None:
        time.sleep(0.05)
        return super().begin_step()


class ControlledEngine(Engine):
    """An engine that notes its requests, and whose steps hang or fail as a test says."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.may_step = threading.Event()
        """Cleared to make steps hang that have work."""
        self.may_step.set()
        self.hangs = threading.Event()
        """Set once a step hangs."""
        self.fails_between_steps = False
        """Whether the engine dies as soon as it has a request; orders alone wake it, too."""
        self.fails_after = 10**6
        """Outputs that an engine gives before it dies in a step."""
        self.received: list[Request] = []
        """Requests in the order of their arrival, those that the engine refused included."""
        self.sent: list[tuple[tuple[str, ...], int]] = []
        """Failed replicas and quarantine with which each of them came."""

    def check(self, request: Request) -> None:
        if not any(each is request for each in self.received):  # some are checked twice
            self.received.append(request)
            self.sent.append((request.failed_on, request.quarantine_tokens))
        super().check(request)

    def begin_step(self) -> Step | None:
        if self.fails_between_steps and self.has_work:
            raise RuntimeError("the engine fails between two steps")
        return super().begin_step()

    def finish_step(self, step: Step | None) -> list[StepOutput]:
        if step is None:  # there was no work
            return super().finish_step(step)
        if not self.may_step.is_set():
            self.hangs.set()
        self.may_step.wait(30)
        if self.fails_after <= 0:
            raise RuntimeError("the engine fails in a step")
        outputs = super().finish_step(step)
        self.fails_after -= len(outputs)
        return outputs
