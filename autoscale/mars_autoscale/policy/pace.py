"""Measures the pace of replicas: the seconds that their work should take, over those it takes.

Decisions count on what work should take: the speed of the base by the frontier, times the ladder's
gain. Text that is harder to predict than the calibrated one, steps that last longer, other programs
on the machine, requests that pin a slower mode, and too few pages all lower the pace.
Imports no Ray or torch, and reads no clock.
"""

import math
from collections.abc import Iterable
from statistics import fmean

from mars_autoscale.model.capacity import Capacity
from mars_autoscale.policy.reports import EngineStatus

_HALF_LIFE_S = 10.0
"""Seconds of work with a full batch after which what was measured before counts half."""
_LEAST_S = 3.0
"""Seconds of such work from which on the pace is known."""
_BOUNDS = (0.1, 10.0)
"""Paces beyond which nothing is believed."""


class PaceMeter:
    """Measures one replica's pace; work counts by the share of the batch that it fills."""

    def __init__(self, capacity: Capacity) -> None:
        """Begin with an engine that has done nothing; ``capacity`` says what work should take."""
        self._capacity = capacity
        self._last, self._last_s = EngineStatus(), 0.0
        """The engine at the last look that counts, and the time of that look."""
        self._expected_s = self._taken_s = 0.0
        """Weighted sums of the seconds that work should have taken, and of those that it took."""

    @property
    def pace(self) -> float:
        """The pace; 0 while too little work has been seen."""
        return self._expected_s / self._taken_s if self._taken_s >= _LEAST_S else 0.0

    def look(self, now_s: float, status: EngineStatus, gain: float = 1.0) -> None:
        """Take in what the engine has done since the last look, with a gain by the ladder."""
        num_passes = status.num_forward_passes - self._last.num_forward_passes
        if num_passes > 0:
            self._add(self._last, status, num_passes, now_s - self._last_s, gain)
        elif num_passes == 0 and status.num_waiting:
            return  # a step may take seconds: they count with what it gives
        self._last, self._last_s = status, now_s

    def _add(
        self, last: EngineStatus, now: EngineStatus, num_passes: int, passed_s: float, gain: float
    ) -> None:
        capacity, is_wanted = self._capacity, bool(last.num_waiting and now.num_waiting)
        rows = max((now.num_row_passes - last.num_row_passes) / num_passes, 1.0)
        tokens = now.num_generated_tokens - last.num_generated_tokens
        prompts = now.num_prompt_tokens - last.num_prompt_tokens
        prompts -= now.num_prefix_hit_tokens - last.num_prefix_hit_tokens
        # decisions count on full batches, for which there are pages or not, as far as rows tell
        most, num_held = float(capacity.max_num_seqs), now.num_pages - now.num_free_pages
        fit = now.num_running * now.num_pages / num_held if num_held > 0 else most
        share = self._tokens_per_s(min(max(fit, 1.0), most)) / self._tokens_per_s(most)
        expected_s = tokens / (self._tokens_per_s(rows) * gain) * share
        expected_s += max(prompts, 0) / capacity.prefill_tokens_per_s
        # an engine that is idle although requests wait is slow
        taken_s = passed_s if is_wanted else now.busy_s - last.busy_s
        weight = min(rows / most, 1.0)
        fade = 0.5 ** (weight * taken_s / _HALF_LIFE_S)
        self._expected_s = fade * self._expected_s + weight * expected_s
        self._taken_s = fade * self._taken_s + weight * taken_s

    def _tokens_per_s(self, rows: float) -> float:
        return self._capacity.tokens_per_s(self._capacity.base(rows), rows)


def bounded(pace: float) -> float:
    """Return a pace as it is used: 1 if it is unknown, and never above, as for the calibrated."""
    return min(max(pace, _BOUNDS[0]), 1.0) if pace > 0 else 1.0


def mean_pace(paces: Iterable[float], before: float) -> float:
    """Return the mean of the paces above 0 that are finite, or the one before, as it is used."""
    known = [min(each, _BOUNDS[1]) for each in paces if 0 < each < math.inf]
    return bounded(fmean(known) if known else before)
