"""Runs an engine in a thread of its own and hands its output to asyncio."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass

from mars_platform.errors import UserError
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import EngineStatus, FinishReason, Request, StepOutput

_log = logging.getLogger(__name__)


class EngineDied(RuntimeError):
    """The engine's thread has ended on an error; the replica must be replaced."""


class RequestFailed(RuntimeError):
    """The forward pass of this request failed; others are not affected."""


class QueueFull(RuntimeError):
    """As many requests wait as the engine allows; try again later."""


class QueueTimeout(RuntimeError):
    """The request waited for as long as it may (`DecodingOptions.max_queue_s`) and did not begin;
    try again later.
    """


_Outputs = asyncio.Queue[StepOutput | EngineDied]
_Delivery = tuple[_Outputs, StepOutput | EngineDied]


@dataclass(frozen=True)
class _Listener:
    """Where a request's output goes."""

    loop: asyncio.AbstractEventLoop
    outputs: _Outputs


def _hand_over(deliveries: dict[asyncio.AbstractEventLoop, list[_Delivery]]) -> None:
    """Wake each event loop once, for all that it gets: waking one takes longer than a put."""
    for loop, pairs in deliveries.items():
        with suppress(RuntimeError):  # a loop that has closed has nobody left to take it
            loop.call_soon_threadsafe(_put_all, pairs)


def _put_all(pairs: list[_Delivery]) -> None:
    for outputs, output in pairs:
        outputs.put_nowait(output)


class EngineLoop:
    """Thread-safe face of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._changed = threading.Condition()
        self._inbox: deque[Request | str] = deque()  # a request to add, or an id to cancel
        self._listeners: dict[str, _Listener] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the engine still steps."""
        return self._thread.is_alive()

    @property
    def live_threshold(self) -> float:
        """τ of the requests that give none."""
        return self.engine.live_threshold

    def set_live_threshold(self, value: float) -> None:
        """Change τ of the requests that give none, those that run included, from the next step on.

        Args:
            value: in (0, 1].

        Raises:
            UserError: it is not.
        """
        if not 0.0 < value <= 1.0:
            raise UserError(
                f"confidence_threshold: {value} is not in (0, 1]; 1 is plain AR decoding"
            )
        self.engine.live_threshold = value

    def status(self) -> EngineStatus:
        """How full the engine is.

        Raises:
            EngineDied: it has stopped.
        """
        if not self.is_alive:
            raise EngineDied("the engine has stopped")
        return self.engine.status()

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        """Run one request; yields what each forward pass gave, until it has finished.

        Leaving the iteration early, by an error or a cancelled task, cancels the request.

        Raises:
            UserError: the request can never run.
            QueueFull: too many requests wait already.
            QueueTimeout: it did not begin within the time that it sets.
            RequestFailed: its own forward pass failed.
            EngineDied: the engine failed, before or meanwhile.
        """
        request.arrived_at = time.monotonic()
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())
        if request.options.grammar is not None:
            await asyncio.to_thread(self.engine.check, request)  # compiles it for what follows
        self._submit(request, listener)
        finished = False
        try:
            while not finished:
                output = await listener.outputs.get()
                if isinstance(output, EngineDied):
                    finished = True
                    raise output
                finished = output.finish_reason is not None
                if output.finish_reason is FinishReason.ERROR:
                    raise RequestFailed(output.error)
                if output.finish_reason is FinishReason.TIMEOUT:
                    limit = request.options.max_queue_s
                    raise QueueTimeout(f"the request did not begin within {limit} s")
                yield output
        finally:
            if not finished:
                self._cancel(request.id)

    def stop(self) -> None:
        """End the thread after the current step; requests that still run get `EngineDied`."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _submit(self, request: Request, listener: _Listener) -> None:
        self.engine.check(request)
        with self._changed:
            if not self.is_alive or self._stopping:
                raise EngineDied("the engine has stopped")
            if len(self._listeners) >= self.engine.settings.max_requests:
                raise QueueFull("too many requests are waiting")
            self._listeners[request.id] = listener
            self._inbox.append(request)
            self._changed.notify()

    def _cancel(self, request_id: str) -> None:
        with self._changed:
            self._listeners.pop(request_id, None)
            self._inbox.append(request_id)
            self._changed.notify()

    def _run(self) -> None:
        outputs: list[StepOutput] = []
        try:
            while self._take_inbox():
                step = self.engine.begin_step()
                self._deliver(outputs)  # of the step before, while a GPU runs this one
                outputs = self.engine.finish_step(step)
                if not (self.engine.overlaps and self.engine.has_work):
                    self._deliver(outputs)
                    outputs = []
        except Exception:
            _log.exception("the engine failed")
        finally:
            self._end_listeners()

    def _take_inbox(self) -> bool:
        """Apply what came in, waiting for work where there is none; False when stopping."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._inbox or self.engine.has_work)
            entries = list(self._inbox)
            self._inbox.clear()
        for entry in entries:
            if isinstance(entry, str):
                self.engine.cancel(entry)
            else:
                self.engine.add(entry)
        return not self._stopping

    def _deliver(self, outputs: list[StepOutput]) -> None:
        deliveries = defaultdict[asyncio.AbstractEventLoop, list[_Delivery]](list)
        with self._changed:
            for output in outputs:
                listener = self._listeners.get(output.request_id)
                if listener is None:
                    continue  # cancelled while the step ran
                if output.finish_reason is not None:
                    del self._listeners[output.request_id]
                deliveries[listener.loop].append((listener.outputs, output))
        _hand_over(deliveries)

    def _end_listeners(self) -> None:
        deliveries = defaultdict[asyncio.AbstractEventLoop, list[_Delivery]](list)
        with self._changed:
            self._stopping = True
            for listener in self._listeners.values():
                pair = listener.outputs, EngineDied("the engine has stopped")
                deliveries[listener.loop].append(pair)
            self._listeners.clear()
        _hand_over(deliveries)
