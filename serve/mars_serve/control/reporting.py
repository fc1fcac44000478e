"""Reports a process's figures to its application's governor once a second, from a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import ray
from ray.exceptions import RayError

from mars_serve.control.governor_actor import find_or_start_governor

PERIOD_S = 1.0
"""Seconds between two reports."""
_ANSWER_S = 10.0
"""Seconds without an answer after which the governor is looked for again."""

_log = logging.getLogger(__name__)


class Reporter:
    """Calls a method of the governor once a second, until the process ends.

    No report waits for anything but the answer to the one before it, and a report that is lost
    costs nothing but a gap in the dashboard: figures are totals.
    """

    def __init__(
        self, application: str, method: str, reports: Callable[[], Iterable[tuple[Any, ...]]]
    ) -> None:
        """Report from now on.

        Args:
            application: name of the application.
            method: name of a method of `Governor`.
            reports: returns the arguments of one call or several.
        """
        self._application = application
        self._method = method
        self._reports = reports
        self._governor: Any = None
        self._unanswered: list[Any] = []
        self._sent_s = 0.0
        threading.Thread(target=self._run, name="dashboard-reports", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self._send()
            except (RayError, RuntimeError, ValueError) as error:  # the latter while Ray ends
                _log.warning("the governor does not take figures for the dashboard: %s", error)
                self._governor, self._unanswered = None, []
            time.sleep(PERIOD_S)

    def _send(self) -> None:
        if self._unanswered:
            answered, missing = ray.wait(
                self._unanswered, num_returns=len(self._unanswered), timeout=0
            )
            ray.get(answered)
            self._unanswered = missing
            if missing and time.monotonic() - self._sent_s < _ANSWER_S:
                return
            if missing:
                self._governor = None
        if self._governor is None:
            self._governor = find_or_start_governor(self._application)
        call = getattr(self._governor, self._method)
        self._unanswered = [call.remote(*each) for each in self._reports()]
        self._sent_s = time.monotonic()
