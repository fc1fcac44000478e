"""Times steps of made-up requests, so that windows can be chosen by what they cost here.

Knows the runner only as a function, and nothing of what the model computes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

from mars_serve.engine.adaptive.window import StepTimes
from mars_serve.engine.pages import PagePool
from mars_serve.engine.request import DecodingOptions, Request
from mars_serve.engine.scheduler import Work

REPEATS = 5
"""Runs of a step that a median is taken of, unless more are asked for."""
_GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Positions that are timed: closely at first, where a step's time may even fall as they grow."""
_CLOSE = 64
"""Positions up to which all of the grid is timed."""
_SHORT, _LONG = 16, 512
"""Stored tokens of each row, by which the cost of reading them is told apart."""


def measure_steps(
    run: Callable[[Sequence[Work]], object],
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
    """Seconds of a step over (positions, stored tokens), each the median of a few runs.

    What reading a stored token costs is measured on a full batch, for rows of one place and for
    the widest ones, and taken to lie between for others.

    Args:
        run: runs a step; waits for its results.
        pool: with all its pages free; they are free again afterwards.
        max_num_seqs: rows of a step at the most.
        max_num_batched_tokens: positions of a step at the most.
        max_length: tokens of a row at the most.
        window: masks of a row at the most.
        widest_row: positions that a row is timed with at the most; by default those of a row of
            mode threshold.
        repeats: runs that a median is taken of.
        on_progress: called with the steps that are done and their number.
    """
    widest = 2 * window + 1 if widest_row is None else widest_row
    max_num_seqs = min(max_num_seqs, pool.num_free // pool.pages_for(widest))
    assert max_num_seqs > 0, "the pool holds a row with its window"
    largest = min(max_num_batched_tokens, max_num_seqs * widest)
    # the last piece is what longer steps are judged by: it must be longer than its noise
    limit = max(_CLOSE, 0.8 * largest)
    positions = [places for places in _GRID if places < largest and places <= limit] + [largest]
    room = min(pool.num_free // max_num_seqs * pool.page_size, max_length) - widest
    short, long = (max(0, min(tokens, room)) for tokens in (_SHORT, _LONG))
    ends = [(places, stored) for places in (max_num_seqs, largest) for stored in (long, short)]
    shapes = [*ends, *((places, short) for places in positions)]
    seconds = []
    for done, (places, stored) in enumerate(shapes, start=1):
        works = _works(pool, places, min(places, max_num_seqs), stored, window)
        seconds.append(_time(run, pool, works, repeats))
        if on_progress is not None:
            on_progress(done, len(shapes))
    difference = max(max_num_seqs * (long - short), 1)
    narrow, wide = (max(0.0, seconds[i] - seconds[i + 1]) / difference for i in (0, 2))
    most = max_num_seqs * max(long, 1)
    rows = []
    for places, time_s in zip(positions, seconds[len(ends) :], strict=True):
        share = max(0, places - max_num_seqs) / max(largest - max_num_seqs, 1)
        per_token = narrow + (max(wide, narrow) - narrow) * share
        # noise has limits: half of a step is more than its few stored tokens take
        bare = max(time_s - per_token * min(places, max_num_seqs) * short, time_s / 2)
        rows.append((bare, bare + per_token * most))
    return StepTimes(tuple(positions), (0, most), tuple(rows))


def measure_prefill(
    run: Callable[[Sequence[Work]], object],
    pool: PagePool,
    *,
    num_tokens: int,
    max_length: int,
    repeats: int = REPEATS,
) -> float:
    """Prompt tokens a second of steps that hold nothing but the beginnings of prompts.

    Args:
        run: see `measure_steps`.
        pool: see `measure_steps`.
        num_tokens: of a step; fewer where the pool holds fewer.
        max_length: tokens of a row at the most.
        repeats: runs that a median is taken of.
    """
    num_tokens = min(num_tokens, pool.num_free * pool.page_size)
    # one less each: `_works` spreads positions unevenly
    num_rows = math.ceil(num_tokens / max(max_length - 1, 1))
    room = pool.num_free // num_rows * pool.page_size - 1
    num_tokens = min(num_tokens, num_rows * max(room, 1))
    return num_tokens / _time(run, pool, _works(pool, num_tokens, num_rows, 0, 0), repeats)


def _works(pool: PagePool, places: int, num_rows: int, num_cached: int, window: int) -> list[Work]:
    """Rows that share ``places`` positions as decoding does: unevenly, about two of three masks."""
    works = []
    for row in range(num_rows):
        length = places // num_rows + (row < places % num_rows)
        if places >= 2 * num_rows and row ^ 1 < num_rows:
            length += 1 if row % 2 else -1
        num_masks = min(window, 2 * length // 3)
        num_tokens = length - num_masks
        request = Request("warm-up", [0] * (num_cached + num_tokens), DecodingOptions(1))
        request.num_cached = num_cached
        request.pages = pool.allocate(pool.pages_for(num_cached + num_tokens))
        works.append(Work(request, num_tokens, (num_masks,), reads_logits=True))
    return works


def _time(
    run: Callable[[Sequence[Work]], object], pool: PagePool, works: Sequence[Work], repeats: int
) -> float:
    """Median seconds of a step, whose pages are free afterwards."""
    run(works)  # prepares this shape
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run(works)
        times.append(time.perf_counter() - begin)
    for work in works:
        pool.release(work.request.pages)
    return statistics.median(times)
