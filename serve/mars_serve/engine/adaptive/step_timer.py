"""Times steps so that they can be compared, although other programs may need the machine too."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mars_serve.engine.pages import PagePool
from mars_serve.engine.scheduled_row import ScheduledRow

_ENOUGH_S = 1.0
"""Seconds after which a step is not run again: what disturbs short runs evens out in longer ones,
and a model whose steps take seconds would take many minutes to start."""
_CONFIRMED = 1.25
"""Factor by which a run may be slower than a step's quickest one and confirm it still."""
_MOST = 3
"""Largest number of rounds while times are in doubt, as a multiple of the usual number."""
_AGAIN = 2
"""Number of those rounds in which long steps are run again, too."""

_log = logging.getLogger(__name__)

Rows = Sequence[ScheduledRow]


def clock_of(device: str) -> Callable[[], float]:
    """Return the clock that times steps on a type of device.

    On a CPU it counts the time that the calling thread runs. Other programs that take its core add
    nothing to that; those that take the core of a thread that it waits for add less than to the
    time of the wall clock, by which a GPU's steps are timed.
    """
    return time.thread_time if device == "cpu" else time.perf_counter


@dataclass(frozen=True)
class StepTimer:
    """Runs steps and times them."""

    run: Callable[[Rows], object]
    """Function that runs a step and waits for its results."""
    pool: PagePool
    """Pool of the steps' pages."""
    clock: Callable[[], float]
    """Function that returns seconds; see `clock_of`."""

    def run_once(self, rows: Rows) -> float:
        """Run a step, release its pages, and return its seconds."""
        begin = self.clock()
        self.run(rows)
        seconds = self.clock() - begin
        for row in rows:
            self.pool.release(row.request.pages)
        return seconds

    def seconds(
        self,
        steps: Sequence[Callable[[], Rows]],
        repeats: int,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[float]:
        """Return the seconds of each step's quickest run, or of its median run on a busy machine.

        Steps take turns, so that a busy time of the machine meets all of them. If some have had a
        quick run and others none, small steps seem to cost more than large ones, or large ones more
        than they do. So rounds go on until every quickest run has been confirmed; if that does not
        happen, medians over the rounds that all steps took part in slow down all of them alike.

        Args:
            steps: functions that make the rows of a step.
            repeats: number of rounds, unless times are in doubt; long steps leave some out.
            on_progress: called with the number of runs so far and the usual number of them.
        """
        runs = [_Runs() for _ in steps]
        for done in range(1, _MOST * repeats + 1):
            are_all_due = repeats < done <= repeats + _AGAIN
            due = [are_all_due or each.spent_s < _ENOUGH_S for each in runs]
            for index, (make_rows, is_due) in enumerate(zip(steps, due, strict=True)):
                if is_due:
                    begin = time.perf_counter()
                    seconds = self.run_once(make_rows())
                    runs[index].add(seconds, time.perf_counter() - begin, is_shared=all(due))
                if on_progress is not None and done <= repeats:
                    on_progress((done - 1) * len(steps) + index + 1, repeats * len(steps))
            if done >= repeats and all(each.is_confirmed for each in runs):
                return [min(each.seconds) for each in runs]
            if done == repeats:
                _log.info("steps take different times, so the machine is busy; timing them again")
        return [statistics.median(each.shared) for each in runs]


@dataclass
class _Runs:
    """Runs of a step."""

    seconds: list[float] = field(default_factory=list)
    """Seconds of each run."""
    shared: list[float] = field(default_factory=list)
    """Seconds of the runs in rounds that all steps took part in."""
    spent_s: float = 0.0
    """Seconds of all runs by the wall clock."""

    def add(self, seconds: float, wall_s: float, *, is_shared: bool) -> None:
        """Keep a run; ``is_shared`` says whether all steps took part in its round."""
        self.seconds.append(seconds)
        self.spent_s += wall_s
        if is_shared:
            self.shared.append(seconds)

    @property
    def is_confirmed(self) -> bool:
        """Whether the quickest run was no exception, and the shared rounds were as quick."""
        most_s = _CONFIRMED * min(self.seconds)
        return all(sorted(each)[:2][-1] <= most_s for each in (self.seconds, self.shared))
