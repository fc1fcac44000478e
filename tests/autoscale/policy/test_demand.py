from dataclasses import replace

import pytest

from ladders import CAPACITY, LADDER
from mars_autoscale.model.step_times import linear_step_time
from mars_autoscale.policy import demand
from mars_autoscale.policy.observe import Arrivals

ONE = CAPACITY.tokens_per_s(LADDER[0])
BOTH = Arrivals(0.03 * ONE, 30_000, 100)
"""A demand of three replicas for decoding, and of one and a half for prompts."""


def test_demand_is_that_of_decoding_and_prompts():
    assert demand.total_demand(BOTH, CAPACITY) == pytest.approx(4.5)
    assert demand.total_demand(BOTH, CAPACITY, 2.0) == pytest.approx(3.0), "prompts are no faster"


def test_the_highest_gain_is_that_of_the_lowest_allowed_rung():
    gains = [demand.highest_gain(CAPACITY, floor) for floor in (1.0, 0.93, 0.0)]
    assert gains == pytest.approx([1.0, CAPACITY.gain(LADDER[1]), CAPACITY.gain(LADDER[4])])


def test_a_rung_that_is_slower_than_the_target_gains_nothing():
    slow = replace(CAPACITY, step_time=linear_step_time(0.032, 4))
    assert slow.gain(LADDER[4]) < 1.0
    assert demand.highest_gain(slow, 0.0) == 1.0


@pytest.mark.parametrize(
    ("num_ready", "gain"),
    [(3, 3 / (3 - 1.5)), (6, 3 / (6 - 1.5)), (1, 1.0), (0, 1.0)],
    ids=["few", "enough", "prompts alone fill it", "none"],
)
def test_the_gain_that_the_ready_replicas_need(num_ready, gain):
    assert demand.gain_needed(BOTH, CAPACITY, num_ready) == pytest.approx(gain)


@pytest.mark.parametrize(
    ("demands", "bursts"),
    [
        ([1, 1, 4, 6, 5, 1, 1, 1, 3, 1], ((20.0, 6), (80.0, 3))),
        ([1, 1, 6, *[1.0] * 60], ()),
        ([2, 2, 2, 2, 2, *[9.0] * 20], ((50.0, 9),)),
        ([0.0, *[9.0] * 20], ((10.0, 9),)),
        ([5.0] * 20, ()),
        ([0.0] * 20, ()),
    ],
    ids=["two bursts", "a forgotten one", "a step", "a first step", "constant", "nothing"],
)
def test_each_burst_is_remembered_with_its_peak(demands, bursts):
    """Demands come every 10 s, and 1.25 times the mean of the latest five is carried."""
    found = ()
    for i, each in enumerate(demands):
        carried = 1.25 * sum(demands[max(0, i - 4) : i + 1]) / min(i + 1, 5)
        found = demand.remembered_bursts(
            found, each, carried, now_s=10.0 * i, apart_s=45, memory_s=600
        )
    assert found == bursts


def test_bursts_later_than_a_clock_that_was_put_back_begin_now():
    bursts = demand.remembered_bursts(
        ((900.0, 7.0),), 1.0, 1.0, now_s=100, apart_s=45, memory_s=600
    )
    assert bursts == ((100.0, 7.0),)
