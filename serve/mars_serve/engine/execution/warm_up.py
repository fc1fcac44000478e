"""Times steps of made-up requests, so that windows can be chosen by the cost of a step here."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

from mars_serve.engine.adaptive.step_times import StepTimes
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.pages import PagePool
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import ScheduledRow

REPEATS = 5
"""Default number of timed runs of a step, of which the median is taken."""
_GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Positions of the timed steps, close together at first, where times may even fall."""
_ALWAYS_TIMED = 64
"""Number of positions up to which every step of the grid that fits is timed."""
_SHORT, _LONG = 16, 512
"""Cached tokens of a row in the two kinds of steps that show the cost of reading cached tokens."""

RunStep = Callable[[Sequence[ScheduledRow]], object]
"""Function that runs a step and waits for its results."""


def measure_steps(
    run: RunStep,
    pool: PagePool,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_length: int,
    window: int,
    widest_row: int | None = None,
    repeats: int = REPEATS,
    on_progress: Callable[[int, int], None] | None = None,
) -> StepTimes:
    """Measure the seconds of a step by its positions and cached tokens.

    The cost of reading a cached token is measured in full batches of the narrowest and the widest
    rows, and interpolated between them.

    Args:
        run: runs a step.
        pool: pool without allocated pages; it has none afterwards, either.
        max_num_seqs: most rows of a step.
        max_num_batched_tokens: most positions of a step.
        max_length: most tokens of a request.
        window: most masks of a row.
        widest_row: most positions of a timed row; by default those of a row in mode threshold.
        repeats: timed runs of a step, of which the median is taken.
        on_progress: called with the number of timed steps and the number of all.
    """
    widest = 2 * window + 1 if widest_row is None else widest_row
    max_num_seqs = min(max_num_seqs, pool.num_free // pool.pages_for(widest))
    assert max_num_seqs > 0, "the pool holds a row with its window"
    largest = min(max_num_batched_tokens, max_num_seqs * widest)
    # The times of longer steps are extrapolated from the last piece of the grid, which must
    # therefore be long against the noise of its ends.
    limit = max(_ALWAYS_TIMED, 0.8 * largest)
    positions = [count for count in _GRID if count < largest and count <= limit] + [largest]
    room = min(pool.num_free // max_num_seqs * pool.page_size, max_length) - widest
    short, long = (max(0, min(tokens, room)) for tokens in (_SHORT, _LONG))
    ends = [(count, cached) for count in (max_num_seqs, largest) for cached in (long, short)]
    shapes = [*ends, *((count, short) for count in positions)]
    seconds = []
    for done, (count, cached) in enumerate(shapes, start=1):
        rows = _rows(pool, count, min(count, max_num_seqs), cached, window)
        seconds.append(_time(run, pool, rows, repeats))
        if on_progress is not None:
            on_progress(done, len(shapes))
    difference = max(max_num_seqs * (long - short), 1)
    narrow, wide = (max(0.0, seconds[i] - seconds[i + 1]) / difference for i in (0, 2))
    most = max_num_seqs * max(long, 1)
    table = []
    for count, time_s in zip(positions, seconds[len(ends) :], strict=True):
        share = max(0, count - max_num_seqs) / max(largest - max_num_seqs, 1)
        per_token = narrow + (max(wide, narrow) - narrow) * share
        # The few cached tokens of this step take less than half of it; more would be noise.
        bare = max(time_s - per_token * min(count, max_num_seqs) * short, time_s / 2)
        table.append((bare, bare + per_token * most))
    return StepTimes(tuple(positions), (0, most), tuple(table))


def measure_prefill(
    run: RunStep,
    pool: PagePool,
    *,
    num_tokens: int,
    max_length: int,
    repeats: int = REPEATS,
) -> float:
    """Measure the prompt tokens per second of steps that hold only beginnings of prompts.

    Args:
        run: runs a step.
        pool: see `measure_steps`.
        num_tokens: prompt tokens of a step; fewer if the pool holds fewer.
        max_length: most tokens of a request.
        repeats: timed runs of a step, of which the median is taken.
    """
    num_tokens = min(num_tokens, pool.num_free * pool.page_size)
    # `_rows` makes some rows one position longer than others: one token each is left free.
    num_rows = math.ceil(num_tokens / max(max_length - 1, 1))
    room = pool.num_free // num_rows * pool.page_size - 1
    num_tokens = min(num_tokens, num_rows * max(room, 1))
    return num_tokens / _time(run, pool, _rows(pool, num_tokens, num_rows, 0, 0), repeats)


def _rows(
    pool: PagePool, num_positions: int, num_rows: int, num_cached: int, window: int
) -> list[ScheduledRow]:
    """Make rows that share positions as in decoding: unevenly, about two thirds of them masks."""
    rows = []
    for index in range(num_rows):
        length = num_positions // num_rows + (index < num_positions % num_rows)
        if num_positions >= 2 * num_rows and index ^ 1 < num_rows:
            length += 1 if index % 2 else -1
        num_masks = min(window, 2 * length // 3)
        num_tokens = length - num_masks
        request = Request("warm-up", [0] * (num_cached + num_tokens), DecodingOptions(1))
        request.num_cached = num_cached
        request.pages = pool.allocate(pool.pages_for(num_cached + num_tokens))
        rows.append(ScheduledRow(request, num_tokens, (num_masks,), reads_logits=True))
    return rows


def _time(run: RunStep, pool: PagePool, rows: Sequence[ScheduledRow], repeats: int) -> float:
    """Return the median seconds of a step, and release its pages."""
    run(rows)  # prepares this shape
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run(rows)
        times.append(time.perf_counter() - begin)
    for row in rows:
        pool.release(row.request.pages)
    return statistics.median(times)
