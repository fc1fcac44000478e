"""Step times and prompt speed, as an engine measures them when it starts."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace

import pytest

from mars_serve.engine.adaptive.step_timer import StepTimer, clock_of
from mars_serve.engine.adaptive.step_times import StepTimes
from mars_serve.engine.execution.warm_up import StepSizes, measure_prefill, measure_steps
from mars_serve.engine.pages import PagePool
from mars_serve.engine.scheduled_row import ScheduledRow

Cost = Callable[[Sequence[ScheduledRow]], float]
"""Function that returns the seconds that a step of some rows takes."""


class Machine:
    """Pretends to run steps, on clocks of its own."""

    def __init__(self, cost: Cost, num_pages: int = 200) -> None:
        self.pool = PagePool(num_pages, 4)
        self.cost = cost
        self.steps: list[list[ScheduledRow]] = []
        self.wall_s = self.cpu_s = 0.0
        self.busy: Container[int] = ()
        """Steps, counted from 0, that take four times as long by the wall clock."""

    def perf_counter(self) -> float:
        return self.wall_s

    def thread_time(self) -> float:
        return self.cpu_s

    def run(self, rows: Sequence[ScheduledRow]) -> None:
        self.cpu_s += self.cost(rows)
        self.wall_s += self.cost(rows) * (4 if len(self.steps) in self.busy else 1)
        self.steps.append(list(rows))

    def timer(self, device: str = "cuda") -> StepTimer:
        return StepTimer(self.run, self.pool, clock_of(device))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    """Return a function that makes a machine whose clock the warm-up reads."""

    def make(cost: Cost, num_pages: int = 200) -> Machine:
        made = Machine(cost, num_pages)
        for module in ("adaptive.step_timer", "execution.warm_up"):
            monkeypatch.setattr(f"mars_serve.engine.{module}.time", made)
        return made

    return make


def line_s(rows: Sequence[ScheduledRow]) -> float:
    """Return the seconds of a step that takes longer with each position."""
    return 0.001 + 1e-5 * sum(row.num_positions for row in rows)


@pytest.mark.parametrize(
    ("num_pages", "num_positions", "max_length", "num_rows"),
    [(200, 128, 1000, 1), (200, 128, 65, 2), (200, 128, 64, 3), (200, 128, 20, 7), (3, 11, 99, 1)],
)
def test_prefill_steps_are_as_full_of_prompts_as_the_pool_allows(
    machine: Callable[..., Machine],
    num_pages: int,
    num_positions: int,
    max_length: int,
    num_rows: int,
) -> None:
    ours = machine(line_s, num_pages)
    rate = measure_prefill(ours.timer(), num_tokens=128, max_length=max_length, repeats=3)
    assert rate == pytest.approx(num_positions / (0.001 + 1e-5 * num_positions))
    assert len(ours.steps) == 3
    for works in ours.steps:
        assert len(works) == num_rows
        assert sum(work.num_positions for work in works) == num_positions
        assert all(work.num_masks == 0 and work.request.num_cached == 0 for work in works)
        assert all(work.num_tokens <= max_length for work in works)
    assert ours.pool.num_free == ours.pool.num_pages


def test_steps_are_timed_up_to_the_widest_row(machine: Callable[..., Machine]) -> None:
    ours = machine(line_s)
    sizes = StepSizes(4, 1000, max_length=100, window=4, widest_row=25)
    times = measure_steps(ours.timer(), sizes, repeats=3)
    assert times.positions[-1] == 100
    assert times.positions[-2] == 64  # not 96, which is too close to 100 to be told apart
    assert {len(works) for works in ours.steps} == {1, 2, 3, 4}
    assert max(sum(work.num_positions for work in works) for works in ours.steps) == 100
    assert len(ours.steps) == 3 * (4 + len(times.positions))
    assert ours.pool.num_free == ours.pool.num_pages


@pytest.mark.parametrize(
    ("step_s", "num_runs"), [(0.001, 5), (0.19, 5), (0.3, 4), (0.5, 2), (0.99, 2), (3.0, 1)]
)
def test_long_steps_are_timed_less_often(
    machine: Callable[..., Machine], step_s: float, num_runs: int
) -> None:
    ours, seen = machine(lambda _: step_s), list[tuple[int, int]]()
    sizes = StepSizes(4, 1000, max_length=100, window=4)
    times = measure_steps(
        ours.timer(), sizes, repeats=5, on_progress=lambda *each: seen.append(each)
    )
    num_steps = 4 + len(times.positions)
    assert len(ours.steps) == num_runs * num_steps
    assert seen == [(done + 1, 5 * num_steps) for done in range(5 * num_steps)]
    assert times.at(8, 0) == pytest.approx(step_s)
    assert ours.pool.num_free == ours.pool.num_pages


SIZES = StepSizes(4, 1000, max_length=100, window=4, widest_row=25)
NUM_STEPS = 4 + 13
"""Steps of each round with `SIZES`."""


def slowdowns(times: StepTimes, scale: float) -> list[float]:
    """Return how much longer steps seem to take than `line_s` times ``scale``."""
    line = [scale * (0.001 + 1e-5 * count) for count in times.positions]
    return [times.at(count, 0) / s for count, s in zip(times.positions, line, strict=True)]


@pytest.mark.parametrize("scale", [1, 10])
@pytest.mark.parametrize("end", [0.5, 1.0, 3.3, 4.9, 5.0, 5.4, 5.98])
@pytest.mark.parametrize("begin", [0.0, 0.3, 1.0, 2.7])
def test_a_machine_that_is_busy_for_some_rounds_spoils_no_time(
    machine: Callable[..., Machine], begin: float, end: float, scale: int
) -> None:
    ours = machine(lambda rows: scale * line_s(rows))
    ours.busy = range(int(begin * NUM_STEPS), int(end * NUM_STEPS))
    times = measure_steps(ours.timer(), SIZES, repeats=6)
    assert slowdowns(times, scale) == pytest.approx([1.0] * (NUM_STEPS - 4))


@pytest.mark.parametrize("begin", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("end", [1.6, 2.4])
def test_long_steps_that_were_all_disturbed_are_run_again(
    machine: Callable[..., Machine], begin: float, end: float
) -> None:
    """Small ones run more often, and in some of their runs nothing disturbs them."""
    ours = machine(lambda rows: 0.05 + 0.005 * sum(row.num_positions for row in rows))
    ours.busy = range(int(begin * NUM_STEPS), int(end * NUM_STEPS))
    times = measure_steps(ours.timer(), SIZES, repeats=6)
    for positions in times.positions:
        assert times.at(positions, 0) == pytest.approx(0.05 + 0.005 * positions)


def short_or_long_s(rows: Sequence[ScheduledRow]) -> float:
    """Return the seconds of a step: a large one that is disturbed runs once in the usual rounds."""
    return 0.02 if sum(row.num_positions for row in rows) <= 8 else 0.5


NUM_SHORT = 8
"""Steps of a round that are short by `short_or_long_s`."""


@pytest.mark.parametrize("is_disturbed_again", [False, True])
def test_long_steps_are_not_compared_with_rounds_that_they_miss(
    machine: Callable[..., Machine], is_disturbed_again: bool
) -> None:
    ours = machine(short_or_long_s)
    later = NUM_STEPS + 5 * NUM_SHORT  # from here on, all steps are run again
    again = range(later, later + 2 * NUM_STEPS) if is_disturbed_again else ()
    ours.busy = {*range(NUM_STEPS), *again}
    times = measure_steps(ours.timer(), SIZES, repeats=6)
    slower = 4 if is_disturbed_again else 1
    assert times.at(4, 0) == pytest.approx(slower * 0.02)
    assert times.at(32, 0) == pytest.approx(slower * 0.5)


def test_a_busy_machine_does_not_prolong_a_start(machine: Callable[..., Machine]) -> None:
    ours = machine(lambda rows: 100 * line_s(rows))  # .1 to .2 s, and four times that
    ours.busy = range(10**9)
    measure_steps(ours.timer("cpu"), SIZES, repeats=6)
    assert ours.wall_s < NUM_STEPS * (1 + 0.8)


@pytest.mark.parametrize("scale", [1, 100, 1000])
@pytest.mark.parametrize("busy", [(0, 0.5), (0.3, 1.2), (0.9, 9), (2.5, 99), (0, 99)])
def test_on_a_cpu_other_programs_add_nothing(
    machine: Callable[..., Machine], busy: tuple[float, float], scale: int
) -> None:
    ours = machine(lambda rows: scale * line_s(rows))
    ours.busy = range(*(int(each * NUM_STEPS) for each in busy))
    times = measure_steps(ours.timer("cpu"), SIZES, repeats=6)
    assert slowdowns(times, scale) == pytest.approx([1.0] * (NUM_STEPS - 4))
    assert len(ours.steps) <= 6 * NUM_STEPS


@pytest.mark.parametrize("begin", [0.0, 0.3, 0.7, 1.0])
def test_times_of_a_busy_machine_are_those_of_a_slower_one(
    machine: Callable[..., Machine], begin: float, caplog: pytest.LogCaptureFixture
) -> None:
    ours = machine(line_s)
    ours.busy = range(int(begin * NUM_STEPS), 10**9)
    with caplog.at_level("INFO"):
        times = measure_steps(ours.timer(), SIZES, repeats=6)
    for positions in times.positions:
        assert times.at(positions, 0) == pytest.approx(4 * (0.001 + 1e-5 * positions))
    assert len(ours.steps) == NUM_STEPS * (18 if begin else 6)
    assert ("machine is busy" in caplog.text) == bool(begin)


def test_long_steps_are_compared_with_small_ones_of_the_same_rounds(
    machine: Callable[..., Machine],
) -> None:
    ours = machine(lambda rows: 10 * sum(row.num_positions for row in rows) / 1000)
    ours.busy = range(NUM_STEPS, 10**9)  # the longest steps, of 1 s, miss some rounds
    times = measure_steps(ours.timer(), SIZES, repeats=6)
    for positions in times.positions:
        assert times.at(positions, 0) == pytest.approx(4 * 0.01 * positions)


@pytest.mark.parametrize(("speed", "holds"), [(1.0, True), (1.3, True), (2.0, False), (0.5, False)])
def test_known_times_are_taken_only_if_they_are_reproduced(
    machine: Callable[..., Machine], speed: float, holds: bool
) -> None:
    ours = machine(lambda rows: speed * 10 * line_s(rows))
    grid = (1, 64, 100)
    line = tuple((0.01 + 1e-4 * count, 0.01 + 1e-4 * count) for count in grid)
    known = StepTimes(grid, (0, 400), line)
    times = measure_steps(ours.timer(), SIZES, known=known)
    assert (times is known) == holds
    assert max(sum(row.num_positions for row in rows) for rows in ours.steps) == 100
    assert ours.pool.num_free == ours.pool.num_pages
    assert times.at(32, 0) == pytest.approx((1 if holds else speed) * 0.0132)


@pytest.mark.parametrize("masks_apart", [False, True])
@pytest.mark.parametrize("mask_s", [0.0, 0.009])
def test_what_masks_add_to_a_step_is_told_apart_on_demand(
    machine: Callable[..., Machine], mask_s: float, masks_apart: bool
) -> None:
    ours = machine(lambda rows: 10 * line_s(rows) + mask_s * any(row.num_masks for row in rows))
    sizes = replace(SIZES, masks_apart=masks_apart)
    times = measure_steps(ours.timer(), sizes)
    assert times.mask_s == pytest.approx(masks_apart * mask_s)
    assert times.at(4, 0) == pytest.approx(0.0104)  # a position for each row, so none is a mask
    without_s = 0.0132
    assert times.at(32, 0, True) == pytest.approx(without_s + mask_s)
    assert times.at(32, 0) == pytest.approx(without_s + (0 if masks_apart else mask_s))
    again = measure_steps(ours.timer(), sizes, known=times)
    assert again is times
    assert ours.pool.num_free == ours.pool.num_pages


def test_steps_too_small_for_masks_are_timed_without_them(
    machine: Callable[..., Machine],
) -> None:
    ours = machine(line_s)
    sizes = StepSizes(4, max_num_batched_tokens=3, max_length=100, window=4, masks_apart=True)
    assert measure_steps(ours.timer(), sizes).mask_s == 0
    assert not any(row.num_masks for rows in ours.steps for row in rows)
    assert ours.pool.num_free == ours.pool.num_pages
