"""Runs requests on an engine behind a channel, as asyncio streams of step outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Protocol

from mars_platform.errors import UserError
from mars_platform.method.live import LiveDecoding
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.engine.ipc.channel import Channel, ChannelClosed
from mars_serve.engine.ipc.messages import (
    Begun,
    Cancel,
    NotLoaded,
    Order,
    Ready,
    SetLive,
    StepReport,
)
from mars_serve.engine.outputs import EngineStatus, StepOutput
from mars_serve.engine.request import Request

_STOP_S = 30.0
"""Seconds to wait for the current step to end when an engine is stopped."""
_QUEUE_GRACE_S = 2.0
"""Seconds that the engine has, past the end of a request's wait, to end the wait itself."""


class EngineDied(RuntimeError):
    """Raised when the engine has ended or does not answer; the replica must be replaced."""

    replica: str | None = None
    """Name of the replica whose engine it was, if known."""
    had_begun: bool = False
    """Whether a step may have held the request, which may then be to blame."""
    num_tokens: int = 0
    """Output tokens that the request had got."""


class RequestFailed(RuntimeError):
    """Raised when a request's own part of a forward pass failed; others are not affected."""


class QueueFull(RuntimeError):
    """Raised when the engine has no room, or when a request would come too late; try again later.

    Args:
        reason: message of the error.
        wait_s: seconds after which the request would come in time; None if there is no room.
    """

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason, wait_s)  # both, because the error is sent to another process
        self.wait_s = wait_s

    def __str__(self) -> str:
        return str(self.args[0])


class QueueTimeout(RuntimeError):
    """Raised when a request did not begin within `DecodingOptions.max_queue_s`; try again later."""


class Worker(Protocol):
    """The process or thread in which an engine steps."""

    def is_alive(self) -> bool:
        """Return whether the worker still runs."""

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the worker to end."""


_Outputs = asyncio.Queue[StepOutput | EngineDied]


class EngineLoop:
    """The asyncio side of an engine that steps in another process or thread.

    Requests run on one event loop at a time; another loop may take over once no request is left.
    """

    def __init__(self, channel: Channel, worker: Worker) -> None:
        """Wait until the engine is ready.

        Args:
            channel: leads to an `EngineWorker`.
            worker: the process or thread in which that worker runs.

        Raises:
            UserError: the model cannot be served.
            EngineDied: the engine ended before it was ready.
        """
        self._channel = channel
        self._worker = worker
        self._outputs: dict[str, _Outputs] = {}
        self._waiting: set[str] = set()
        """Ids of the requests of which no step has been announced."""
        self.is_overdue = False
        """Whether the engine shows no sign of life; it then gets no further requests, and those
        that wait are given back. Any thread may set it."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        ready = self._first_message()
        self._max_requests = ready.max_requests
        self._live = ready.live
        self._status = ready.status
        self._status_s = time.monotonic()
        self.basis = ready.basis
        """Figures by which the model is autoscaled; None if it is not."""
        self.step_times = ready.times
        """Times that the engine's steps are expected to take; None if they were not measured."""

    @property
    def is_alive(self) -> bool:
        """Whether the engine is running."""
        return not self._is_closed and self._worker.is_alive()

    @property
    def live(self) -> LiveDecoding:
        """Live decoding: how requests without a τ of their own are decoded right now."""
        return self._live

    def set_live(self, live: LiveDecoding) -> None:
        """Change the live decoding from the next step on, for running requests as well.

        Any thread may call this.

        Raises:
            EngineDied: the engine has stopped.
        """
        self._send(SetLive(live))
        self._live = live

    def status(self) -> EngineStatus:
        """Return how full the engine was at its last report. Any thread may call this.

        Raises:
            EngineDied: the engine has stopped.
        """
        if not self.is_alive:
            raise EngineDied("the engine has stopped")
        return self._status

    @property
    def age_s(self) -> float:
        """Seconds since the last report if the engine has work; 0 without work."""
        return time.monotonic() - self._status_s if self._outputs else 0.0

    async def stream(
        self, request: Request, beat_s: float | None = None
    ) -> AsyncGenerator[StepOutput | None]:
        """Run one request, yielding the output of each forward pass until it has finished.

        Leaving the iteration early, by an error or a cancelled task, cancels the request.

        Args:
            request: a request that runs in no other engine.
            beat_s: seconds after which None is yielded if there was no output meanwhile.

        Raises:
            UserError: the request can never run.
            QueueFull: too many requests wait already.
            QueueTimeout: the request did not begin within its own time limit.
            RequestFailed: the request's own part of a forward pass failed.
            EngineDied: the engine has failed.
        """
        request.arrived_at = time.monotonic()
        outputs = self._submit(request)
        finished = False
        try:
            while not finished:
                try:
                    async with asyncio.timeout(beat_s):
                        output = await outputs.get()
                except TimeoutError:
                    self._check_wait(request)
                    yield None
                    continue
                if isinstance(output, EngineDied):
                    finished = True
                    raise output
                finished = output.finish_reason is not None
                _raise_for(output, request)
                yield output
        finally:
            if not finished:
                self._cancel(request.id)

    def stop(self) -> None:
        """End the engine after the current step; requests that still run raise `EngineDied`."""
        self._close()
        self._worker.join(_STOP_S)

    def _first_message(self) -> Ready:
        try:
            (message,) = self._channel.receive()
        except ChannelClosed as error:
            self.stop()
            raise EngineDied("the engine ended before it was ready; its log says why") from error
        if isinstance(message, NotLoaded):
            self.stop()
            raise UserError(message.reason)
        assert isinstance(message, Ready)
        return message

    def _check_wait(self, request: Request) -> None:
        """Give a request back that waits for an engine which does not answer.

        The engine ends waits that take too long, unless it hangs.

        Raises:
            EngineDied: the engine is overdue.
            QueueTimeout: the request did not begin within its own time limit.
        """
        if request.id not in self._waiting:
            return
        if self.is_overdue:
            raise EngineDied("the engine does not answer")
        limit_s, arrived_s = request.options.max_queue_s, request.arrived_at
        assert arrived_s is not None
        if limit_s is not None and time.monotonic() - arrived_s > limit_s + _QUEUE_GRACE_S:
            raise QueueTimeout(f"the request did not begin within {limit_s} s")

    def _submit(self, request: Request) -> _Outputs:
        self._attach(asyncio.get_running_loop())
        if self.is_overdue:
            raise EngineDied("the engine does not answer")
        if len(self._outputs) >= self._max_requests:
            raise QueueFull("too many requests are waiting")
        if not self._outputs and not self._status.num_requests:  # an idle engine does not report
            self._status_s = time.monotonic()
        outputs = self._outputs[request.id] = _Outputs()
        self._waiting.add(request.id)
        try:
            self._send(request)
        except EngineDied:
            self._outputs.pop(request.id, None)
            self._waiting.discard(request.id)
            raise
        return outputs

    def _cancel(self, request_id: str) -> None:
        self._waiting.discard(request_id)
        if self._outputs.pop(request_id, None) is not None:
            with suppress(EngineDied):  # a dead engine has nothing to cancel
                self._send(Cancel(request_id))

    def _send(self, order: Order) -> None:
        if not self.is_alive:
            raise EngineDied("the engine has stopped")
        try:
            self._channel.send(order)
        except ChannelClosed as error:
            raise EngineDied("the engine has stopped") from error

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make this event loop read the reports."""
        if loop is self._loop or self._is_closed:
            return
        assert not self._outputs, "requests run on another event loop"
        self._detach()
        loop.add_reader(self._channel.fileno(), self._read)
        self._loop = loop

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._channel.fileno())
        self._loop = None

    def _read(self) -> None:
        try:
            reports = self._channel.receive_available()
        except ChannelClosed:
            self._close()
            return
        for report in reports:
            if isinstance(report, Begun):
                self._waiting.difference_update(report.request_ids)
                continue
            assert isinstance(report, StepReport)
            self._status, self._status_s = report.status, time.monotonic()
            for output in report.outputs:
                self._deliver(output)

    def _deliver(self, output: StepOutput) -> None:
        outputs = self._outputs.get(output.request_id)
        if outputs is None:
            return  # the request was cancelled while the step ran
        if output.finish_reason is not None:
            del self._outputs[output.request_id]
            self._waiting.discard(output.request_id)
        outputs.put_nowait(output)

    def _close(self) -> None:
        self._is_closed = True
        self._detach()
        self._channel.close()
        for request_id, outputs in self._outputs.items():
            died = EngineDied("the engine has stopped")
            died.had_begun = request_id not in self._waiting
            outputs.put_nowait(died)
        self._outputs.clear()
        self._waiting.clear()


def _raise_for(output: StepOutput, request: Request) -> None:
    """Raise the error that an output reports, if any."""
    if output.finish_reason is FinishReason.ERROR:
        raise RequestFailed(output.error)
    if output.finish_reason is FinishReason.REFUSED:
        raise UserError(output.error)
    if output.finish_reason is FinishReason.TIMEOUT:
        limit = request.options.max_queue_s
        raise QueueTimeout(f"the request did not begin within {limit} s")
