"""Keeps steps short for other keys where one key's rows take long, by turns among its rows."""

from collections import defaultdict
from collections.abc import Collection
from operator import attrgetter, itemgetter

from mars_autoscale.model.step_times import StepTimes
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import ScheduledRow

_LEAST_S = 0.005
"""Seconds that a key's decoding rows may always add to a step."""
_SMALLEST_STEPS = 1.0
"""Time that they may add, as a multiple of that of the smallest step. So they make others' steps
twice as long at most; a step reads the weights once however few rows it has, which takes half of
the time at most."""


class KeyTurns:
    """Chooses rows while several keys are active, by measured times.

    Of a key whose decoding rows would add too much to a step, some rows pause for it, each in turn.
    A key whose rows would be most of a long step pauses while another's request waits for its
    first token, in every other step at most. A pause changes no output.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times, self._smallest_s = times, float(times.at(1, 0))
        self._most_s = max(_LEAST_S, _SMALLEST_STEPS * self._smallest_s)
        self._heavy: str | None = None
        """Key whose rows would add much to its latest step beside all keys, and most of it."""
        self._is_short = False
        """Whether the heavy key pauses in the current step."""
        self._num_steps = 0

    def members(self, requests: list[Request]) -> list[Request]:
        """Begin a step, and return those of the running requests that may be in it."""
        self._num_steps += 1
        light = [each for each in requests if each.key != self._heavy]
        waiting = [each.rank for each in light if not (each.num_output or each.is_audit)]
        self._is_short = bool(waiting) and len(light) < len(requests) and not self._is_short
        if not self._is_short:
            return requests
        first = max(waiting)
        return [each for each in requests if each.key != self._heavy or each.rank > first]

    def take_out(self, decoding: dict[Request, ScheduledRow]) -> int:
        """Take those rows out that pause, all but one of a key at most; return their positions."""
        for request in decoding:
            request.last_turn = request.last_turn or self._num_steps  # new ones overtake none
        added_s, sums_s = self._added_s(decoding.values()), defaultdict[str, float](float)
        num_positions = 0
        for request in sorted(decoding, key=attrgetter("last_turn")):
            is_first = request.key not in sums_s
            sums_s[request.key] += added_s[request]
            if is_first or sums_s[request.key] <= self._most_s or request.is_audit:
                request.last_turn = self._num_steps
            else:
                num_positions += decoding.pop(request).num_positions
        if not self._is_short:
            key, longest_s = max(sums_s.items(), key=itemgetter(1), default=("", 0.0))
            if longest_s > max(self._most_s, sum(sums_s.values())) / 2:
                self._heavy = key
            elif self._heavy in sums_s:  # one without rows may come back with as many
                self._heavy = None
        return num_positions

    def _added_s(self, rows: Collection[ScheduledRow]) -> dict[Request, float]:
        """Return the seconds that each row adds to the smallest step, as far as they are known."""
        positions = sum(row.num_positions for row in rows)
        step_s = float(self._times.at(positions, sum(row.request.num_cached for row in rows)))
        each_s = max(step_s - self._smallest_s, 0.0) / max(positions, 1)
        return {row.request: each_s * row.num_positions + row.request.choosing_s for row in rows}
