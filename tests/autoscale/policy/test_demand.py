from __future__ import annotations

from collections.abc import Sequence

import pytest

from mars_autoscale.model.capacity import Capacity, Rung, linear_step_time
from mars_autoscale.policy import demand
from mars_autoscale.policy.observe import Arrivals, ReplicaLoad

LADDER = (Rung(1.0, 1.0, 0.0), Rung(0.95, 1.695, 1.7, 3), Rung(0.8, 2.065, 7.6, 3))
CAPACITY = Capacity(linear_step_time(0.032, 128), LADDER, 16, 20_000)
ONE = CAPACITY.tokens_per_s(LADDER[0])
BOTH = Arrivals(0.03 * ONE, 30_000, 100)
"""Three replicas for decoding, and one and a half for prompts."""


def test_a_load_is_decoding_and_prompts() -> None:
    assert demand.prompt_load(BOTH, CAPACITY) == pytest.approx(1.5)
    assert demand.load_of(BOTH, CAPACITY) == pytest.approx(4.5)
    assert demand.load_of(BOTH, CAPACITY, 2.0) == pytest.approx(3.0), "prompts are no faster"


def test_the_lowest_threshold_that_is_allowed_decides_how_much_faster() -> None:
    gains = [demand.lowest_gain(CAPACITY, floor) for floor in (1.0, 0.9, 0.0)]
    assert gains == pytest.approx([1.0, CAPACITY.gain(LADDER[1]), CAPACITY.gain(LADDER[2])])


def test_a_rung_that_is_slower_makes_nothing_faster() -> None:
    slow = Capacity(linear_step_time(0.032, 4), LADDER, 16, 20_000)
    assert slow.gain(LADDER[2]) < 1.0
    assert demand.lowest_gain(slow, 0.0) == 1.0


def test_a_queue_is_worked_off_in_time() -> None:
    each_s = 100 / ONE + 1000 / 20_000
    arrivals = Arrivals(2.0, 2000, 100)
    waiting = [ReplicaLoad(0, 16, 20), ReplicaLoad(0, 16, 40)]
    assert demand.queue_load(waiting, arrivals, CAPACITY, 30.0) == pytest.approx(2 * each_s)
    assert demand.queue_load(waiting, Arrivals(0, 0, 0), CAPACITY, 30.0) == 0.0


def test_the_latest_load_counts_where_busy_replicas_confirm_a_burst() -> None:
    history = [(0.0, 2.0), (2.0, 2.0), (4.0, 8.0)]
    assert demand.sized(history, is_busy=True, burst=1.3) == 8.0
    assert demand.sized(history, is_busy=False, burst=1.3) == demand.mean(history) == 4.0
    assert demand.sized(history, is_busy=True, burst=2.0) == 4.0


def test_the_gain_that_the_ready_replicas_need() -> None:
    assert demand.gain_needed(BOTH, CAPACITY, 3) == pytest.approx(2.0), "3 / (3 - 1.5)"
    assert demand.gain_needed(BOTH, CAPACITY, 6) == pytest.approx(3 / 4.5)
    assert demand.gain_needed(BOTH, CAPACITY, 1) == 1.0, "no τ makes prompts faster"
    assert demand.gain_needed(BOTH, CAPACITY, 0) == 1.0


def remembered(loads: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """The bursts of loads that come 10 s apart, where 1.25 times the mean of five is none."""
    bursts: tuple[tuple[float, float], ...] = ()
    for i, load in enumerate(loads):
        carried = 1.25 * sum(loads[max(0, i - 4) : i + 1]) / min(i + 1, 5)
        bursts = demand.remembered(bursts, load, carried, now_s=10.0 * i, apart_s=45, memory_s=600)
    return bursts


def test_each_burst_is_remembered_with_its_peak() -> None:
    assert remembered([1, 1, 4, 6, 5, 1, 1, 1, 3, 1]) == ((20.0, 6), (80.0, 3))
    assert remembered([1, 1, 6, *[1.0] * 60]) == (), "until it is forgotten"


def test_a_step_is_one_burst() -> None:
    assert remembered([2, 2, 2, 2, 2, *[9.0] * 20]) == ((50.0, 9),)
    assert remembered([0.0, *[9.0] * 20]) == ((10.0, 9),)


def test_a_constant_load_is_no_burst() -> None:
    assert remembered([5.0] * 20) == remembered([0.0] * 20) == ()


def test_bursts_of_a_clock_that_was_put_back_begin_now() -> None:
    bursts = demand.remembered(((900.0, 7.0),), 1.0, 1.0, now_s=100, apart_s=45, memory_s=600)
    assert bursts == ((100.0, 7.0),)


def test_several_bursts_are_a_pattern_and_one_is_none() -> None:
    assert demand.recurring(()) == demand.recurring(((0.0, 8.0),)) == 0.0
    assert demand.recurring(((0.0, 8.0), (60.0, 3.0), (120.0, 5.0))) == 5.0
