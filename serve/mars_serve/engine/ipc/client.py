"""Runs requests on an engine behind a channel, as asyncio streams of step outputs."""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from mars_autoscale.policy.reports import EngineStatus
from mars_autoscale.queueing.estimate import LateRule
from mars_autoscale.queueing.grants import Credit
from mars_platform.errors import UserError
from mars_platform.method.mode import LiveDecoding
from mars_platform.tier import Tier
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.engine.ipc.channel import Channel, ChannelClosed
from mars_serve.engine.ipc.messages import (
    Begun,
    Cancel,
    Condition,
    CreditGrant,
    Demand,
    Heartbeat,
    LoadUpdate,
    NotLoaded,
    Order,
    Ready,
    SetLateRule,
    StepReport,
)
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request

_STOP_S = 30.0
"""Seconds to wait for the current step to end when an engine is stopped."""
_QUEUE_GRACE_S = 2.0
"""Seconds that the engine has, past the end of a request's wait, to end the wait itself."""
_OVERDUE_S, _SILENT_S = 6.0, 15.0
"""Seconds without any message after which an engine with requests counts as overdue, and as lost:
if its host loses power, no connection is closed."""
_LOOK_S = 1.0
"""Seconds without an output after which a request looks whether its engine is still there."""
_LAST_WORD_S = 2.0
"""Seconds within which an engine says what it has of a cancelled request."""

_log = logging.getLogger(__name__)


class EngineDied(RuntimeError):
    """Raised when the engine has ended or does not answer; the replica must be replaced."""

    had_begun: bool = False
    """Whether a step may have held the request, which may then be to blame."""


class EngineSilent(EngineDied):
    """Raised when an engine with requests sends no sign of life."""


class RequestFailed(RuntimeError):
    """Raised when a request's own part of a forward pass failed; others are not affected."""


class QueueFull(RuntimeError):
    """Raised when there is no room, or when a request would come too late; try again later.

    ``wait_s`` are the seconds after which the request would come in time; None if there is no room.
    """

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason, wait_s)  # both, because the error is sent to another process
        self.wait_s = wait_s

    def __str__(self) -> str:
        return str(self.args[0])


class DeadlineMissed(QueueFull):
    """Raised when a request surely cannot begin before the deadline that it sets."""


class QueueTimeout(RuntimeError):
    """Raised when a request did not begin within `DecodingOptions.max_queue_s`; try again later."""


class Worker(Protocol):
    """The process or thread in which an engine steps."""

    def is_alive(self) -> bool:
        """Return whether the worker still runs."""

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the worker to end."""


@dataclass(slots=True)
class _Stream:
    request: Request
    arrived_s: float
    """Time of arrival by ``time.monotonic``."""
    waits: bool = True
    """Whether no step of it has been announced."""
    has_output: bool = False
    outputs: asyncio.Queue[StepOutput | Exception] = field(default_factory=asyncio.Queue)


class EngineClient:
    """The asyncio side of a connection to an engine that steps in another process or thread.

    Requests run on one event loop at a time; another loop may take over once no request is left.
    The engine's starter has a client, and so has every process that sends it requests. Once the
    engine has stopped, methods raise `EngineDied`.
    """

    def __init__(self, channel: Channel, worker: Worker, *, is_always_heard: bool = False) -> None:
        """Wait until the engine at the other end of ``channel`` is ready; ``worker`` runs it.

        An engine ``is_always_heard`` if it sends signs of life over this connection even when no
        request of it runs, as it does to all but its starter.

        Raises:
            UserError: the model cannot be served.
            EngineDied: the engine ended before it was ready.
        """
        self._channel = channel
        self._worker = worker
        self._is_always_heard = is_always_heard
        self._streams: dict[str, _Stream] = {}
        self._cancelled: dict[str, _Stream] = {}
        """Cancelled requests, by id, of whose tokens the engine has yet to tell."""
        self._compiling: dict[str, str] = {}
        """Keys of the requests with a grammar that have not begun, by the requests' id."""
        self._looking: asyncio.TimerHandle | None = None
        """Timer of the next look whether the engine is still there; None without requests."""
        self.condition = Condition()
        """Whether the engine should get requests, as far as its starter has said."""
        self._heard_s = time.monotonic()
        """Time of the latest message, or of the first request if none ran before."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._is_cut = False
        """Whether the engine's end was found closed; reports that it sent before may be unread."""
        self.credit = Credit()
        """Counts the requests that may be sent and are not to wait in the engine."""
        self.late_rule: LateRule | None = None
        """The rule by which requests come too late at this engine; None if none does."""
        self.on_change: Callable[[], None] | None = None
        """Called when more requests may be sent, as when a prompt was computed, or when the engine
        has ended."""
        self.backlog = Counter[str]()
        """Prompt tokens of the requests of this connection that have no output yet, by key."""
        ready, others = self._first_messages()
        self._max_requests = ready.max_requests
        self._live = ready.live
        self._status = ready.status
        self._status_s = time.monotonic()
        self.basis = ready.basis
        self.step_times = ready.times
        self.address = ready.address
        self.activity: object = None
        """Latest copy of the engine's `Observer`; None before its first report."""
        self._take_all(others)

    @property
    def is_alive(self) -> bool:
        """Whether the engine is running."""
        return not (self._is_closed or self._is_cut) and self._worker.is_alive()

    @property
    def live(self) -> LiveDecoding:
        """Live decoding: how requests without a τ of their own are decoded right now."""
        return self._live

    def set_live(self, live: LiveDecoding) -> None:
        """Change the live decoding from the next step on, for running requests as well.

        Any thread may call this.
        """
        self._send(live)
        self._live = live

    def set_late_rule(self, rule: LateRule | None) -> None:
        """Refuse requests that would come too late by a rule. Any thread may call this."""
        self._send(SetLateRule(rule))

    def tell(self, condition: Condition) -> None:
        """Tell all who send requests how the engine is. Any thread may call this."""
        self.condition = condition
        self._send(condition)

    def num_waiting(self, tier: Tier) -> int:
        """Return the requests sent from here, of a tier or above, that no step has held yet."""
        return sum(
            stream.waits and stream.request.options.tier.rank >= tier.rank
            for stream in self._streams.values()
        )

    def num_compiling(self) -> Counter[str]:
        """Return the requests sent from here whose grammar may still be compiled, by key."""
        return Counter(self._compiling.values())

    def waiting_tiers(self) -> list[Tier]:
        """Return the tiers of the requests sent from here that no step has held yet.

        Any thread may call this.
        """
        streams = list(self._streams.values())  # at once, as others come and go meanwhile
        return [stream.request.options.tier for stream in streams if stream.waits]

    @property
    def is_overdue(self) -> bool:
        """Whether the engine shows no sign of life; it then gets no further requests, and those
        that wait are given back.
        """
        return self.condition.is_overdue or self._silent_s >= _OVERDUE_S

    def note_demand(self, demand: Demand) -> None:
        """Tell the engine what waits here."""
        self._send(demand)

    @property
    def num_requests(self) -> int:
        """Requests that came over this connection and have not ended."""
        return len(self._streams)

    def status(self) -> EngineStatus:
        """Return how full the engine was at its last report. Any thread may call this."""
        if not self.is_alive:
            raise EngineDied("the engine has stopped")
        return self._status

    @property
    def age_s(self) -> float:
        """Seconds since the last report if the engine has work or has ended; 0 without work."""
        has_work = self._streams or self._status.num_requests or not self.is_alive
        return time.monotonic() - self._status_s if has_work else 0.0

    @property
    def _silent_s(self) -> float:
        is_due = self._streams or self._is_always_heard
        return time.monotonic() - self._heard_s if is_due else 0.0

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        """Run one request, yielding the output of each forward pass until it has finished.

        Leaving the iteration early, by an error or a cancelled task, cancels the request.

        Args:
            request: a request that runs in no other engine.

        Raises:
            UserError: the request can never run.
            QueueFull: too many requests wait already.
            QueueTimeout: the request did not begin within its own time limit.
            RequestFailed: the request's own part of a forward pass failed.
            EngineSilent: the engine sends no sign of life.
            EngineDied: the engine has failed.
        """
        stream, finished = self._submit(request), False
        try:
            while not finished:
                output = await stream.outputs.get()
                if isinstance(output, Exception):
                    raise output
                finished = output.finish_reason is not None
                _raise_for(output, request)
                yield output
        finally:
            if not finished:
                self._cancel(request.id)
                is_due = not (request.is_streamed or stream.waits)
                if is_due and self.is_alive and not self.is_overdue:
                    await self._last_word(stream)

    async def _last_word(self, stream: _Stream) -> None:
        """Wait until the engine says which tokens it has held back of a cancelled request."""
        request_id = stream.request.id
        self._cancelled[request_id] = stream
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                output = await stream.outputs.get()  # the last may have come before
                while isinstance(output, StepOutput) and output.finish_reason is None:
                    output = await stream.outputs.get()
        except TimeoutError:
            _log.warning("the engine does not say how many tokens %s has", request_id)
        finally:
            self._cancelled.pop(request_id, None)

    def attach(self) -> None:
        """Read the reports on the running event loop from now on, as a first request does, too."""
        loop = asyncio.get_running_loop()
        if loop is self._loop or self._is_closed:
            return
        assert not self._streams, "requests run on another event loop"
        self._detach()
        loop.add_reader(self._channel.fileno(), self._read)
        self._loop = loop

    def read_in_thread(self) -> None:
        """Read the reports in a thread, for an owner that sends no requests itself."""

        def read() -> None:
            try:
                while True:
                    self._take_all(self._channel.receive())
            except ChannelClosed:
                pass
            finally:  # an engine whose reports nobody reads counts as dead
                self._close()

        threading.Thread(target=read, name="engine-reports", daemon=True).start()

    def stop(self) -> None:
        """End the engine after the current step; requests that still run raise `EngineDied`."""
        self._close()
        self._worker.join(_STOP_S)

    def _first_messages(self) -> tuple[Ready, list[object]]:
        """Wait for the first message, and return it with those that have come behind it."""
        try:
            message, *others = self._channel.receive()
        except ChannelClosed as error:
            self.stop()
            raise EngineDied("the engine ended before it was ready; its log says why") from error
        if isinstance(message, NotLoaded):
            self.stop()
            raise UserError(message.reason)
        assert isinstance(message, Ready)
        return message, others

    def _look(self) -> None:
        """End the requests that wait in vain."""
        self._looking = None
        self._read()  # what has come while this event loop was busy is no silence
        for stream in self._streams.values():
            problem = self._problem(stream)
            if problem is not None:
                stream.outputs.put_nowait(problem)
        self._look_later()

    def _look_later(self) -> None:
        if self._streams and self._looking is None and self._loop is not None:
            self._looking = self._loop.call_later(_LOOK_S, self._look)

    def _problem(self, stream: _Stream) -> Exception | None:
        """Return the error for a request whose engine does not answer, or None.

        The engine itself ends waits that take too long, unless it hangs.
        """
        if self._silent_s >= _SILENT_S:
            silent = EngineSilent("the engine is silent; its host may be gone")
            silent.had_begun = not stream.waits
            return silent
        if not stream.waits:
            return None
        if self.is_overdue:
            return EngineDied("the engine does not answer")
        limit_s = stream.request.options.max_queue_s
        if limit_s is not None and time.monotonic() - stream.arrived_s > limit_s + _QUEUE_GRACE_S:
            return _timeout(stream.request)
        return None

    def _submit(self, request: Request) -> _Stream:
        self.attach()
        if self.is_overdue:
            raise EngineDied("the engine does not answer")
        if len(self._streams) >= self._max_requests:
            raise QueueFull("too many requests are waiting")
        if not self._streams:  # an engine without work does not report
            now_s = time.monotonic()
            if not self._is_always_heard:
                self._heard_s = now_s
            if not self._status.num_requests:
                self._status_s = now_s
        self._send(request)
        self.credit.num_sent += 1
        self.backlog[request.key] += request.num_prompt
        stream = self._streams[request.id] = _Stream(request, time.monotonic())
        if request.options.grammar is not None:
            self._compiling[request.id] = request.key
        self._look_later()
        return stream

    def _cancel(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        self._compiling.pop(request_id, None)
        if stream is not None:
            self._note_output(stream)
            with suppress(EngineDied):  # a dead engine has nothing to cancel
                self._send(Cancel(request_id))

    def _send(self, order: Order) -> None:
        if not self.is_alive:
            raise EngineDied("the engine has stopped")
        try:
            self._channel.send(order)
        except ChannelClosed as error:
            self._is_cut = True
            raise EngineDied("the engine has stopped") from error

    def _detach(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._channel.fileno())
        self._loop = None

    def _read(self) -> None:
        try:
            reports = self._channel.receive_available()
        except ChannelClosed:
            self._close()
            return
        self._take_all(reports)

    def _take_all(self, reports: list[object]) -> None:
        if not reports:
            return
        self._heard_s = time.monotonic()
        for report in reports:
            self._take(report)

    def _take(self, report: object) -> None:
        if isinstance(report, StepReport):
            for output in report.outputs:
                self._deliver(output)
        elif isinstance(report, LoadUpdate):
            self._status, self._status_s = report.status, self._heard_s
            self.activity = report.activity
        elif isinstance(report, Begun):
            begun = [self._streams[name] for name in report.request_ids if name in self._streams]
            for stream in begun:
                stream.waits = False
                self._compiling.pop(stream.request.id, None)
            if any(stream.request.options.grammar for stream in begun) and self.on_change:
                self.on_change()
        else:
            self._take_notice(report)

    def _take_notice(self, notice: object) -> None:
        if isinstance(notice, CreditGrant):
            self.credit.limit = notice.limit
            if self.on_change is not None:
                self.on_change()
        elif isinstance(notice, Condition):
            self.condition = notice
        elif isinstance(notice, SetLateRule):
            self.late_rule = notice.rule
        else:
            assert isinstance(notice, Heartbeat)

    def _deliver(self, output: StepOutput) -> None:
        name = output.request_id
        stream = self._streams.get(name) or self._cancelled.get(name)
        if stream is None:
            return  # the request was cancelled while the step ran
        stream.request.num_generated += len(output.tokens)
        self._note_output(stream)
        if output.finish_reason is not None:
            self._streams.pop(name, None)
            self._cancelled.pop(name, None)
            self._compiling.pop(name, None)
        stream.outputs.put_nowait(output)

    def _note_output(self, stream: _Stream) -> None:
        if not stream.has_output:
            stream.has_output = True
            key = stream.request.key
            self.backlog[key] -= stream.request.num_prompt
            if not self.backlog[key]:
                del self.backlog[key]
            if self.on_change is not None:
                self.on_change()

    def _close(self) -> None:
        self._is_closed = True
        self._detach()
        self._channel.close()
        for stream in (*self._streams.values(), *self._cancelled.values()):
            died = EngineDied("the engine has stopped")
            died.had_begun = not stream.waits
            stream.outputs.put_nowait(died)
        self._streams.clear()
        self._compiling.clear()
        if self.on_change is not None:
            self.on_change()


def _timeout(request: Request) -> QueueTimeout:
    return QueueTimeout(f"the request did not begin within {request.options.max_queue_s} s")


def _raise_for(output: StepOutput, request: Request) -> None:
    if output.finish_reason is FinishReason.ERROR:
        raise RequestFailed(output.error)
    if output.finish_reason is FinishReason.REFUSED:
        raise UserError(output.error)
    if output.finish_reason is FinishReason.TIMEOUT:
        raise _timeout(request)
