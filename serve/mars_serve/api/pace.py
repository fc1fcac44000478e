"""The pace at which requests end, from which refusals say when to come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_PACE_S = 60.0
"""Seconds over which ends are counted to tell the pace."""
_MAX_ENDS = 256
"""Largest number of ends that are remembered; the latest tell the pace well enough."""
_UNKNOWN_S = 1.0
"""Wait in seconds where nothing has ended lately, so that nothing is known of the pace."""


class Pace:
    """Tells from the latest ends how long some more will take."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends_s = deque[float](maxlen=_MAX_ENDS)

    def ended(self, num: int = 1) -> None:
        """Count requests or outputs that have ended."""
        self._ends_s.extend([self._clock()] * num)

    def wait_s(self, num: int) -> float:
        """Return the seconds in which ``num`` will end."""
        now_s = self._clock()
        while self._ends_s and self._ends_s[0] < now_s - _PACE_S:
            self._ends_s.popleft()
        if len(self._ends_s) < 2 or now_s <= self._ends_s[0]:
            return _UNKNOWN_S
        return num * (now_s - self._ends_s[0]) / len(self._ends_s)
