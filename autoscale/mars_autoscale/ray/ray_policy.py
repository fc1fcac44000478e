"""Ray Serve's side of autoscaling: it passes the governor's decisions on.

A policy runs in Serve's controller several times a second, before everything else that the
controller does for any application; whatever it waits for or raises harms all of them. This policy
therefore neither waits nor raises: it calls the governor from a thread, and orders as many replicas
as before if there is no fresh answer. Decisions live in the governor and outlast both a change of
the application's configuration and the controller. A copy is kept here for the governor's
successor.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray.exceptions import RayError

if TYPE_CHECKING:  # Ray Serve takes a second to import, and the governor needs two names from here
    from ray.serve.config import AutoscalingContext

NAMESPACE = "serve"
"""Ray namespace of Serve's actors, to which all of an application's processes belong."""

_PERIOD_S = 1.0
"""Seconds between two calls of the governor."""
_ANSWER_S = 5.0
"""Longest time in seconds that the thread waits for an answer."""
_FRESH_S = 12.0
"""Seconds for which an answer holds."""
_UNUSED_S = 3.0
"""Seconds without a call of the policy after which its thread ends. The policy may have been
replaced, and would report an old view."""

_log = logging.getLogger("ray.serve")


def governor_name(application: str) -> str:
    """Return the name of the actor that decides for an application."""
    return f"MARSRAY_GOVERNOR::{application}"


class JointPolicy:
    """A deployment's ``autoscaling_config.policy.policy_function``."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._caller: _GovernorCaller | None = None

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas to order, and an empty state."""
        target = int(context.target_num_replicas)
        try:
            if self._caller is None:
                self._caller = _GovernorCaller(context.app_name or "", self._model)
            ready = [replica.unique_id for replica in context.running_replicas]
            decided = self._caller.exchange(_ControllerView(ready, target))
        except Exception:
            _log.exception("autoscaling of %s holds its replicas", self._model)
            return target, {}
        return (target if decided is None else decided), {}


class _ControllerView(NamedTuple):
    ready: list[str]
    num_target: int


class _GovernorCaller:
    """Calls the governor from a thread, which ends while the policy is not used."""

    def __init__(self, application: str, model: str) -> None:
        self._name, self._model = governor_name(application), model
        self._actor: Any = None
        self._state: Any = None
        """The governor's latest state, for its successor."""
        self._view: _ControllerView | None = None
        self._answer: tuple[float, int] | None = None
        """(time, replicas) of the latest decision."""
        self._used_s = time.monotonic()
        self._thread = self._start_thread()

    def exchange(self, view: _ControllerView) -> int | None:
        """Leave a view for the governor, and return the latest decision without waiting.

        Returns:
            The number of replicas; None if no decision is fresh enough.
        """
        self._view, self._used_s = view, time.monotonic()
        if not self._thread.is_alive():
            self._thread = self._start_thread()
        if self._answer is None or time.monotonic() - self._answer[0] > _FRESH_S:
            return None
        return self._answer[1]

    def _start_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._call_repeatedly, name="autoscaling", daemon=True)
        thread.start()
        return thread

    def _call_repeatedly(self) -> None:
        while time.monotonic() - self._used_s < _UNUSED_S:
            try:
                self._call()
            except (RayError, ValueError) as error:  # the actor has died or does not exist yet
                self._actor = None
                _log.debug("no answer from %s: %s", self._name, error)
            time.sleep(_PERIOD_S)

    def _call(self) -> None:
        if self._view is None or not ray.is_initialized():  # get_actor would start another Ray
            return
        if self._actor is None:
            self._actor = ray.get_actor(self._name, namespace=NAMESPACE)
        call = self._actor.tick.remote(self._model, *self._view, self._state)
        self._state, number, age_s = ray.get(call, timeout=_ANSWER_S)
        if number is not None:
            self._answer = (time.monotonic() - age_s, number)
