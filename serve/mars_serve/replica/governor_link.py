"""A replica's exchange with its application's governor: reports there, the live τ back."""

import asyncio
import logging
import threading
import time
from concurrent.futures import Future
from contextlib import suppress

from mars_autoscale.policy.inner_loop import SAMPLE_PERIOD_S
from mars_autoscale.policy.outer_loop import AutoscalingBasis
from mars_autoscale.policy.reports import Phase, ReplicaReport
from mars_serve.control.governor import WAIT_S
from mars_serve.control.governor_actor import UNREACHABLE, GovernorClient
from mars_serve.control.reporting import report_forever
from mars_serve.engine.ipc.client import EngineDied
from mars_serve.observability.replica_telemetry import ReplicaTelemetry
from mars_serve.replica.threshold_controller import ThresholdController

_RETRY_S = (0.05, 2.0)
"""First and longest pause in seconds before a governor that does not answer is called again."""
_START_S = 10.0
"""Longest time in seconds that a starting replica waits for its first value."""

_log = logging.getLogger(__name__)


class GovernorLink:
    """Reports twice a second and keeps the replica's τ up to date, in one daemon thread.

    Until it is given an engine to `follow` for, it reports that the replica starts.
    """

    def __init__(self, application: str, model: str, replica: str, node: str) -> None:
        self._client = GovernorClient(application)
        self._model = model
        self._starting = ReplicaReport(replica, node, Phase.STARTING)
        self._engine = Future[tuple[ReplicaTelemetry, ThresholdController]]()
        """The engine's telemetry and threshold controller, once there is one."""
        self._is_current = threading.Event()
        """Set once the governor's first value is applied."""

    def start(self) -> None:
        """Report from now on."""
        threading.Thread(
            target=asyncio.run, args=[self._run()], name="governor", daemon=True
        ).start()

    def follow(self, telemetry: ReplicaTelemetry, controller: ThresholdController) -> None:
        """Report on an engine and control its τ, and wait until the governor's value is applied."""
        self._engine.set_result((telemetry, controller))
        if not self._is_current.wait(_START_S):
            threshold = controller.published.threshold
            _log.warning("the governor does not answer; starting with τ %g", threshold)

    def report(self) -> ReplicaReport:
        """Return the replica's report. Any thread may call this."""
        if not self._engine.done():
            return self._starting
        telemetry, controller = self._engine.result()
        published = controller.published
        return telemetry.report(
            controller.decision,
            live_version=published.version,
            is_pinned=published.is_pinned,
            pace=controller.pace,
        )

    async def _run(self) -> None:
        reporting = asyncio.create_task(report_forever(self._client, "report", self._calls))
        _, controller = await asyncio.wrap_future(self._engine)
        with suppress(EngineDied):  # Ray Serve replaces the replica
            await asyncio.gather(self._follow(controller), self._control(controller))
        await reporting

    def _calls(self) -> list[tuple[str, ReplicaReport, AutoscalingBasis | None]]:
        basis = self._engine.result()[1].basis if self._engine.done() else None
        return [(self._model, self.report(), basis)]

    async def _follow(self, controller: ThresholdController) -> None:
        pause_s, longest_s = _RETRY_S
        timeout_s = 0.0  # the first call only fetches the present value
        while True:
            known = controller.published
            try:
                newest = await self._client.call("wait", self._model, known, timeout_s)
                if newest.version > known.version:
                    controller.take(newest, time.monotonic())
            except EngineDied:
                raise
            except Exception as error:  # without this task, τ would stay as it is for good
                is_odd = not isinstance(error, UNREACHABLE)
                _log.warning("the governor does not answer: %r", error, exc_info=is_odd)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
                continue
            pause_s, timeout_s = _RETRY_S[0], WAIT_S
            self._is_current.set()

    async def _control(self, controller: ThresholdController) -> None:
        while True:
            try:
                controller.step(time.monotonic())
            except EngineDied:
                raise
            except Exception:
                _log.exception("τ cannot be chosen; trying again")
            await asyncio.sleep(SAMPLE_PERIOD_S)
