"""Progress over a run of several phases: each phase's own, and the time left for the whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

_LEAST_SHARE = 0.02
"""Of the whole that must be done before the time left is guessed at."""

Show = Callable[[str, int, int, str], None]
"""Takes a phase's title, what is done of it and all of it, and the time left in words."""


class WholeProgress:
    """Tells of phases one after the other, with the time that is left for all of them."""

    def __init__(
        self, show: Show, phases: Mapping[str, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the clock.

        Args:
            show: told each step.
            phases: title of each phase and its expected share of the work, in any unit, in order.
            clock: seconds.
        """
        self._show = show
        self._phases = dict(phases)
        self._clock = clock
        self._begin_s = clock()

    def update(self, title: str, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` is done of the phase ``title``, and all before it."""
        share = self._share(title, done / total)
        left = ""
        if _LEAST_SHARE <= share < 1:
            left = in_words((self._clock() - self._begin_s) * (1 - share) / share)
        self._show(title, done, total, left)

    def _share(self, title: str, part: float) -> float:
        titles = list(self._phases)
        before = titles[: titles.index(title)]
        done = sum(self._phases[name] for name in before) + part * self._phases[title]
        return done / sum(self._phases.values())


def in_words(seconds: float) -> str:
    """Time left for the whole."""
    if seconds < 90:
        return f"about {max(round(seconds), 1)} s left in all"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min left in all"
    return f"about {round(seconds / 3600)} h left in all"
