"""Steps an engine on orders from a channel and reports the outputs."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from mars_autoscale.policy.outer_loop import AutoscalingBasis
from mars_platform.errors import UserError
from mars_serve.engine.adaptive.step_times import StepTimes
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.engine.engine import Engine
from mars_serve.engine.ipc.channel import Channel, ChannelClosed
from mars_serve.engine.ipc.compilers import Compilers
from mars_serve.engine.ipc.messages import Begun, Cancel, Ready, SetLive, StepReport
from mars_serve.engine.ipc.pulse import Pulse
from mars_serve.engine.outputs import EngineStatus, StepOutput
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import ScheduledRow

_BEAT_S = 1.0
"""Seconds between two signs of life while there is nothing to run."""

_log = logging.getLogger(__name__)


class EngineWorker:
    """Takes orders from a channel and sends reports, until the other end is closed."""

    def __init__(
        self,
        engine: Engine,
        channel: Channel,
        on_closed: Callable[[], None] | None = None,
        basis: AutoscalingBasis | None = None,
        *,
        times: StepTimes | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        """Prepare the worker; `run` does the work.

        Args:
            engine: a warmed-up engine; only the worker may use it from now on.
            channel: the source of orders and the target of reports.
            on_closed: called in a thread of its own when the other end is closed.
            basis: sent to the other end.
            times: sent to the other end.
            pulse: shows to whoever watches it that steps are being run.
        """
        self._engine = engine
        engine.on_launch = self._launching
        self._channel = channel
        self._on_closed = on_closed
        self._basis = basis
        self._times = times
        self._pulse = pulse
        self._changed = threading.Condition()
        self._inbox: deque[Request | Cancel] = deque()
        self._compiling: set[str] = set()
        """Ids of requests that enter the inbox once their grammar is compiled."""
        self._compilers = Compilers(self._take_compiled)
        self._is_closed = False
        self._reported: EngineStatus = engine.status()

    def run(self) -> None:
        """Step until the other end is closed or the engine fails, then close the channel."""
        threading.Thread(target=self._read, name="engine-orders", daemon=True).start()
        try:
            engine = self._engine
            self._channel.send(
                Ready(
                    engine.settings.max_requests,
                    engine.live,
                    self._reported,
                    self._basis,
                    self._times,
                )
            )
            self._step()
        except ChannelClosed:
            pass  # nobody is left to work for
        except Exception:
            _log.exception("the engine failed")
        finally:
            self._compilers.close()
            self._engine.grammars.close()
            self._channel.close()

    def _step(self) -> None:
        engine, outputs = self._engine, list[StepOutput]()
        while self._take_inbox():
            step = engine.begin_step()
            self._report(outputs)  # the previous step's, while a GPU runs this one
            outputs = engine.finish_step(step)
            if not (engine.overlaps and engine.has_work):
                self._report(outputs)
                outputs = []

    def _launching(self, rows: Sequence[ScheduledRow]) -> None:
        """Say what the step is about to run, as nothing can be said if it never returns."""
        begun = [row.request.id for row in rows if row.request.queue_s is None]
        if begun:
            self._channel.send(Begun(begun))
        if self._pulse is not None:
            positions = sum(row.num_positions for row in rows)
            self._pulse.begin(positions, sum(row.request.num_cached for row in rows))

    def _take_inbox(self) -> bool:
        """Wait for work or orders and apply the orders; False once the other end is closed."""
        with self._changed:
            while not (self._is_closed or self._inbox or self._engine.has_work):
                self._beat()
                self._changed.wait(_BEAT_S)
            self._beat()
            orders = list(self._inbox)
            self._inbox.clear()
        for order in orders:
            if isinstance(order, Cancel):
                self._engine.cancel(order.request_id)
            else:
                self._engine.add(order)
        return not self._is_closed

    def _beat(self) -> None:
        if self._pulse is not None:
            self._pulse.beat()

    def _report(self, outputs: list[StepOutput]) -> None:
        status = self._engine.status()
        if outputs or status != self._reported:
            self._channel.send(StepReport(outputs, status))
            self._reported = status

    # The methods below run in the thread that reads orders, or in one that compiles grammars.

    def _read(self) -> None:
        try:
            while True:
                for order in self._channel.receive():
                    self._take(order)
        except ChannelClosed as closed:
            if closed.args:
                _log.error("the engine ends: %s", closed)
        finally:  # an engine that gets no orders must not go on
            with self._changed:
                self._is_closed = True
                self._changed.notify()
            if self._on_closed is not None:
                self._on_closed()

    def _take(self, order: object) -> None:
        if isinstance(order, SetLive):
            self._engine.live = order.live
        elif isinstance(order, Cancel):
            self._cancel(order)
        else:
            assert isinstance(order, Request)
            if order.options.grammar is None:
                self._take_request(order)
            else:
                self._compiling.add(order.id)
                self._compilers.submit(order)

    def _cancel(self, order: Cancel) -> None:
        with self._changed:
            if order.request_id in self._compiling:
                self._compiling.remove(order.request_id)
                return
            self._inbox.append(order)
            self._changed.notify()

    def _take_compiled(self, request: Request) -> None:
        """Compile a request's grammar, then enqueue the request unless it was cancelled."""
        if request.id in self._compiling and self._accepts(request):
            with self._changed:
                if request.id in self._compiling:
                    self._compiling.remove(request.id)
                    self._enqueue(request)
        self._compiling.discard(request.id)

    def _take_request(self, request: Request) -> None:
        if self._accepts(request):
            with self._changed:
                self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        self._inbox.append(request)
        self._changed.notify()

    def _accepts(self, request: Request) -> bool:
        """Return whether a request can run; if not, report the reason to its sender."""
        try:
            self._engine.check(request)
        except UserError as error:
            self._refuse(request, FinishReason.REFUSED, error)
            return False
        except Exception as error:
            _log.exception("request %s cannot be checked", request.id)
            self._refuse(request, FinishReason.ERROR, error)
            return False
        return True

    def _refuse(self, request: Request, reason: FinishReason, error: Exception) -> None:
        output = StepOutput(request.id, [], reason, error=str(error))
        with suppress(ChannelClosed):
            self._channel.send(StepReport([output], self._engine.status()))
