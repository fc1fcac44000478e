"""Bounds the time that prompts add to steps for which others wait."""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection

import numpy as np

from mars_autoscale.model.step_times import StepTimes
from mars_serve.engine.key_turns import KeyTurns
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import ScheduledRow

_LEAST_S = 0.02
"""Seconds that prompts may always add to a step: a person hardly notices them, and a GPU computes
a thousand positions of most models meanwhile."""
_SMALLEST_STEPS = 2.0
"""Time that prompts may add to a step, as a multiple of that of the smallest step with the prompt.
Every part of a prompt reads the weights and its cached tokens anew; this bound keeps such reading
to a third of the time at most."""
_WAITED, _LONGEST_S = 0.25, 1.0
"""Share of the time, of a second at most, that the first prompt has waited for its first position
by which prompts may lengthen a step of their own key. So those that come together are computed in a
few steps, and rows that decode pause for less than the new ones have waited."""
_ACTIVE_S = 10.0
"""Seconds for which a key counts as active after its latest request."""


class PromptRoom:
    """Counts the positions that prompts may take in a step, by the measured times of steps.

    For the end of a step wait the rows that decode, and other keys' requests, which may come at any
    time.
    """

    def __init__(
        self, times: StepTimes, num_rows: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start without requests, given the times of steps of ``num_rows`` rows at most."""
        self._times, self._clock = times, clock
        self._active = OrderedDict[str, float]()
        """Time of the latest request of each active key, the oldest first."""
        most, far = times.positions[-1], max(times.cached_tokens[-1], 1.0)
        narrow, wide = (times.at(count, far) - times.at(count, 0) for count in (1, most))
        self._pair_s = max(wide - narrow, 0.0) / far / max(most / num_rows - 1, 1)
        """Seconds that each further position of a row takes for each cached token of the row."""
        self.turns = KeyTurns(times)
        self.most: int | None = None
        """Positions that the first prompt of the latest step might have; None before it."""
        self._left: int | None = None
        self._positions = self._cached_tokens = 0
        self._base_s = self._pairs_s = self._waited_s = 0.0
        self._came = dict[int, float]()
        """Time since when each prompt, by its arrival, waits for its first position."""

    def note(self, request: Request) -> None:
        """Note that a request has come."""
        self._active[request.key] = self._clock()
        self._active.move_to_end(request.key)

    def has_several(self, requests: Collection[Request]) -> bool:
        """Whether several keys are active, those of the requests included."""
        while self._active and next(iter(self._active.values())) < self._clock() - _ACTIVE_S:
            self._active.popitem(last=False)
        keys = {each.key for each in requests if not each.is_audit}
        return len(self._active.keys() | keys) > 1

    def begin(
        self, decoding: Collection[ScheduledRow], prompts: Collection[Request], *, is_shared: bool
    ) -> bool:
        """Begin a step with the rows that decode, and return whether others wait for its end.

        ``is_shared`` says whether several keys are active.
        """
        self._positions = self._cached_tokens = 0
        self._pairs_s, self._left = 0.0, None
        for row in decoding:
            self._count(row)
        self._base_s = self._times.at(self._positions, self._cached_tokens)
        now_s, first = self._clock(), max((row.request.rank for row in decoding), default=0)
        waiting = (each for each in prompts if each.queue_s is None and each.rank >= first)
        self._came = {each.arrival: self._came.get(each.arrival, now_s) for each in waiting}
        since_s = now_s if is_shared else min(self._came.values(), default=now_s)
        self._waited_s = min(now_s - since_s, _LONGEST_S)
        return bool(decoding) or is_shared

    def positions(self, request: Request, most: int) -> int:
        """Return how many positions a prompt may have in the step, ``most`` or fewer.

        The first prompt has one at least, the others have what it leaves.
        """
        cached = request.num_cached
        if self._left is not None:
            most = min(most, self._left)
        counts = np.arange(1.0, most + 1)
        step_s = self._times.at(self._positions + counts, self._cached_tokens + cached)
        pairs_s = self._pair_s * counts * (cached + counts / 2)
        extra_s = max(
            _LEAST_S, _SMALLEST_STEPS * self._times.at(1, cached), _WAITED * self._waited_s
        )
        left_s = extra_s - pairs_s - self._pairs_s
        num = int(np.count_nonzero(step_s <= self._base_s + left_s / self._times.unread))
        if self._left is None:
            num = self.most = max(num, min(most, 1))
        self._left = num
        return num

    def take(self, row: ScheduledRow) -> None:
        """Count the row of a prompt."""
        assert self._left is not None, "its positions were asked for"
        num, cached = row.num_positions, row.request.num_cached
        self._left -= num
        self._pairs_s += self._pair_s * num * (cached + num / 2)
        self._count(row)

    def _count(self, row: ScheduledRow) -> None:
        self._positions += row.num_positions
        self._cached_tokens += row.request.num_cached
