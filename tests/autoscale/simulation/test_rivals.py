"""Checks of KEDA's arithmetic."""

from functools import partial

import pytest

from mars_autoscale.policy.observe import Arrivals, ReplicaLoad, Snapshot
from mars_autoscale.simulation.policies import FixedThreshold
from mars_autoscale.simulation.rivals import Keda


def snapshot(now_s, num_replicas, *, waiting=0.0, requests_per_s=0.0):
    loads = [ReplicaLoad(now_s, 1, waiting / num_replicas) for _ in range(num_replicas)]
    return Snapshot(now_s, loads, 0, Arrivals(requests_per_s, 0.0, 100.0), now_s)


def keda(**options):
    return Keda(4.0, 300.0, partial(FixedThreshold, 1.0), **options)


@pytest.mark.parametrize(
    ("waiting", "tokens_per_s", "number"),
    [
        (0, 1200, 4),
        (0, 1310, 4),
        (0, 1325, 5),
        (0, 2000, 7),
        (30, 1200, 8),
        (0, 9000, 8),
        (17, 3000, 8),
    ],
    ids=["as many", "tolerated", "not tolerated", "by rate", "by queue", "twice", "the highest"],
)
def test_keda_takes_the_highest_of_its_triggers(waiting, tokens_per_s, number):
    at = snapshot(0.0, 4, waiting=waiting, requests_per_s=tokens_per_s / 100)
    assert keda().decide(at).num_replicas == number


def test_keda_doubles_or_adds_four_each_time_up_to_the_limit():
    policy = keda(max_replicas=20)
    told = [snapshot(15.0 * i, 1, requests_per_s=100) for i in range(5)]
    assert [policy.decide(each).num_replicas for each in told] == [5, 10, 20, 20, 20]


def test_keda_goes_down_to_the_highest_number_of_five_minutes():
    policy = keda(rate_window_s=15.0)
    rates = [24, 24, *[12] * 19, *[3] * 22]
    numbers = [
        policy.decide(snapshot(15.0 * i, 8, requests_per_s=rate)).num_replicas
        for i, rate in enumerate(rates)
    ]
    last_high_s, last_middle_s = 15.0, 15.0 * 20
    down = [15.0 * i for i in range(1, len(numbers)) if numbers[i] < numbers[i - 1]]
    assert numbers[0] == 8
    assert down == [last_high_s + 315, last_middle_s + 315]
    assert sorted(set(numbers)) == [1, 4, 8]


def test_keda_keeps_the_replicas_of_the_start_for_five_minutes():
    policy = keda()
    numbers = [policy.decide(snapshot(15.0 * i, 8)).num_replicas for i in range(22)]
    assert numbers == [8] * 21 + [1]
