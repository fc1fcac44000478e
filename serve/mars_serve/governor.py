"""Where the live τ of an application's models is kept, and how replicas follow it.

One named actor for each application holds the values; replicas wait at it for newer ones. It may
die at any time: replicas go on with what they have, whoever needs it next starts it again, and
replicas tell a new one what they know. It ends by itself once no replica has waited for a while,
which is when the application is gone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from mars_serve.served import LiveThreshold

NAMESPACE = "serve"
"""Ray's namespace of Serve's own actors, where all of an application's processes are."""

_WAIT_S = 10.0
"""Longest that one call waits; a replica shows by the next that it is still there."""
_IDLE_S = 60.0
"""An actor at which nobody has waited for so long ends itself."""
_RETRY_S = (0.05, 2.0)
"""First and longest pause before an actor that does not answer is tried again."""
_START_S = 10.0
"""Longest that a starting replica waits for its first value."""

_log = logging.getLogger(__name__)


class Governor:
    """The live τ of some models. Knows no Ray; all methods run on one event loop."""

    def __init__(self) -> None:
        self._live: dict[str, LiveThreshold] = {}
        self._changed = asyncio.Event()
        self.last_wait = time.monotonic()
        """When a replica asked last."""

    async def wait(
        self, model: str, known: LiveThreshold, timeout_s: float = _WAIT_S
    ) -> LiveThreshold:
        """A value newer than ``known``, as soon as there is one; else the same after a while.

        A ``known`` that is newer than the governor's own replaces it: the governor is the one that
        was started again.
        """
        self.last_wait = time.monotonic()
        self._take(model, known)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._live[model].version <= known.version:
                    await self._changed.wait()
        self.last_wait = time.monotonic()
        return self._live[model]

    async def value(self, model: str, known: LiveThreshold) -> LiveThreshold:
        """What was set last."""
        self._take(model, known)
        return self._live[model]

    async def set(self, model: str, threshold: float) -> LiveThreshold:
        """Set a model's τ, in (0, 1].

        Versions are milliseconds since 1970, so that one given by a governor that was started again
        is newer than all that its predecessor gave.
        """
        before = self._live.get(model, LiveThreshold(0, threshold))
        version = max(time.time_ns() // 1_000_000, before.version + 1)
        self._take(model, LiveThreshold(version, threshold))
        return self._live[model]

    def _take(self, model: str, offered: LiveThreshold) -> None:
        current = self._live.get(model)
        if current is None or offered.version > current.version:
            self._live[model] = offered
            self._changed.set()  # wakes all that wait now
            self._changed.clear()


class _GovernorActor(Governor):
    """Ray's actor around a governor."""

    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=self._end_when_idle, daemon=True).start()

    def _end_when_idle(self) -> None:
        while time.monotonic() - self.last_wait < _IDLE_S:
            time.sleep(_IDLE_S / 4)
        ray.kill(ray.get_runtime_context().current_actor)


def governor_name(application: str) -> str:
    """The actor's name."""
    return f"MARSRAY_GOVERNOR::{application}"


def end_governor(application: str) -> None:
    """End an application's governor, if there is one."""
    with suppress(ValueError):
        ray.kill(ray.get_actor(governor_name(application), namespace=NAMESPACE))


class GovernorClient:
    """Reaches an application's governor from one of its processes, starting it where needed."""

    def __init__(self, application: str) -> None:
        self._name = governor_name(application)
        self._actor: Any = None

    async def call(self, method: str, *arguments: Any) -> LiveThreshold:
        """Call a method of `Governor`, once more at a new actor where the old one has died."""
        try:
            return await self._call(method, *arguments)
        except RayError:
            self._actor = None
            return await self._call(method, *arguments)

    async def _call(self, method: str, *arguments: Any) -> LiveThreshold:
        if self._actor is None:
            self._actor = await asyncio.to_thread(self._find)
        result: LiveThreshold = await getattr(self._actor, method).remote(*arguments)
        return result

    def _find(self) -> Any:
        actor = ray.remote(_GovernorActor).options(
            name=self._name,
            namespace=NAMESPACE,
            lifetime="detached",  # else it would end with the replica that came first
            get_if_exists=True,
            num_cpus=0,
        )
        return actor.remote()


class Follower:
    """Keeps a replica's τ up to date, in a thread of its own that ends with the process."""

    def __init__(
        self,
        application: str,
        model: str,
        initial: LiveThreshold,
        apply: Callable[[LiveThreshold], None],
    ) -> None:
        self._client = GovernorClient(application)
        self._model = model
        self._live = initial
        self._apply = apply
        self._is_current = threading.Event()
        threading.Thread(target=asyncio.run, args=[self._follow()], daemon=True).start()
        if not self._is_current.wait(_START_S):
            _log.warning("the governor does not answer; starting with τ %g", initial.threshold)

    @property
    def live(self) -> LiveThreshold:
        """What was applied last."""
        return self._live

    async def _follow(self) -> None:
        pause_s, longest_s = _RETRY_S
        timeout_s = 0.0  # the first call is only to learn what was set before
        while True:
            try:
                newest = await self._client.call("wait", self._model, self._live, timeout_s)
            except RayError as error:
                _log.warning("the governor does not answer: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
                continue
            pause_s, timeout_s = _RETRY_S[0], _WAIT_S
            if newest.version > self._live.version:
                self._apply(newest)
                self._live = newest
            self._is_current.set()
