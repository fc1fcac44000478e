"""Shows the progress of each phase of a run, with the time left for the whole run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

_LEAST_SHARE = 0.02
"""Share of the work that must be done before the time left is estimated."""

Show = Callable[[str, int, int, str], None]
"""Function called with a phase's title, finished units, total units, and quality and time left in
words."""


class WholeProgress:
    """The progress of several phases, one after the other, with the time left for all of them."""

    def __init__(
        self, show: Show, phases: Mapping[str, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the clock.

        ``phases`` has the expected work of each phase by its title, in any unit and in order.
        """
        self._show = show
        self._phases = dict(phases)
        self._clock = clock
        self._begin_s = clock()

    def update(self, title: str, done: int, total: int, quality: str = "", /) -> None:
        """Record that ``done`` of ``total`` units of a phase are done, and all phases before it.

        ``quality`` is the quality so far in words.
        """
        titles = list(self._phases)
        before = sum(self._phases[name] for name in titles[: titles.index(title)])
        share = (before + done / total * self._phases[title]) / sum(self._phases.values())
        left = ""
        if _LEAST_SHARE <= share < 1:
            left = in_words((self._clock() - self._begin_s) * (1 - share) / share)
        self._show(title, done, total, ", ".join(filter(None, [quality, left])))


def in_words(seconds: float) -> str:
    """Return the time left for the whole run in words."""
    if seconds < 90:
        return f"about {max(round(seconds), 1)} s left in all"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min left in all"
    return f"about {round(seconds / 3600)} h left in all"
