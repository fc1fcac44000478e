"""Steps an engine on orders from its connections, and reports the outputs to them."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import Protocol

from mars_autoscale.audit.counts import AuditOutcome
from mars_autoscale.model.step_times import StepTimes
from mars_autoscale.policy.outer_loop import AutoscalingBasis
from mars_autoscale.policy.reports import EngineStatus
from mars_autoscale.queueing.grants import Grants, reserve_of
from mars_platform.errors import UserError
from mars_platform.method.mode import LiveDecoding
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.engine.engine import Engine
from mars_serve.engine.ipc.auditor import Auditor
from mars_serve.engine.ipc.channel import Channel, ChannelClosed
from mars_serve.engine.ipc.compilers import Compilers
from mars_serve.engine.ipc.connections import Connection, Connections
from mars_serve.engine.ipc.listener import Address, Listener
from mars_serve.engine.ipc.messages import (
    Begun,
    Cancel,
    Condition,
    Demand,
    LoadUpdate,
    Ready,
    SetLateRule,
    StepReport,
)
from mars_serve.engine.ipc.pulse import Pulse
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import ScheduledRow

_BEAT_S = 1.0
"""Seconds between two signs of life while there is nothing to run."""
_UPDATE_S = 0.1
"""Least seconds between two reports on all requests while steps run."""

_log = logging.getLogger(__name__)
_request_of = attrgetter("request_id")


class Observer(Protocol):
    """Counts and times an engine's requests; all calls come from the thread that steps.

    It is sent to the engine's starter as it is, so it can be pickled.
    """

    def come(self, request: Request) -> None:
        """Note a request that waits from now on."""

    def stepped(self, request: Request, output: StepOutput, now_s: float) -> None:
        """Note an output at a time by ``time.monotonic``."""

    def gone(self, request: Request, now_s: float) -> None:
        """Note that a request has ended at a time by ``time.monotonic``."""

    def audited(self, outcome: AuditOutcome) -> None:
        """Note the outcome of an audit."""


class EngineWorker:
    """Takes orders from connections and sends reports, until its starter's end is closed.

    The starter's connection is there from the beginning. Others come through a listener; when one
    of those closes, its requests are cancelled.
    """

    def __init__(
        self,
        engine: Engine,
        channel: Channel,
        observer: Observer,
        on_closed: Callable[[], None] | None = None,
        basis: AutoscalingBasis | None = None,
        *,
        times: StepTimes | None = None,
        pulse: Pulse | None = None,
        host: str | None = None,
        auditor: Auditor | None = None,
    ) -> None:
        """Prepare the worker, which alone may use ``engine`` from now on; `run` does the work.

        ``on_closed`` is called in a thread of its own when the starter's end of ``channel`` is
        closed; ``basis`` and ``times`` are sent to the other ends. Further connections are accepted
        at the address ``host`` of an interface, if one is given.
        """
        self._engine = engine
        engine.on_launch = self._launching
        sizes = engine.settings
        grants = Grants(sizes.max_num_seqs, reserve_of(sizes.max_num_seqs))
        self._connections = Connections(channel, grants)
        self._observer = observer
        self._auditor = auditor or Auditor(engine)
        self._on_closed = on_closed
        self._basis = basis
        self._times = times
        self._pulse = pulse
        self._host = host
        self._changed = threading.Condition()
        self._inbox: deque[Request | Cancel] = deque()
        self._compiling: set[str] = set()
        """Ids of requests that enter the inbox once their grammar is compiled."""
        self._compilers = Compilers(self._take_compiled)
        self._is_closed = False
        self._running: dict[str, Request] = {}
        self._held: dict[str, list[StepOutput]] = {}
        """Outputs, by request, that are sent together at the end."""
        self._is_short_of_pages = False
        """Whether requests wait in the engine because the KV cache has no free pages."""
        self._has_demand = False
        """Whether what waits before the engine has changed since the thread that steps looked."""
        self._lacks_demand = False
        """Whether the last report on all requests is without such a change."""
        self._updated: EngineStatus = engine.status()
        self._updated_s = 0.0

    def run(self) -> None:
        """Step until the starter's end is closed or the engine fails, then close all channels."""
        listener = Listener(self._host, self._connect) if self._host is not None else None
        threading.Thread(target=self._read_starter, name="engine-orders", daemon=True).start()
        threading.Thread(target=self._connections.beat, name="beats", daemon=True).start()
        try:
            ready = self._ready(listener.address if listener else None)
            self._connections.send(self._connections.starter, ready)
            self._step()
        except ChannelClosed:
            pass  # nobody is left to work for
        except Exception:
            _log.exception("the engine failed")
        finally:
            if listener is not None:
                listener.close()
            self._compilers.close()
            self._engine.grammars.close()
            self._connections.close()

    def _ready(self, address: Address | None) -> Ready:
        return Ready(
            self._engine.settings.max_requests,
            self._engine.live,
            self._updated,
            self._basis,
            self._times,
            address,
        )

    def _step(self) -> None:
        engine, outputs = self._engine, list[StepOutput]()
        while self._take_inbox():
            self._auditor.begin()
            step = engine.begin_step()
            self._report(outputs)  # the previous step's, while a GPU runs this one
            outputs = self._auditor.take(engine.finish_step(step))
            if not (engine.overlaps and engine.has_work):
                self._report(outputs)
                outputs = []

    def _launching(self, rows: Sequence[ScheduledRow]) -> None:
        """Say what the step is about to run, as nothing can be said if it never returns."""
        begun = [row.request.id for row in rows if row.request.queue_s is None]
        for connection, names in self._connections.by_sender(begun, str).items():
            self._connections.send(connection, Begun(names))
        status = self._engine.status()
        self._is_short_of_pages = bool(
            status.num_waiting and status.num_running < self._engine.settings.max_num_seqs
        )
        if status.num_requests and not self._updated.num_requests:
            self._update(status, time.monotonic())
        if self._pulse is not None:
            positions = sum(row.num_positions for row in rows)
            self._pulse.begin(positions, sum(row.request.num_cached for row in rows))

    def _take_inbox(self) -> bool:
        """Wait for work or orders and apply the orders; False once the starter's end is closed."""
        with self._changed:
            while not (self._is_closed or self._inbox or self._has_demand or self._has_work):
                self._beat()
                self._changed.wait(_BEAT_S)
            self._beat()
            orders = list(self._inbox)
            self._inbox.clear()
            self._lacks_demand |= self._has_demand
            self._has_demand = False
        for order in orders:
            if isinstance(order, Cancel):
                self._drop(order.request_id)
            else:
                self._add(order)
        return not self._is_closed

    @property
    def _has_work(self) -> bool:
        return self._engine.has_work or self._auditor.has_work

    def _beat(self) -> None:
        if self._pulse is not None:
            self._pulse.beat()

    def _add(self, request: Request) -> None:
        self._observer.come(request)
        self._auditor.come(request)
        self._running[request.id] = request
        self._engine.add(request)

    def _drop(self, request_id: str) -> None:
        """Cancel a request, and tell its sender which of its tokens were held back."""
        request = self._running.get(request_id)
        if request is not None and not request.is_streamed:
            held = request.tokens[request.num_prompt :]
            self._tell(StepOutput(request_id, held, FinishReason.CANCELLED))
        self._engine.cancel(request_id)
        self._forget(request_id, time.monotonic())

    def _forget(self, request_id: str, now_s: float) -> None:
        self._connections.ended(request_id)
        self._held.pop(request_id, None)
        request = self._running.pop(request_id, None)
        if request is not None:
            self._observer.gone(request, now_s)
            self._auditor.gone(request)

    def _report(self, outputs: list[StepOutput]) -> None:
        now_s = time.monotonic()
        reports = self._connections.by_sender(self._due(outputs), _request_of)
        for output in outputs:
            request = self._running.get(output.request_id)
            if request is not None:
                self._observer.stepped(request, output, now_s)
                self._auditor.stepped(output)
            if output.finish_reason is not None:
                self._forget(output.request_id, now_s)
        outcomes = self._auditor.take_outcomes()
        for outcome in outcomes:
            self._observer.audited(outcome)
        self._update_if_due(now_s, is_new=bool(outputs or outcomes))
        for connection, theirs in reports.items():
            self._connections.send(connection, StepReport(theirs))
        self._connections.regrant(is_short_of_pages=self._is_short_of_pages)

    def _update_if_due(self, now_s: float, *, is_new: bool) -> None:
        status = self._engine.status()
        is_due = now_s - self._updated_s >= _UPDATE_S or not self._engine.has_work
        if is_due and (is_new or self._lacks_demand or status != self._updated):
            self._update(status, now_s)

    def _due(self, outputs: list[StepOutput]) -> list[StepOutput]:
        """Hold back outputs of requests that want them together, and return the others."""
        due = list[StepOutput]()
        for output in outputs:
            request = self._running.get(output.request_id)
            if request is None or request.is_streamed:
                due.append(output)
                continue
            held = self._held.setdefault(request.id, [])
            held.append(output)
            if output.finish_reason is not None:
                due += held
        return due

    def _update(self, status: EngineStatus, now_s: float) -> None:
        self._updated, self._updated_s = status, now_s
        self._lacks_demand = False
        num_outside = self._connections.num_waiting
        whole = replace(
            status,
            num_requests=status.num_requests + num_outside,
            num_waiting=status.num_waiting + num_outside,
        )
        self._connections.send(self._connections.starter, LoadUpdate(whole, self._observer))

    # The methods below run in threads that read orders, or in one that compiles grammars.

    def _connect(self, channel: Channel) -> None:
        self._read(self._connections.add(channel, self._ready(None)))

    def _read_starter(self) -> None:
        try:
            self._read(self._connections.starter)
        finally:  # an engine that gets no orders must not go on
            with self._changed:
                self._is_closed = True
                self._changed.notify()
            if self._on_closed is not None:
                self._on_closed()

    def _read(self, connection: Connection) -> None:
        try:
            while True:
                for order in connection.channel.receive():
                    self._take(order, connection)
        except ChannelClosed as closed:
            if closed.args:
                _log.error("a connection ends: %s", closed)
        finally:
            for request_id in self._connections.remove(connection):
                self._cancel(Cancel(request_id))
            with self._changed:
                self._has_demand = True  # what waited there waits no longer
                self._changed.notify()

    def _take(self, order: object, connection: Connection) -> None:
        if isinstance(order, LiveDecoding):
            self._engine.live = order
        elif isinstance(order, SetLateRule | Condition):
            self._connections.tell(order)
        elif isinstance(order, Demand):
            self._take_demand(order, connection)
        elif isinstance(order, Cancel):
            self._cancel(order)
        else:
            assert isinstance(order, Request)
            order.arrived_at = time.monotonic() - order.waited_s
            self._connections.received(order.id, connection)
            if order.options.grammar is None and self._engine.loras.has(order):
                self._take_request(order)
            else:
                self._compiling.add(order.id)
                self._compilers.submit(order)

    def _take_demand(self, demand: Demand, connection: Connection) -> None:
        self._connections.note_demand(connection, demand)
        with self._changed:
            self._has_demand = True
            self._changed.notify()

    def _cancel(self, order: Cancel) -> None:
        with self._changed:
            if order.request_id in self._compiling:
                self._compiling.remove(order.request_id)
                self._connections.ended(order.request_id)
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
            self._refuse(request, FinishReason.REFUSED, str(error))
            return False
        except Exception as error:
            _log.exception("request %s cannot be checked", request.id)
            self._refuse(request, FinishReason.ERROR, str(error))
            return False
        return True

    def _tell(self, output: StepOutput) -> None:
        with suppress(ChannelClosed):
            for connection, outputs in self._connections.by_sender([output], _request_of).items():
                self._connections.send(connection, StepReport(outputs))

    def _refuse(self, request: Request, reason: FinishReason, error: str) -> None:
        self._tell(StepOutput(request.id, [], reason, error=error))
        self._connections.ended(request.id)
        self._connections.regrant(is_short_of_pages=self._is_short_of_pages)
