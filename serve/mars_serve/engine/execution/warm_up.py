"""Times steps of made-up requests, so that windows can be chosen by the cost of a step here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from mars_autoscale.model.step_times import StepTimes
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.memory import Memory
from mars_serve.engine.pages import PagePool
from mars_serve.engine.request import Draft, Request
from mars_serve.engine.scheduled_row import ScheduledRow

REPEATS = 6
"""Default number of runs of a step, of which the quickest counts; long steps have fewer."""
_ENOUGH_S = 0.5
"""Seconds of a step's runs, all taken to be as short as the quickest, after which it is not run
again. With the two dozen steps of the grid, a warm-up on a quiet machine takes at most some twelve
seconds more than two runs of each."""
_GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Positions of the timed steps, close together at first, where times may even fall."""
_WELL_TIMED = 64
"""Positions that timed steps reach where there is room, even if rows in mode threshold have fewer,
since rows in mode exact have as many."""
_SHORT, _LONG = 16, 512
"""Cached tokens of a row in the two kinds of steps that show the cost of reading cached tokens."""
_FEW = 4
"""Positions of the steps that show what masks add to a step."""
_MOST_OVER = 2.0
"""Times as long as several smaller steps of as many positions that a step is taken to last at most.
A longer time is that of a run that was held up, and long steps may run once only."""
_PROMPT = 128
"""Most positions of the step of a prompt."""
_IN_TURN = 2
"""Runs of the same rows one after the other. In the first, libraries prepare themselves for
the step's sizes."""
_TOO_LONG_S = 1.0
"""Seconds of a step after which it is not run again at once."""

Rows = Sequence[ScheduledRow]


def clock_of(device: str) -> Callable[[], float]:
    """Return the clock that times steps on a type of device.

    On a CPU it counts the time that the calling thread runs, to which other programs that take its
    core add nothing.
    """
    return time.thread_time if device == "cpu" else time.perf_counter


@dataclass(frozen=True)
class StepTimer:
    """Runs steps and times them."""

    run: Callable[[Rows], object]
    """Function that runs a step and waits for its results."""
    memory: Memory
    clock: Callable[[], float]
    """Function that returns seconds; see `clock_of`."""

    def seconds(
        self,
        steps: Sequence[Callable[[], Rows]],
        repeats: int,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[float]:
        """Return the seconds of the quickest run of each of ``steps``, functions that make rows.

        Steps take turns, so that a busy time of the machine meets all of them. Long ones leave out
        some of ``repeats`` runs; ``on_progress`` gets the number of turns so far, those left out
        included, and that of all.
        """
        taken: list[list[float]] = [[] for _ in steps]
        turns = range(0, repeats, _IN_TURN)
        for turn, done in enumerate(turns):
            for index, make_rows in enumerate(steps):
                if done * min(taken[index], default=0.0) < _ENOUGH_S:
                    taken[index] += self._run(make_rows(), min(_IN_TURN, repeats - done))
                if on_progress is not None:
                    on_progress(turn * len(steps) + index + 1, len(turns) * len(steps))
        return [min(each) for each in taken]

    def _run(self, rows: Rows, most: int) -> list[float]:
        taken = list[float]()
        while len(taken) < most and sum(taken) < _TOO_LONG_S:
            begin = self.clock()
            self.run(rows)
            taken.append(self.clock() - begin)
        for row in rows:
            self.memory.release(row.request)
        return taken


@dataclass(frozen=True)
class StepSizes:
    """Sizes of the steps that an engine can run, from which the timed ones are chosen."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_length: int
    window: int
    widest_row: int | None = None
    """Most positions of a timed row; by default those of a row in mode threshold, or more where
    steps would not reach 64 positions."""
    masks_apart: bool = False
    """Whether to tell apart what a step takes longer as soon as it feeds a mask, as it does with an
    adapter. Otherwise times are those of steps as they usually are, with masks from the size on at
    which rows have more than one position."""


def measure_steps(
    timer: StepTimer,
    sizes: StepSizes,
    *,
    repeats: int = REPEATS,
    on_progress: Callable[[int, int], None] | None = None,
) -> StepTimes:
    """Measure the seconds of a step by its positions and cached tokens.

    The memory of ``timer`` has no allocated pages, before and afterwards. The cost of reading a
    cached token is measured in full batches of the narrowest and the widest rows, and interpolated
    between them, and what reading logits costs in a prompt, of which one position is read; half of
    the prompt bounds what the whole takes. The quickest of ``repeats`` runs, fewer of long steps,
    counts.
    """
    memory = timer.memory
    grid = _Grid.of(memory.pool, sizes)
    num_rows, largest, short, long = grid.num_rows, grid.largest, grid.short, grid.long
    ends = [(num_rows, long), (num_rows, short), (largest, long)]
    steps = [
        partial(_rows, memory, count, min(count, num_rows), cached, sizes.window)
        for count, cached in [*ends, *((count, short) for count in grid.positions)]
    ]
    num_read = min(_PROMPT, largest, sizes.max_length, memory.pool.num_free * memory.pool.page_size)
    prompts = [partial(_rows, memory, count, 1, 0, 0) for count in (-(-num_read // 2), num_read)]
    *seconds, half_s, prompt_s = timer.seconds([*steps, *prompts], repeats, on_progress)
    difference = max(num_rows * (long - short), 1)
    # The last step of the grid is the widest with few cached tokens.
    narrow, wide = (max(0.0, seconds[i] - seconds[j]) / difference for i, j in ((0, 1), (2, -1)))
    most = num_rows * max(long, 1)
    mask_s = _mask_seconds(timer, grid, sizes.window, repeats) if sizes.masks_apart else 0.0
    # Other processes may hold up all runs of a step. It takes no longer than one of more positions.
    bounded = [*accumulate(reversed(seconds[len(ends) :]), min)][::-1]
    table, position_s = [], math.inf
    for count, time_s in zip(grid.positions, bounded, strict=True):
        time_s = min(time_s, _MOST_OVER * count * position_s)
        position_s = min(position_s, time_s / count)
        share = max(0, count - num_rows) / max(largest - num_rows, 1)
        if count > num_rows:  # some row has masks, see `_rows`
            time_s = max(time_s - mask_s, time_s / 2)
        per_token = narrow + (max(wide, narrow) - narrow) * share
        # The few cached tokens of this step take less than half of it; more would be noise.
        bare = max(time_s - per_token * min(count, num_rows) * short, time_s / 2)
        table.append((bare, bare + per_token * most))
    times = StepTimes(grid.positions, (0, most), tuple(table), mask_s)
    return replace(times, unread=min(max(prompt_s, half_s) / float(times.at(num_read, 0)), 1.0))


def _mask_seconds(timer: StepTimer, grid: _Grid, window: int, repeats: int) -> float:
    """Return the seconds that a small step takes longer if some of its positions are masks."""
    count = min(_FEW, grid.largest // grid.num_rows)  # a row that long has room
    if count < 2:  # no step has a mask
        return 0.0
    steps = [partial(_rows, timer.memory, count, 1, grid.short, masks) for masks in (window, 0)]
    with_masks_s, without_s = timer.seconds(steps, repeats)
    return max(0.0, with_masks_s - without_s)


@dataclass(frozen=True)
class _Grid:
    """Positions of the timed steps, and the cached tokens of their rows."""

    num_rows: int
    largest: int
    positions: tuple[int, ...]
    short: int
    long: int

    @classmethod
    def of(cls, pool: PagePool, sizes: StepSizes) -> _Grid:
        widest = 2 * sizes.window + 1 if sizes.widest_row is None else sizes.widest_row
        num_rows = min(sizes.max_num_seqs, pool.num_free // pool.pages_for(widest))
        assert num_rows > 0, "the pool holds a row with its window"
        room = min(pool.num_free // num_rows * pool.page_size, sizes.max_length)
        if sizes.widest_row is None:
            widest = max(widest, min(_WELL_TIMED // num_rows, room // 2))
        largest = min(sizes.max_num_batched_tokens, num_rows * widest)
        # The times of longer steps are extrapolated from the last piece of the grid, which must
        # therefore be long against the noise of its ends.
        positions = [count for count in _GRID if count <= 0.8 * largest] + [largest]
        room -= widest
        short, long = (max(0, min(tokens, room)) for tokens in (_SHORT, _LONG))
        return cls(num_rows, largest, tuple(positions), short, long)


def measure_prefill(
    timer: StepTimer,
    *,
    num_tokens: int,
    max_length: int,
    repeats: int = REPEATS,
) -> float:
    """Measure the prompt tokens per second, by the wall clock, of steps with prompts alone.

    A step has ``num_tokens``, or as many as the pool holds, of requests of ``max_length`` at most.
    The quickest of ``repeats`` runs, fewer of a long step, counts.
    """
    pool = timer.memory.pool
    num_tokens = min(num_tokens, pool.num_free * pool.page_size)
    # `_rows` makes some rows one position longer than others: one token each is left free.
    num_rows = math.ceil(num_tokens / max(max_length - 1, 1))
    room = pool.num_free // num_rows * pool.page_size - 1
    num_tokens = min(num_tokens, num_rows * max(room, 1))
    step = partial(_rows, timer.memory, num_tokens, num_rows, 0, 0)
    return num_tokens / replace(timer, clock=time.perf_counter).seconds([step], repeats)[0]


def _rows(
    memory: Memory, num_positions: int, num_rows: int, num_cached: int, window: int
) -> list[ScheduledRow]:
    """Make rows that share positions, unevenly, as in mode exact: one token, and as many drafts as
    masks, whose logits are all read. Without a ``window`` all positions are tokens.
    """
    rows = []
    for index in range(num_rows):
        length = num_positions // num_rows + (index < num_positions % num_rows)
        if num_positions >= 2 * num_rows and index ^ 1 < num_rows:
            length += 1 if index % 2 else -1
        num_drafts, num_masks = min(window, (length - 1) // 2), min(window, length // 2)
        num_tokens = length - num_drafts - num_masks
        options = DecodingOptions(1, Mode.EXACT)
        request = Request("warm-up", [0] * (num_cached + num_tokens), options)
        request.num_cached, request.drafts = num_cached, [Draft(0, 0.5)] * num_drafts
        masks = (*[0] * num_drafts, num_masks)
        rows.append(ScheduledRow(request, num_tokens, masks, reads_logits=True))
        assert memory.reserve(rows[-1]), "the pool holds the rows"
    return rows
