"""Step times and prompt speed, as an engine measures them when it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

from mars_serve.engine.adaptive.step_times import StepTimes
from mars_serve.engine.execution.warm_up import StepSizes, measure_prefill, measure_steps
from mars_serve.engine.pages import PagePool
from mars_serve.engine.scheduled_row import ScheduledRow


def pool_and_run(
    num_pages: int = 200,
) -> tuple[PagePool, list[list[ScheduledRow]], Callable[[Sequence[ScheduledRow]], object]]:
    steps: list[list[ScheduledRow]] = []
    return PagePool(num_pages, 4), steps, lambda works: steps.append(list(works))


@pytest.mark.parametrize(
    ("num_pages", "num_positions", "max_length", "num_rows"),
    [(200, 128, 1000, 1), (200, 128, 65, 2), (200, 128, 64, 3), (200, 128, 20, 7), (3, 11, 99, 1)],
)
def test_prefill_steps_are_as_full_of_prompts_as_the_pool_allows(
    num_pages: int, num_positions: int, max_length: int, num_rows: int
) -> None:
    pool, steps, run = pool_and_run(num_pages)
    rate = measure_prefill(run, pool, num_tokens=128, max_length=max_length, repeats=3)
    assert rate > 0
    assert len(steps) == 4
    for works in steps:
        assert len(works) == num_rows
        assert sum(work.num_positions for work in works) == num_positions
        assert all(work.num_masks == 0 and work.request.num_cached == 0 for work in works)
        assert all(work.num_tokens <= max_length for work in works)
    assert pool.num_free == pool.num_pages


def test_steps_are_timed_up_to_the_widest_row() -> None:
    pool, steps, run = pool_and_run()
    times = measure_steps(
        run,
        pool,
        StepSizes(4, 1000, max_length=100, window=4, widest_row=25),
        repeats=2,
    )
    assert times.positions[-1] == 100
    assert times.positions[-2] == 64  # not 96, which is too close to 100 to be told apart
    assert {len(works) for works in steps} == {1, 2, 3, 4}
    assert max(sum(work.num_positions for work in works) for works in steps) == 100
    assert len(steps) == 3 * (4 + len(times.positions))
    assert pool.num_free == pool.num_pages


@pytest.mark.parametrize(
    ("step_s", "num_runs"), [(0.001, 6), (0.15, 6), (0.25, 4), (0.5, 2), (0.99, 2), (3.0, 1)]
)
def test_long_steps_are_timed_less_often(
    monkeypatch: pytest.MonkeyPatch, step_s: float, num_runs: int
) -> None:
    pool, steps, note = pool_and_run()
    now_s = 0.0

    def run(rows: Sequence[ScheduledRow]) -> None:
        nonlocal now_s
        note(rows)
        now_s += step_s

    clock = SimpleNamespace(perf_counter=lambda: now_s)
    monkeypatch.setattr("mars_serve.engine.execution.warm_up.time", clock)
    times = measure_steps(run, pool, StepSizes(4, 1000, max_length=100, window=4), repeats=5)
    assert len(steps) == num_runs * (4 + len(times.positions))
    assert times.at(8, 0) == pytest.approx(step_s)
    assert pool.num_free == pool.num_pages


@pytest.mark.parametrize(("speed", "holds"), [(1.0, True), (1.3, True), (2.0, False), (0.5, False)])
def test_known_times_are_taken_only_if_they_are_reproduced(
    monkeypatch: pytest.MonkeyPatch, speed: float, holds: bool
) -> None:
    pool, steps, note = pool_and_run()
    now_s = 0.0

    def run(rows: Sequence[ScheduledRow]) -> None:
        nonlocal now_s
        note(rows)
        now_s += speed * (0.01 + 1e-4 * sum(row.num_positions for row in rows))

    clock = SimpleNamespace(perf_counter=lambda: now_s)
    monkeypatch.setattr("mars_serve.engine.execution.warm_up.time", clock)
    sizes = StepSizes(4, 1000, max_length=100, window=4, widest_row=25)
    grid = (1, 64, 100)
    line = tuple((0.01 + 1e-4 * count, 0.01 + 1e-4 * count) for count in grid)
    known = StepTimes(grid, (0, 400), line)
    times = measure_steps(run, pool, sizes, known=known)
    assert (times is known) == holds
    assert max(sum(row.num_positions for row in rows) for rows in steps) == 100
    assert pool.num_free == pool.num_pages
    assert times.at(32, 0) == pytest.approx((1 if holds else speed) * 0.0132)


@pytest.mark.parametrize("masks_apart", [False, True])
@pytest.mark.parametrize("mask_s", [0.0, 0.009])
def test_what_masks_add_to_a_step_is_told_apart_on_demand(
    monkeypatch: pytest.MonkeyPatch, mask_s: float, masks_apart: bool
) -> None:
    pool, _, _ = pool_and_run()
    now_s = 0.0

    def run(rows: Sequence[ScheduledRow]) -> None:
        nonlocal now_s
        now_s += 0.01 + 1e-4 * sum(row.num_positions for row in rows)
        now_s += mask_s * any(row.num_masks for row in rows)

    clock = SimpleNamespace(perf_counter=lambda: now_s)
    monkeypatch.setattr("mars_serve.engine.execution.warm_up.time", clock)
    sizes = StepSizes(4, 1000, 100, window=4, widest_row=25, masks_apart=masks_apart)
    times = measure_steps(run, pool, sizes)
    assert times.mask_s == pytest.approx(masks_apart * mask_s)
    assert times.at(4, 0) == pytest.approx(0.0104)  # a position for each row, so none is a mask
    without_s = 0.0132
    assert times.at(32, 0, True) == pytest.approx(without_s + mask_s)
    assert times.at(32, 0) == pytest.approx(without_s + (0 if masks_apart else mask_s))
    again = measure_steps(run, pool, sizes, known=times)
    assert again is times
    assert pool.num_free == pool.num_pages


def test_steps_too_small_for_masks_are_timed_without_them() -> None:
    pool, steps, run = pool_and_run()
    sizes = StepSizes(4, max_num_batched_tokens=3, max_length=100, window=4, masks_apart=True)
    assert measure_steps(run, pool, sizes).mask_s == 0
    assert not any(row.num_masks for rows in steps for row in rows)
    assert pool.num_free == pool.num_pages
