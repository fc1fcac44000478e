"""Step times and prompt speed, as an engine measures them when it starts."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace

import pytest

from decoding.engine_requests import make_request, make_row
from mars_autoscale.model.step_times import StepTimes
from mars_serve.engine.execution.warm_up import (
    StepSizes,
    StepTimer,
    clock_of,
    measure_prefill,
    measure_steps,
)
from mars_serve.engine.memory import Memory
from mars_serve.engine.pages import PagePool
from mars_serve.engine.scheduled_row import ScheduledRow

Cost = Callable[[Sequence[ScheduledRow]], float]
"""Function that returns the seconds that a step of some rows takes."""


class Machine:
    """Pretends to run steps, on clocks of its own."""

    def __init__(self, cost: Cost, num_pages: int = 200) -> None:
        self.pool = PagePool(num_pages, 4)
        self.memory = Memory(self.pool)
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
        return StepTimer(self.run, self.memory, clock_of(device))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    """Return a function that makes a machine whose clock the warm-up reads."""

    def make(cost: Cost, num_pages: int = 200) -> Machine:
        made = Machine(cost, num_pages)
        monkeypatch.setattr("mars_serve.engine.execution.warm_up.time", made)
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
    assert {len(works) for works in ours.steps} == {1, 2, 3, 4}
    assert max(sum(work.num_positions for work in works) for works in ours.steps) == 100
    assert ours.pool.num_free == ours.pool.num_pages


SIZES = StepSizes(4, 1000, max_length=100, window=4, widest_row=25)
NUM_POINTS = 13
NUM_STEPS = 3 + NUM_POINTS + 2
"""Steps that are timed with `SIZES`."""


@pytest.mark.parametrize(
    ("num_rows", "num_pages", "largest"), [(1, 200, 64), (9, 200, 81), (1, 9, 18)]
)
def test_longer_steps_are_extrapolated_from_a_long_piece(
    machine: Callable[..., Machine], num_rows: int, num_pages: int, largest: int
) -> None:
    """Rows in mode exact are wider than in mode threshold, so those of small batches are, too."""
    ours = machine(line_s, num_pages)
    times = measure_steps(ours.timer(), StepSizes(num_rows, 999, 999, window=4), repeats=1)
    assert times.positions[-1] == largest
    assert times.positions[-2] <= 0.8 * largest


def slowdowns(times: StepTimes) -> list[float]:
    """Return how much longer steps seem to take than by `line_s`."""
    line = [0.001 + 1e-5 * count for count in times.positions]
    return [times.at(count, 0) / s for count, s in zip(times.positions, line, strict=True)]


@pytest.mark.parametrize("begin", [0.0, 0.3, 1.0, 2.7])
@pytest.mark.parametrize("end", [0.5, 1.0, 3.3, 3.9])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("scale", [1, 10])
def test_a_machine_that_is_busy_for_some_rounds_spoils_no_time(
    machine: Callable[..., Machine], begin: float, end: float, device: str, scale: int
) -> None:
    ours = machine(lambda rows: scale * line_s(rows))  # up to .02 s, and four times that
    ours.busy = range(int(begin * NUM_STEPS), int(end * NUM_STEPS))
    times = measure_steps(ours.timer(device), SIZES, repeats=6)
    assert slowdowns(times) == pytest.approx([scale] * NUM_POINTS)


def test_on_a_cpu_other_programs_add_nothing(machine: Callable[..., Machine]) -> None:
    ours = machine(line_s)
    ours.busy = range(10**9)
    times = measure_steps(ours.timer("cpu"), SIZES, repeats=6)
    assert slowdowns(times) == pytest.approx([1.0] * NUM_POINTS)


@pytest.mark.parametrize("step_s", [0.001, 0.1, 0.4, 1.9, 2.0, 9.0])
def test_however_often_steps_are_to_run_the_time_of_a_warm_up_is_bounded(
    machine: Callable[..., Machine], step_s: float
) -> None:
    ours = machine(lambda _: step_s)
    measure_steps(ours.timer(), SIZES, repeats=100)
    assert ours.wall_s <= NUM_STEPS * (0.5 + step_s * (2 if step_s < 2 else 1))


def test_what_rows_copy_when_they_come_is_no_part_of_a_step(
    machine: Callable[..., Machine],
) -> None:
    def cost(rows: Sequence[ScheduledRow]) -> float:
        last = {row.request for row in ours.steps[-1]} if ours.steps else set()
        new = [row.request for row in rows if row.request not in last]
        return line_s(rows) + sum(1e-4 * request.num_cached for request in new)

    ours = machine(cost)
    times = measure_steps(ours.timer(), SIZES)
    assert slowdowns(times) == pytest.approx([1.0] * NUM_POINTS)
    assert times.at(4, 100) == pytest.approx(times.at(4, 0))


def test_a_long_step_that_was_held_up_in_its_only_run_looks_twice_as_long_at_most(
    machine: Callable[..., Machine],
) -> None:
    def cost(rows: Sequence[ScheduledRow]) -> float:
        num_positions = sum(row.num_positions for row in rows)
        return line_s(rows) * (1000 if num_positions > 40 else 1)

    times = measure_steps(machine(cost).timer(), SIZES)
    assert times.at(32, 0) == pytest.approx(0.00132)
    assert max(slowdowns(times)) <= 2 * 0.00132 / 32 * 100 / 0.002


def test_a_step_that_was_always_held_up_looks_no_longer_than_a_wider_one(
    machine: Callable[..., Machine],
) -> None:
    def cost(rows: Sequence[ScheduledRow]) -> float:
        num_positions = sum(row.num_positions for row in rows)
        return line_s(rows) * (9 if 5 < num_positions < 40 else 1)

    times = measure_steps(machine(cost).timer(), SIZES)
    widest = times.at(times.positions[-1], 0)
    assert all(times.at(count, 0) <= widest for count in times.positions)


@pytest.mark.parametrize("read_s", [0.0, 2e-5])
def test_steps_of_prompts_take_a_share_of_those_whose_logits_are_read(
    machine: Callable[..., Machine], read_s: float
) -> None:
    def cost(rows: Sequence[ScheduledRow]) -> float:
        # The masks of a row stand for all of its positions that are read.
        return line_s(rows) + read_s * sum(2 * row.num_masks for row in rows)

    times = measure_steps(machine(cost).timer(), SIZES)
    assert times.unread == pytest.approx(0.002 / times.at(100, 0))
    assert (times.unread == 1) == (read_s == 0)


def test_a_prompt_seems_to_take_no_less_than_half_of_it(machine: Callable[..., Machine]) -> None:
    def cost(rows: Sequence[ScheduledRow]) -> float:
        is_prompt = not any(row.num_masks for row in rows) and len(rows[0].request.tokens) == 100
        return 1e-9 if is_prompt else line_s(rows)

    times = measure_steps(machine(cost).timer(), SIZES)
    assert times.unread == pytest.approx(line_s([make_row(make_request(prompt=50))]) / 0.002)


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
    assert ours.pool.num_free == ours.pool.num_pages


def test_steps_too_small_for_masks_are_timed_without_them(
    machine: Callable[..., Machine],
) -> None:
    ours = machine(line_s)
    sizes = StepSizes(4, max_num_batched_tokens=3, max_length=100, window=4, masks_apart=True)
    assert measure_steps(ours.timer(), sizes).mask_s == 0
    assert not any(row.num_masks for rows in ours.steps for row in rows)
    assert ours.pool.num_free == ours.pool.num_pages
