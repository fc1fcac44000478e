"""Ray Serve's side of autoscaling: passes on what the governor has decided, and nothing else.

A policy runs in Serve's controller, several times a second, before everything else that the
controller does for any application: whatever it waits for or raises, all of them suffer. So this
one neither waits nor raises. It asks from a thread of its own, and where there is no fresh answer
it asks for as many replicas as before. What has been decided is in the governor, so that neither a
change of the application's configuration nor the end of the controller loses it, and a copy is
here for the governor's successor.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.serve.config import AutoscalingContext

NAMESPACE = "serve"
"""Ray's namespace of Serve's own actors, where all of an application's processes are."""

_PERIOD_S = 1.0
"""Between two questions to the governor."""
_ANSWER_S = 5.0
"""Longest that one is waited for, in the thread."""
_FRESH_S = 12.0
"""For which an answer holds."""
_UNUSED_S = 3.0
"""A thread whose policy has not been called for so long ends: it may have been replaced, and would
tell what is old."""

_log = logging.getLogger("ray.serve")


def governor_name(application: str) -> str:
    """Name of the actor that decides for an application."""
    return f"MARSRAY_GOVERNOR::{application}"


class JointPolicy:
    """A deployment's ``autoscaling_config.policy.policy_function``."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._questions: _Questions | None = None

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Replicas of the deployment from now on, and no state."""
        target = int(context.target_num_replicas)
        try:
            if self._questions is None:
                self._questions = _Questions(context.app_name or "", self._model)
            ready = [replica.unique_id for replica in context.running_replicas]
            decided = self._questions.answer(_Seen(ready, target, _stats(context)))
        except Exception:
            _log.exception("autoscaling of %s holds its replicas", self._model)
            return target, {}
        return (target if decided is None else decided), {}


def _stats(context: AutoscalingContext) -> dict[str, dict[str, float]]:
    """The latest values that replicas gave Serve, by replica; empty while there are none."""
    found: dict[str, dict[str, float]] = {}
    for name, by_replica in (context.raw_metrics or {}).items():
        for replica, series in by_replica.items():
            if series:
                found.setdefault(replica.unique_id, {})[name] = series[-1].value
    return found


class _Seen(NamedTuple):
    """What Serve's controller knows of a deployment."""

    ready: list[str]
    """Names of the replicas that serve."""
    num_target: int
    """Replicas that were asked for."""
    stats: dict[str, dict[str, float]]
    """What they told it, by name."""


class _Questions:
    """Asks the governor from a thread."""

    def __init__(self, application: str, model: str) -> None:
        self._name, self._model = governor_name(application), model
        self._actor: Any = None
        self._state: Any = None
        self._seen: _Seen | None = None
        self._answer: tuple[float, int] | None = None
        self._used_s = time.monotonic()
        self._thread = self._started()

    def answer(self, seen: _Seen) -> int | None:
        """The latest decision, at once; None where there is none that still holds.

        Args:
            seen: told to the governor.
        """
        self._seen, self._used_s = seen, time.monotonic()
        if not self._thread.is_alive():
            self._thread = self._started()
        if self._answer is None or time.monotonic() - self._answer[0] > _FRESH_S:
            return None
        return self._answer[1]

    def _started(self) -> threading.Thread:
        thread = threading.Thread(target=self._ask_on, name="autoscaling", daemon=True)
        thread.start()
        return thread

    def _ask_on(self) -> None:
        while time.monotonic() - self._used_s < _UNUSED_S:
            try:
                self._ask()
            except (RayError, ValueError) as error:  # it has died, or is not there yet
                self._actor = None
                _log.debug("no answer from %s: %s", self._name, error)
            time.sleep(_PERIOD_S)

    def _ask(self) -> None:
        if self._seen is None or not ray.is_initialized():  # asking would start a Ray of its own
            return
        if self._actor is None:
            self._actor = ray.get_actor(self._name, namespace=NAMESPACE)
        call = self._actor.tick.remote(self._model, *self._seen, self._state)
        self._state, number, age_s = ray.get(call, timeout=_ANSWER_S)
        if number is not None:
            self._answer = (time.monotonic() - age_s, number)
