"""Lets a replica follow its application's governor, and report its load to it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ray.exceptions import RayError

from mars_autoscale.policy.inner_loop import LOOK_PERIOD_S
from mars_autoscale.policy.outer_loop import AutoscalingBasis
from mars_autoscale.policy.reports import LoadReport
from mars_serve.config.served import PublishedThreshold
from mars_serve.control.governor import WAIT_S
from mars_serve.control.governor_actor import GovernorClient
from mars_serve.engine.ipc.loop import EngineDied
from mars_serve.replica.steering import Steering

_RETRY_S = (0.05, 2.0)
"""First and longest pause in seconds before a governor that does not answer is called again."""
_START_S = 10.0
"""Longest time in seconds that a starting replica waits for its first value."""

_log = logging.getLogger(__name__)


class Follower:
    """Keeps a replica's τ up to date, in a daemon thread.

    If the model is autoscaled, the same thread runs the replica's `Steering`.
    """

    def __init__(
        self,
        application: str,
        model: str,
        initial: PublishedThreshold,
        apply: Callable[[PublishedThreshold], None],
        steering: Steering | None = None,
    ) -> None:
        self._client = GovernorClient(application)
        self._model = model
        self.live = initial
        """Latest value that was applied."""
        self._apply = apply
        self._steering = steering
        self._is_current = threading.Event()
        threading.Thread(target=asyncio.run, args=[self._run()], daemon=True).start()
        if not self._is_current.wait(_START_S):
            _log.warning("the governor does not answer; starting with τ %g", initial.threshold)

    async def _run(self) -> None:
        if self._steering is None:
            await self._follow()
        else:
            await asyncio.gather(self._follow(), self._steer(self._steering))

    async def _follow(self) -> None:
        pause_s, longest_s = _RETRY_S
        timeout_s = 0.0  # the first call only fetches the present value
        while True:
            try:
                newest = await self._client.call("wait", self._model, self.live, timeout_s)
            except RayError as error:
                _log.warning("the governor does not answer: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
                continue
            pause_s, timeout_s = _RETRY_S[0], WAIT_S
            if newest.version > self.live.version:
                self._apply(newest)
                self.live = newest
            self._is_current.set()

    async def _steer(self, steering: Steering) -> None:
        sending: asyncio.Task[None] | None = None
        while True:
            try:
                report = steering.step(time.monotonic())
            except EngineDied:
                return  # Ray Serve replaces the replica
            if sending is None or sending.done():  # one unanswered report at a time
                sending = asyncio.create_task(self._send(report, steering.basis))
            await asyncio.sleep(LOOK_PERIOD_S)

    async def _send(self, report: LoadReport, basis: AutoscalingBasis) -> None:
        with suppress(RayError):  # `_follow` logs it
            await self._client.call("report", self._model, report, basis)
