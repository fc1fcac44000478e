"""An engine as asyncio sees it: requests go down a channel, what they get comes back by it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Protocol

from mars_platform.errors import UserError
from mars_serve.engine.ipc.channel import Channel, ChannelClosed
from mars_serve.engine.ipc.messages import (
    Cancel,
    NotLoaded,
    Order,
    Ready,
    SetLive,
    StepReport,
)
from mars_serve.engine.request import (
    EngineStatus,
    FinishReason,
    LiveDecoding,
    Request,
    StepOutput,
)

_STOP_S = 30.0
"""Longest that a step is waited for when an engine is stopped."""


class EngineDied(RuntimeError):
    """The engine has ended; the replica must be replaced."""


class RequestFailed(RuntimeError):
    """The forward pass of this request failed; others are not affected."""


class QueueFull(RuntimeError):
    """As many requests wait as the engine allows; try again later."""


class QueueTimeout(RuntimeError):
    """The request waited for as long as it may (`DecodingOptions.max_queue_s`) and did not begin;
    try again later.
    """


class Worker(Protocol):
    """The process or thread in which an engine steps."""

    def is_alive(self) -> bool:
        """Whether it runs."""

    def join(self, timeout: float) -> None:
        """Wait, for some seconds at the most, until it has ended."""


_Outputs = asyncio.Queue[StepOutput | EngineDied]


class EngineLoop:
    """Face of an engine that steps elsewhere.

    Requests run on one event loop at a time; another one may take over when none is left.
    """

    def __init__(self, channel: Channel, worker: Worker) -> None:
        """Wait until an engine is ready.

        Args:
            channel: to an `EngineWorker`.
            worker: where that one runs.

        Raises:
            UserError: the model cannot be served.
            EngineDied: the engine ended before it was ready.
        """
        self._channel = channel
        self._worker = worker
        self._outputs: dict[str, _Outputs] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        ready = self._first_message()
        self._max_requests = ready.max_requests
        self._live = ready.live
        self._status = ready.status
        self._status_s = time.monotonic()
        self.plan = ready.plan
        """What the model is to be autoscaled by; None where it is not."""

    @property
    def is_alive(self) -> bool:
        """Whether the engine still steps."""
        return not self._is_closed and self._worker.is_alive()

    @property
    def live(self) -> LiveDecoding:
        """What the requests are decoded with that give no τ."""
        return self._live

    def set_live(self, live: LiveDecoding) -> None:
        """Decode the requests that give no τ, those that run included, otherwise from the next
        step on. Any thread may call it.

        Raises:
            EngineDied: the engine has stopped.
        """
        self._send(SetLive(live))
        self._live = live

    def status(self) -> EngineStatus:
        """How full the engine is, by its last report. Any thread may call it.

        Raises:
            EngineDied: it has stopped.
        """
        if not self.is_alive:
            raise EngineDied("the engine has stopped")
        return self._status

    @property
    def age_s(self) -> float:
        """Seconds since the last report of an engine that has work; 0 without work."""
        return time.monotonic() - self._status_s if self._outputs else 0.0

    async def stream(
        self, request: Request, beat_s: float | None = None
    ) -> AsyncGenerator[StepOutput | None]:
        """Run one request; yields what each forward pass gave, until it has finished.

        Leaving the iteration early, by an error or a cancelled task, cancels the request.

        Args:
            request: in no other engine.
            beat_s: seconds; None is yielded whenever there was nothing for so long.

        Raises:
            UserError: the request can never run.
            QueueFull: too many requests wait already.
            QueueTimeout: it did not begin within the time that it sets.
            RequestFailed: its own forward pass failed.
            EngineDied: the engine failed, before or meanwhile.
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
        """End the engine after the current step; requests that still run get `EngineDied`."""
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

    def _submit(self, request: Request) -> _Outputs:
        self._attach(asyncio.get_running_loop())
        if len(self._outputs) >= self._max_requests:
            raise QueueFull("too many requests are waiting")
        if not self._outputs and not self._status.num_requests:  # it had nothing to report
            self._status_s = time.monotonic()
        outputs = self._outputs[request.id] = _Outputs()
        try:
            self._send(request)
        except EngineDied:
            self._outputs.pop(request.id, None)
            raise
        return outputs

    def _cancel(self, request_id: str) -> None:
        if self._outputs.pop(request_id, None) is not None:
            with suppress(EngineDied):  # then there is nothing left to cancel
                self._send(Cancel(request_id))

    def _send(self, order: Order) -> None:
        if not self.is_alive:
            raise EngineDied("the engine has stopped")
        try:
            self._channel.send(order)
        except ChannelClosed as error:
            raise EngineDied("the engine has stopped") from error

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have this event loop read the reports."""
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
            assert isinstance(report, StepReport)
            self._status, self._status_s = report.status, time.monotonic()
            for output in report.outputs:
                self._deliver(output)

    def _deliver(self, output: StepOutput) -> None:
        outputs = self._outputs.get(output.request_id)
        if outputs is None:
            return  # cancelled while the step ran
        if output.finish_reason is not None:
            del self._outputs[output.request_id]
        outputs.put_nowait(output)

    def _close(self) -> None:
        self._is_closed = True
        self._detach()
        self._channel.close()
        for outputs in self._outputs.values():
            outputs.put_nowait(EngineDied("the engine has stopped"))
        self._outputs.clear()


def _raise_for(output: StepOutput, request: Request) -> None:
    """Raise what an output that is not one says."""
    if output.finish_reason is FinishReason.ERROR:
        raise RequestFailed(output.error)
    if output.finish_reason is FinishReason.REFUSED:
        raise UserError(output.error)
    if output.finish_reason is FinishReason.TIMEOUT:
        limit = request.options.max_queue_s
        raise QueueTimeout(f"the request did not begin within {limit} s")
