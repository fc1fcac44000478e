"""Times steps of synthetic requests, from which the engine's windows are chosen.

The requests' tokens are arbitrary; only the sizes of the steps matter.
"""

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
"""Default number of runs of a step, of which the median is taken."""
_GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of positions that are timed: dense at first, where a larger step may even be faster."""
_DENSE = 64
"""Number of positions up to which the whole grid is timed."""
_SHORT, _LONG = 16, 512
"""Two numbers of cached tokens per row, whose times give the cost of reading one cached token."""


def measure_steps(
    run: Callable[[Sequence[ScheduledRow]], object],
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
    """Measure the seconds of a step over positions and cached tokens.

    Each time is the median of a few runs. The cost of reading a cached token is measured on a full
    batch of rows of one position and of the widest rows, and interpolated for other widths.

    Args:
        run: runs a step and waits for its results.
        pool: a pool whose pages are all free; they are free again afterwards.
        max_num_seqs: most rows of a step.
        max_num_batched_tokens: most positions of a step.
        max_length: most tokens of a row.
        window: most masks of a row.
        widest_row: most positions that a row is timed with; by default the most that a row in mode
            threshold feeds.
        repeats: number of runs of which the median is taken.
        on_progress: called with the number of steps timed so far and of all of them.
    """
    widest = 2 * window + 1 if widest_row is None else widest_row
    max_num_seqs = min(max_num_seqs, pool.num_free // pool.pages_for(widest))
    assert max_num_seqs > 0, "the pool holds a row with its window"
    largest = min(max_num_batched_tokens, max_num_seqs * widest)
    # Longer steps are extrapolated from the last segment, so it must be longer than its noise.
    limit = max(_DENSE, 0.8 * largest)
    grid = [count for count in _GRID if count < largest and count <= limit] + [largest]
    room = min(pool.num_free // max_num_seqs * pool.page_size, max_length) - widest
    short, long = (max(0, min(tokens, room)) for tokens in (_SHORT, _LONG))
    ends = [(count, cached) for count in (max_num_seqs, largest) for cached in (long, short)]
    shapes = [*ends, *((count, short) for count in grid)]
    seconds = []
    for done, (num_positions, num_cached) in enumerate(shapes, start=1):
        num_rows = min(num_positions, max_num_seqs)
        rows = _synthetic_rows(pool, num_positions, num_rows, num_cached, window)
        seconds.append(_median_seconds(run, pool, rows, repeats))
        if on_progress is not None:
            on_progress(done, len(shapes))

    difference = max(max_num_seqs * (long - short), 1)
    narrow_s, wide_s = (max(0.0, seconds[i] - seconds[i + 1]) / difference for i in (0, 2))
    most_cached = max_num_seqs * max(long, 1)
    lines = []
    for num_positions, time_s in zip(grid, seconds[len(ends) :], strict=True):
        width = max(0, num_positions - max_num_seqs) / max(largest - max_num_seqs, 1)
        token_s = narrow_s + (max(wide_s, narrow_s) - narrow_s) * width
        # The short rows' few cached tokens cannot take more than half of the step; limit the noise.
        num_read = min(num_positions, max_num_seqs) * short
        without_reads_s = max(time_s - token_s * num_read, time_s / 2)
        lines.append((without_reads_s, without_reads_s + token_s * most_cached))
    return StepTimes(tuple(grid), (0, most_cached), tuple(lines))


def measure_prefill(
    run: Callable[[Sequence[ScheduledRow]], object],
    pool: PagePool,
    *,
    num_tokens: int,
    max_length: int,
    repeats: int = REPEATS,
) -> float:
    """Measure the prompt tokens per second of steps that feed only beginnings of prompts.

    Args:
        run: runs a step and waits for its results.
        pool: a pool whose pages are all free; they are free again afterwards.
        num_tokens: tokens of a step; fewer if the pool holds fewer.
        max_length: most tokens of a row.
        repeats: number of runs of which the median is taken.
    """
    num_tokens = min(num_tokens, pool.num_free * pool.page_size)
    # One token less per row, because the synthetic rows differ in length by up to two.
    num_rows = math.ceil(num_tokens / max(max_length - 1, 1))
    room = pool.num_free // num_rows * pool.page_size - 1
    num_tokens = min(num_tokens, num_rows * max(room, 1))
    rows = _synthetic_rows(pool, num_tokens, num_rows, num_cached=0, window=0)
    return num_tokens / _median_seconds(run, pool, rows, repeats)


def _synthetic_rows(
    pool: PagePool, num_positions: int, num_rows: int, num_cached: int, window: int
) -> list[ScheduledRow]:
    """Share positions among rows as decoding does: unevenly, and about two of three are masks."""
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


def _median_seconds(
    run: Callable[[Sequence[ScheduledRow]], object],
    pool: PagePool,
    rows: Sequence[ScheduledRow],
    repeats: int,
) -> float:
    """Time a step, then free the pages of its rows."""
    run(rows)  # the first run prepares kernels and buffers for this shape
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run(rows)
        times.append(time.perf_counter() - begin)
    for row in rows:
        pool.release(row.request.pages)
    return statistics.median(times)
