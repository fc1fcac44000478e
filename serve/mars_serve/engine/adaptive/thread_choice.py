"""Chooses between two numbers of CPU threads by the times of the steps that are run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator

import torch

from mars_serve.engine.adaptive.step_times import StepTimes

_TRIAL_STEPS, _FEWEST_STEPS = 8, 3
_FIRST_HOLD, _LAST_HOLD = 8, 128
"""Shortest and longest time for which a choice is kept, in lengths of a trial."""
_WORSE, _MUCH_WORSE = 1.25, 1.5
"""Factors by which steps must be slower for the smaller number, and to end a trial early. Trials of
a virtual machine's steps differ by 15% though nothing has changed."""

_log = logging.getLogger(__name__)


class ThreadChoice:
    """Keeps an engine at the larger of two numbers of threads unless steps are slow with it.

    All threads of a step wait for the slowest. Where another program takes part of a core, a step
    with a thread on every core takes several times as long as one with a thread less; where none
    does, it is the faster one. Both are tried now and then, the less often the longer a choice has
    held.

    Not thread-safe: one thread runs the steps, and torch keeps a number of threads for each.
    """

    def __init__(
        self,
        times: StepTimes,
        few: int,
        many: int,
        apply: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        """Begin with a trial.

        Args:
            times: expected times of steps, to which measured ones are compared.
            few: the smaller number.
            many: the larger number.
            apply: sets the number of threads of this thread's later steps.
        """
        self._times = times
        self._apply = apply
        self._trials = _choices(few, many)
        self._num = next(self._trials)
        apply(self._num)

    def observe_step(
        self, positions: int, cached_tokens: int, seconds: float, *, has_masks: bool
    ) -> None:
        """Note the seconds of a step, and set the next one's threads."""
        num = self._trials.send(seconds / self._times.at(positions, cached_tokens, has_masks))
        if num != self._num:
            self._num = num
            self._apply(num)


def _choices(few: int, many: int) -> Generator[int, float, None]:
    """Yield each step's number of threads, and take how slow the step was."""
    kept, hold = many, _FIRST_HOLD
    while True:
        found = {few: (yield from _trial(few, float("inf")))}
        found[many] = yield from _trial(many, _MUCH_WORSE * found[few])
        best = few if found[many] > _WORSE * found[few] else many
        hold = min(2 * hold, _LAST_HOLD) if best == kept else _FIRST_HOLD
        if best != kept:
            ratio = found[many] / found[few]
            _log.info("%d threads: with %d, steps take %.2f of the time", best, many, ratio)
        kept, limit = best, _MUCH_WORSE * found[best]
        for _ in range(hold):
            if (yield from _trial(kept, limit)) > limit:
                hold = _FIRST_HOLD
                break


def _trial(num: int, limit: float) -> Generator[int, float, float]:
    """Run steps with a number of threads, and return how slow they are on average.

    The first one sets up its threads, and the slowest one may have been held up by something else.
    A trial whose steps are all slower than ``limit`` is short.
    """
    found: list[float] = [(yield num)]
    while len(found) < _TRIAL_STEPS:
        slowness = yield num
        found.append(slowness)
        if len(found) >= _FEWEST_STEPS and min(found[1:]) > limit:
            break
    counted = sorted(found[1:])[:-1]
    return sum(counted) / len(counted)
