"""Paces an engine: holds its steps back to the step times of a frontier.

A paced engine behaves like one on the hardware that the frontier was measured on; its output is
that of an engine that is not paced. Several replicas can share a small machine this way: replicas
that compute all the time would slow each other down, while replicas that mostly wait do not.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mars_autoscale.model.frontier import Frontier, StepTable
from mars_serve.engine.adaptive.step_times import StepTimes
from mars_serve.engine.scheduled_row import ScheduledRow

_MAX_SHARE = 0.5
"""Largest share of the paced time for computing; above it, replicas slow each other down."""
_MINUTE_S = 60
_MIN_PACED_S = 5.0
"""Paced seconds before the first warning, because an engine's first steps are slow."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepLoad:
    """The amounts of work from which a step's paced time is computed."""

    decodes: bool
    """Whether the step decodes; False if it feeds only parts of prompts and gives no token."""
    positions: int
    """Positions fed by decoding rows: uncached tokens, drafts and masks."""
    cached_tokens: int
    """Cached tokens that decoding rows read."""
    prompt_tokens: int
    """Tokens fed by rows in prefill, including those recomputed after a preemption."""


def step_times(table: StepTable) -> StepTimes:
    """Convert a frontier's table of step times.

    Grid points become whole numbers. Measured ones are whole already, and keep their exact times.
    """
    positions, cached_tokens = (
        tuple(sorted({math.ceil(point) for point in grid}))
        for grid in (table.positions, table.stored)
    )
    lines = [table.at_cached(tokens) for tokens in cached_tokens]
    seconds = tuple(tuple(line.at(count) for line in lines) for count in positions)
    return StepTimes(positions, cached_tokens, seconds)


class Pacer:
    """Holds each step back until its time on the frontier's hardware is over.

    Consecutive steps are due at the sum of their times, so waking up late does not slow them down
    unless computing takes too long. A step that computes for longer than its paced time delays the
    steps after it. Only `compute_share` may be read from another thread.
    """

    def __init__(
        self,
        frontier: Frontier,
        window: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Prepare to pace by a frontier.

        Args:
            frontier: gives the step times and the prefill rate.
            window: most masks of a row, 0 for a plain AR model.
            clock: returns seconds.
            sleep: waits for a number of seconds.
        """
        self.times = step_times(frontier.step_seconds)
        """Paced times of decoding steps."""
        self.compute_share: float | None = None
        """Real over paced seconds of the last minute's steps; None before the first step."""
        self._prompt_token_s = 1 / frontier.prefill_tokens_per_s
        self._window = window
        self._clock, self._sleep = clock, sleep
        self._start = self._due = 0.0
        self._total = _StepSums(0)
        self._last_minute = deque[_StepSums]()  # one entry per second
        self._warned_at = -math.inf

    def load(self, rows: Sequence[ScheduledRow]) -> StepLoad:
        """Return the load of a step whose results are not committed yet.

        Masks of a row in prefill, behind its last prompt token, count as decoding.
        """
        decoding = [row for row in rows if not row.request.in_prefill(self._window)]
        num_fed = sum(row.num_positions for row in rows)
        prompt_tokens = sum(row.num_tokens for row in rows)
        prompt_tokens -= sum(row.num_tokens for row in decoding)
        return StepLoad(
            decodes=bool(decoding) or any(row.reads_logits for row in rows),
            positions=num_fed - prompt_tokens,
            cached_tokens=sum(row.request.num_cached for row in decoding),
            prompt_tokens=prompt_tokens,
        )

    def seconds(self, load: StepLoad) -> float:
        """Return the time of a step on the frontier's hardware.

        It is the time of the decoding rows, if any, plus the prompt tokens at the rate of a replica
        that does only prefill.
        """
        prompts_s = load.prompt_tokens * self._prompt_token_s
        if not load.decodes:
            return prompts_s
        return float(self.times.at(load.positions, load.cached_tokens)) + prompts_s

    def begin(self, *, follows: bool) -> None:
        """Record that a step begins, before any of its work is done.

        Args:
            follows: whether the step follows the previous one without idle time, so that its time
                counts from when the previous one was due.
        """
        self._start = self._due if follows else self._clock()

    def finish(self, rows: Sequence[ScheduledRow]) -> None:
        """Wait until the current step is due; its results are known but not committed."""
        paced_s = self.seconds(self.load(rows))
        now = self._clock()
        self._record(now, now - self._start, paced_s)
        due = self._start + paced_s
        while (left_s := due - self._clock()) > 0:
            self._sleep(left_s)
        self._due = max(due, now)

    def _record(self, now: float, real_s: float, paced_s: float) -> None:
        """Add a step to the sums, and warn once a minute if computing takes too large a share."""
        second = math.floor(now)
        while self._last_minute and self._last_minute[0].second <= second - _MINUTE_S:
            self._last_minute.popleft()
        if not self._last_minute or self._last_minute[-1].second != second:
            self._last_minute.append(_StepSums(second))
        for sums in (self._last_minute[-1], self._total):
            sums.real_s += real_s
            sums.paced_s += paced_s
        minute_s = sum(sums.paced_s for sums in self._last_minute)
        self.compute_share = share = sum(sums.real_s for sums in self._last_minute) / minute_s
        is_due = now - self._warned_at >= _MINUTE_S
        if share > _MAX_SHARE and minute_s >= _MIN_PACED_S and is_due:
            self._warned_at = now
            _log.warning(
                "rehearsal: not valid on this machine: computing takes %.0f%% of the paced time "
                "(%.0f%% since the start), and %.0f%% is the limit; use fewer replicas or a "
                "smaller model",
                100 * share,
                100 * self._total.real_s / self._total.paced_s,
                100 * _MAX_SHARE,
            )


@dataclass(slots=True)
class _StepSums:
    """Total real and paced seconds of the steps that finished in one second of the clock."""

    second: int
    real_s: float = 0.0
    paced_s: float = 0.0
