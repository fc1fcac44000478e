from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_autoscale.queueing.grants import Credit, Grants


def make_grants(capacity, ingresses, reserve=0):
    grants = Grants(capacity - reserve, reserve)
    for name in ingresses:
        grants.connect(name)
    return grants


def update(grants):
    return grants.update(is_short_of_pages=False)


def receive(grants, name, num=1):
    for _ in range(num):
        grants.received(name)


def test_one_ingress_may_fill_the_replica_and_its_reserve():
    grants = make_grants(10, "a", reserve=2)
    assert grants.capacity == 10
    assert update(grants) == {"a": 10}
    receive(grants, "a", 10)
    assert update(grants) == {}
    grants.ended("a")
    assert update(grants) == {"a": 11}


def test_free_room_stands_ready_in_even_shares():
    assert update(make_grants(10, "ab")) == {"a": 5, "b": 5}
    assert update(make_grants(2, "abc")) == {"a": 1, "b": 1}


def test_room_goes_to_where_requests_wait_and_comes_back():
    grants = make_grants(10, "ab")
    update(grants)
    grants.note_demand("b", 7)
    assert update(grants) == {"a": 3, "b": 7}, "no more is taken from the other than is needed"
    receive(grants, "b", 7)
    assert update(grants) == {}
    for _ in range(7):
        grants.ended("b")
    assert update(grants) == {"a": 5, "b": 12}


def test_demand_is_met_evenly_and_the_smaller_one_whole():
    grants = make_grants(10, "abc")
    for name, demand in {"a": 2, "b": 100, "c": 100}.items():
        grants.note_demand(name, demand)
    assert update(grants) == {"a": 2, "b": 4, "c": 4}


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_every_ingress_with_demand_gets_its_turn(capacity):
    grants, by_name = make_grants(capacity, "abc"), {name: Credit() for name in "abc"}
    rounds = []
    for _ in range(30):
        for name in by_name:
            grants.note_demand(name, by_name[name].num_sent + 5)
        for name, limit in update(grants).items():
            by_name[name].limit = limit
        sent = [name for name, credit in by_name.items() for _ in range(credit.num_free)]
        assert len(sent) == capacity
        for name in sent:
            by_name[name].num_sent += 1
            grants.received(name)
        for name in sent:
            grants.ended(name)
        rounds.append(sent)
    assert all(set().union(*rounds[start : start + 3]) == set("abc") for start in range(28))


def test_requests_beyond_a_limit_are_taken_in_and_paid_back():
    grants = make_grants(4, "ab")
    update(grants)
    grants.note_demand("b", 4)
    assert update(grants) == {"a": 0, "b": 4}
    receive(grants, "a", 2)  # sent before the news of the lower limit came
    receive(grants, "b", 2)
    assert update(grants) == {"a": 2, "b": 2}
    for _ in range(2):
        receive(grants, "b")  # sent as well before the news came
        update(grants)
    assert grants.num_free == 0
    grants.ended("a")
    grants.ended("a")
    assert update(grants) == {}, "four are held, and four may be"
    grants.ended("b")
    assert sum(update(grants).values()) == 2 + 1


def test_requests_of_an_ingress_that_is_gone_take_room_until_they_end():
    grants = make_grants(4, "ab")
    update(grants)
    receive(grants, "a", 2)
    grants.disconnect("a")
    assert update(grants) == {}
    grants.ended("a")
    assert update(grants) == {"b": 3}
    grants.ended("a")
    assert update(grants) == {"b": 4}
    grants.disconnect("b")
    assert update(grants) == {}


def test_a_new_ingress_gets_an_even_share_at_once():
    grants = make_grants(9, "ab")
    update(grants)
    grants.connect("c")
    assert update(grants) == {"a": 3, "b": 3, "c": 3}


@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(1, 4))
def test_credits_never_exceed_the_room_and_leave_none_unused(seed, capacity, num_ingresses):
    source = random.Random(seed)
    names = [str(number) for number in range(num_ingresses)]
    grants, limits = make_grants(capacity, names), dict.fromkeys(names, 0)
    received, held = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for _ in range(80):
        name, is_short = source.choice(names), source.random() < 0.1
        if source.random() < 0.4 and received[name] < limits[name] + (source.random() < 0.1):
            grants.received(name)
            received[name] += 1
            held[name] += 1
        elif source.random() < 0.6 and held[name]:
            grants.ended(name)
            held[name] -= 1
        demand = source.randint(0, 2 * capacity)
        grants.note_demand(name, received[name] + demand)
        limits |= grants.update(is_short_of_pages=is_short)
        given = {name: limits[name] - received[name] for name in names}
        assert min(given.values()) >= 0
        assert sum(given.values()) == (0 if is_short else max(capacity - sum(held.values()), 0))
        if given[name] < demand:
            most = held[name] + given[name] + 1
            assert all(held[other] + given[other] <= most for other in names if given[other])


def test_demand_is_told_when_it_differs_from_what_the_replica_will_think():
    credit = Credit(limit=2)
    assert credit.report(0) is None
    credit.num_sent += 1
    assert credit.report(0) is None, "it was sent at once"
    credit.num_sent += 1
    assert credit.report(3) == 2 + 3
    assert credit.report(3) is None
    credit.num_sent += 1
    assert credit.report(2) is None, "one of those that were reported was sent"
    assert credit.report(1) == 3 + 1, "one went elsewhere"
    credit.num_sent += 1
    assert credit.report(1) == 4 + 1, "one was sent, and one has come"
    assert credit.report(0) == 4 + 0
