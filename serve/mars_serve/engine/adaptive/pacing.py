"""Stretches an engine's steps to the times of a frontier, so that a small machine can rehearse for
other hardware.

Replicas that compute all the time add nothing to each other on the same cores; replicas that mostly
wait do, as if each had hardware of its own. What is decoded stays the same. Knows no model, no
queue and no Ray.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mars_autoscale.model.frontier import Frontier, StepTable
from mars_serve.engine.adaptive.window import StepTimes
from mars_serve.engine.scheduler import Work

_MAX_SHARE = 0.5
"""Of the paced time that computing may take; past it, replicas are in each other's way."""
_MINUTE_S = 60
_MIN_PACED_S = 5.0
"""Paced time below which a share says nothing: the first steps take long."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepLoad:
    """What a step is charged for."""

    decodes: bool
    """False where it feeds nothing but parts of prompts, and no row gets a token."""
    positions: int
    """That rows decode at: tokens that are not stored yet, drafts and masks."""
    stored: int
    """Stored tokens that decoding rows read."""
    prompt_tokens: int
    """Of rows that are still in their prompt, or compute it again after a preemption."""


def step_load(works: Sequence[Work], window: int) -> StepLoad:
    """What a step is charged for, before anything of it is committed.

    Args:
        works: the step.
        window: masks of a row at the most. A row with more unstored tokens than one pass can leave
            is in its prompt, as for the scheduler; the masks behind the last of it decode.
    """
    decoding = [work for work in works if work.request.num_uncached <= window + 1]
    num_fed = sum(work.num_positions for work in works)
    prompt_tokens = sum(work.num_tokens for work in works)
    prompt_tokens -= sum(work.num_tokens for work in decoding)
    return StepLoad(
        decodes=bool(decoding) or any(work.reads_logits for work in works),
        positions=num_fed - prompt_tokens,
        stored=sum(work.request.num_cached for work in decoding),
        prompt_tokens=prompt_tokens,
    )


def step_times(table: StepTable) -> StepTimes:
    """A frontier's times as the choice of windows takes them.

    Grids become whole numbers. Measured ones are, and then so are the times the table's own.
    """
    positions, stored = (
        tuple(sorted({math.ceil(point) for point in grid}))
        for grid in (table.positions, table.stored)
    )
    lines = [table.at_stored(tokens) for tokens in stored]
    seconds = tuple(tuple(line.at(places) for line in lines) for places in positions)
    return StepTimes(positions, stored, seconds)


class Pacer:
    """Holds each step back until its time on the frontier's hardware is over.

    Steps that follow each other are due at the sum of their times: waking up late does not slow
    them down as long as they do not compute for too long. One that does moves those after it.
    Not thread-safe, but for `compute_share`.
    """

    def __init__(
        self,
        frontier: Frontier,
        window: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Pace by a frontier.

        Args:
            frontier: gives times of steps, and the rate of prompts.
            window: masks of a row at the most, 0 for a plain AR model.
            clock: in seconds.
            sleep: waits for so many seconds.
        """
        self.times = step_times(frontier.step_seconds)
        """Of decoding steps."""
        self.compute_share: float | None = None
        """Real over paced seconds of the steps of the last minute; None before the first one."""
        self._prompt_token_s = 1 / frontier.prefill_tokens_per_s
        self._window = window
        self._clock, self._sleep = clock, sleep
        self._start = self._due = 0.0
        self._total = _Span(0)
        self._spans = deque[_Span]()  # of one second each, those of the last minute
        self._warned_at = -math.inf

    def load(self, works: Sequence[Work]) -> StepLoad:
        """See `step_load`."""
        return step_load(works, self._window)

    def seconds(self, load: StepLoad) -> float:
        """What a step takes on the frontier's hardware: a decoding step's time, and its prompts'
        at the rate of a replica that does nothing else. Parts of prompts alone take only that.
        """
        prompts_s = load.prompt_tokens * self._prompt_token_s
        if not load.decodes:
            return prompts_s
        return float(self.times.at(load.positions, load.stored)) + prompts_s

    def begin(self, *, follows: bool) -> None:
        """Note that a step begins, before any of its work is done.

        Args:
            follows: whether it follows the one before at once, so that its time runs since that
                one was due.
        """
        self._start = self._due if follows else self._clock()

    def finish(self, works: Sequence[Work]) -> None:
        """Wait until the step that began last is due, with its results known but not committed."""
        paced_s = self.seconds(self.load(works))
        now = self._clock()
        self._note(now, now - self._start, paced_s)
        due = self._start + paced_s
        while (left_s := due - self._clock()) > 0:
            self._sleep(left_s)
        self._due = max(due, now)

    def _note(self, now: float, real_s: float, paced_s: float) -> None:
        """Enter a step's times and warn, once a minute, where too much of them is real."""
        second = math.floor(now)
        while self._spans and self._spans[0].second <= second - _MINUTE_S:
            self._spans.popleft()
        if not self._spans or self._spans[-1].second != second:
            self._spans.append(_Span(second))
        for span in (self._spans[-1], self._total):
            span.real_s += real_s
            span.paced_s += paced_s
        minute_s = sum(span.paced_s for span in self._spans)
        self.compute_share = share = sum(span.real_s for span in self._spans) / minute_s
        is_due = now - self._warned_at >= _MINUTE_S
        if share > _MAX_SHARE and minute_s >= _MIN_PACED_S and is_due:
            self._warned_at = now
            _log.warning(
                "rehearsal: not valid on this machine: computing takes %.0f%% of the paced time "
                "(%.0f%% since the start), of which %.0f%% may be; use fewer replicas or a smaller "
                "model",
                100 * share,
                100 * self._total.real_s / self._total.paced_s,
                100 * _MAX_SHARE,
            )


@dataclass(slots=True)
class _Span:
    """Sums over steps."""

    second: int
    real_s: float = 0.0
    paced_s: float = 0.0
