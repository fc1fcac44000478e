"""Chooses between two numbers of CPU threads by the times of the steps that are run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator

import torch

_TRIAL_STEPS = 8
_FIRST_HOLD, _LAST_HOLD = 8, 128
"""Shortest and longest time for which a choice is kept, in lengths of a trial."""
_WORSE = 1.5
"""Factor by which steps become slower that makes a choice end early."""

_log = logging.getLogger(__name__)


class ThreadChoice:
    """Keeps an engine's steps at the faster of two numbers of threads.

    All threads of a step wait for the slowest. Where another program takes part of a core, a step
    with a thread on every core takes several times as long as one with a thread less; where none
    does, it is the faster one. Both are tried now and then, the less often the longer one of them
    has been the faster.

    Not thread-safe: one thread runs the steps, and torch keeps a number of threads for each.
    """

    def __init__(
        self, few: int, many: int, apply: Callable[[int], None] = torch.set_num_threads
    ) -> None:
        """Begin with a trial.

        Args:
            few: the smaller number.
            many: the larger number.
            apply: sets the number of threads of this thread's later steps.
        """
        self._apply = apply
        self._trials = _choices(few, many)
        self._num = next(self._trials)
        apply(self._num)

    def observe(self, slowness: float) -> None:
        """Note a step's time as a multiple of the expected one, and set the next step's threads."""
        num = self._trials.send(slowness)
        if num != self._num:
            self._num = num
            self._apply(num)


def _choices(few: int, many: int) -> Generator[int, float, None]:
    """Yield each step's number of threads, and take how slow the step was."""
    kept, hold = many, _FIRST_HOLD
    while True:
        found = {}
        for num in (few, many):
            found[num] = yield from _trial(num)
        best = min(found, key=lambda num: found[num])
        if best != kept:
            _log.info("%d threads from now on: steps take %.2f of the time", best, _ratio(found))
        hold = min(2 * hold, _LAST_HOLD) if best == kept else _FIRST_HOLD
        kept = best
        for _ in range(hold):
            slowness = yield from _trial(kept)
            if slowness > _WORSE * found[kept]:
                hold = _FIRST_HOLD
                break


def _trial(num: int) -> Generator[int, float, float]:
    """Run steps with a number of threads, and return how slow they are on average.

    The first one sets up its threads, and the slowest one may have been held up by something else.
    """
    found = [0.0] * _TRIAL_STEPS
    for index in range(_TRIAL_STEPS):
        found[index] = yield num
    counted = sorted(found[1:])[:-1]
    return sum(counted) / len(counted)


def _ratio(found: dict[int, float]) -> float:
    return min(found.values()) / max(found.values())
