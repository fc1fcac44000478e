from __future__ import annotations

import gc
import random
import weakref
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mars_autoscale.queueing.order import LATE_TURN, FairQueue, QueuedRequest, late_from
from mars_autoscale.queueing.ranked import RankedSet
from mars_platform.tier import Tier

KEYS = st.sampled_from("abc")
TIERS = st.sampled_from(list(Tier))
COSTS = st.integers(1, 50)
SEEDS = st.integers(0, 2**32 - 1)


def add(queue, item="", key="a", cost=10, deadline_s=0.0, tier=Tier.DEFAULT, **limits):
    return queue.add(item, tier=tier, key=key, cost=cost, deadline_s=deadline_s, **limits)


def num_keys(queue):
    """Return the number of pairs of key and tier that a queue remembers."""
    return sum(len(shares.flows) for shares in queue._tiers.values())


def drain(queue, **now):
    return "".join(queue.pop(**now).item for _ in range(len(queue)))


def test_late_requests_give_way_but_for_one_in_eight():
    queue = FairQueue[str]()
    for item in "abc":
        add(queue, item, deadline_s=1.0, late_s=1.0)
    for _ in range(18):
        add(queue, ".", deadline_s=9.0, late_s=9.0)
    assert drain(queue, now_s=2.0) == ".......a.......b....c"


def test_only_late_requests_of_the_same_key_and_tier_give_way():
    queue = FairQueue[str]()
    add(queue, "p", tier=Tier.PRIORITY, late_s=1.0)
    add(queue, "a", key="a", late_s=1.0)
    for _ in range(2):
        add(queue, "b", key="b", late_s=9.0)
    assert drain(queue, now_s=5.0) == "pabb"


def test_requests_are_late_once_they_cannot_begin_in_time():
    queue = FairQueue[str]()
    for arrived_s in (0.0, 0.5):
        add(queue, f"{arrived_s} ", deadline_s=arrived_s + 1, late_s=late_from(arrived_s, 1.0))
    assert queue.peek(now_s=0.74).item == "0.0 "
    assert queue.peek(now_s=0.76).item == "0.5 "
    assert queue.peek(now_s=1.26).item == "0.0 ", "all are late"


def test_late_requests_do_not_count_as_ahead():
    queue = FairQueue[str]()
    add(queue, tier=Tier.PRIORITY, late_s=1.0)
    for index in range(6):
        add(queue, deadline_s=float(index), late_s=float(index))
    assert queue.num_before(Tier.DEFAULT, 0.5) == 1 + 5
    assert queue.num_before(Tier.DEFAULT, 3.5) == 1 + 2
    assert queue.num_before(Tier.PRIORITY, 3.5) == 0
    assert queue.ahead(Tier.DEFAULT, "a", 9.0, now_s=4.5) == (1 + 1, 10 + 10)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=40), SEEDS)
def test_no_request_of_a_key_starves_although_others_come_in_time_forever(waiting, seed):
    """The bound of the module's text: late requests are first in at least one turn of some."""
    queue, source = FairQueue[int](), random.Random(seed)
    for deadline_s, cost in waiting:
        add(queue, 0, cost=cost, deadline_s=deadline_s, late_s=deadline_s)
    old, num_popped = set(queue), 0
    while old:
        now_s = 60.0 + num_popped
        for _ in range(source.randint(1, 2)):  # more come than are served
            add(queue, 1, deadline_s=now_s + 9, late_s=now_s + 9)
        rest = {each for each in queue if each.late_s <= now_s}
        queued = queue.pop(now_s=now_s)
        num_popped += 1
        if queued in rest:
            assert queued is min(rest, key=lambda each: (each.deadline_s, each.arrival))
        old.discard(queued)
        assert num_popped <= LATE_TURN * len(waiting)


def test_a_key_does_not_leave_its_charge_behind_by_waiting_with_one_request_at_a_time():
    queue = FairQueue[str]()
    for _ in range(20):
        add(queue, "a", key="a")
    add(queue, "b", key="b", cost=30)
    order = ""
    for _ in range(9):
        order += queue.pop().item
        if order.endswith("b"):
            add(queue, "b", key="b", cost=30)
    assert order == "abaabaaab"


def test_what_a_request_really_cost_counts():
    queue = FairQueue[str]()
    for _ in range(10):
        add(queue, "a", key="a")
        add(queue, "b", key="b")
    first, second = queue.pop(), queue.pop()
    queue.settle(first, 40)
    queue.settle(second, 10)
    assert "".join(queue.pop().item for _ in range(5)) == "bbbab"
    late = queue.pop()
    assert late.item == "a"
    queue.settle(late, 0)
    assert "".join(queue.pop().item for _ in range(4)) == "baba"


def test_nothing_is_owed_once_nobody_waits():
    queue = FairQueue[str]()
    queued_requests = [add(queue, "a", key="a") for _ in range(5)]
    assert drain(queue) == "aaaaa"
    for queued in queued_requests:
        queue.settle(queued, 1_000)
    for _ in range(2):
        add(queue, "a", key="a")
        add(queue, "b", key="b")
    assert drain(queue) == "abab"
    assert num_keys(queue) == 0


def test_what_is_ahead_is_counted_over_tiers_keys_and_deadlines():
    queue = FairQueue[str]()
    add(queue, tier=Tier.PRIORITY, cost=7)
    for index in range(4):
        add(queue, key="a", cost=10, deadline_s=1_000.0 * index)
        add(queue, key="b", cost=100)
    add(queue, tier=Tier.FLEX, cost=1_000)
    assert queue.ahead(Tier.PRIORITY, "a", 5.0) == (1, 7)
    assert queue.ahead(Tier.DEFAULT, "a", 0.0) == (1, 7), "the deadlines are equal"
    assert queue.ahead(Tier.DEFAULT, "a", 1_500.0) == (1 + 2, 7 + 20 + 20)
    assert queue.ahead(Tier.DEFAULT, "new", 5.0) == (1, 7)
    assert queue.ahead(Tier.DEFAULT, "b", 1e6) == (1 + 8, 7 + 440)
    assert queue.ahead(Tier.FLEX, "a", 5.0) == (1 + 8 + 1, 7 + 440 + 1_000)


@given(
    st.lists(st.tuples(TIERS, KEYS, COSTS, st.integers(0, 9_000)), max_size=60),
    TIERS,
    KEYS,
    st.integers(0, 9_000),
)
def test_no_fewer_tokens_go_before_a_request_than_was_said(waiting, tier, key, deadline):
    queue = FairQueue[str]()
    for each_tier, each_key, cost, each_deadline in waiting:
        add(queue, "", each_key, cost, each_deadline / 10, each_tier)
    _, tokens = queue.ahead(tier, key, deadline / 10)
    added = add(queue, "", key, 10, deadline / 10, tier)
    before = list(iter(queue.pop, added))
    assert tokens <= sum(queued.cost for queued in before)
    largest = {queued.key: 50 for queued in before if queued.tier == tier}
    same_tick = sum(
        queued.cost
        for queued in before
        if queued.tier == tier and queued.key == key
        if queued.deadline_s > deadline / 10 - 0.25
    )
    assert tokens + sum(largest.values()) + same_tick * 3 >= sum(each.cost for each in before)


@given(SEEDS, st.booleans())
def test_two_keys_that_wait_are_served_equally_but_for_one_request_each(seed, begin_together):
    """The bound of start-time fair queueing, over every interval in which both keys wait."""
    source = random.Random(seed)
    queue, largest, served = FairQueue[str](), Counter[str](), Counter[str]()
    gaps: list[int] = []
    for step in range(300):
        for key in "ab" if begin_together or step > 50 else "a":
            while sum(queued.key == key for queued in queue) < 2:
                largest[key] = max(largest[key], cost := source.randint(1, 40))
                add(queue, key=key, cost=cost, deadline_s=source.random())
        if source.random() < 0.3:  # a third key comes and goes
            add(queue, key="c", cost=source.randint(1, 40))
        queued = queue.pop()
        if begin_together or step > 50:
            served[queued.key] += queued.cost
            gaps.append(served["a"] - served["b"])
    assert max(gaps) - min(gaps) <= largest["a"] + largest["b"]


@given(SEEDS, st.integers(1, 8))
def test_a_key_that_understates_its_costs_gains_only_what_is_not_known_yet(seed, num_running):
    source = random.Random(seed)
    queue, served = FairQueue[str](), Counter[str]()
    running: list[QueuedRequest[str]] = []
    for _ in range(400):
        for key in "ab":
            while sum(queued.key == key for queued in queue) < 2:
                add(queue, key=key, cost={"a": 1, "b": 20}[key])
        running.append(queue.pop())
        served[running[-1].key] += 20
        if len(running) > num_running:
            queue.settle(running.pop(source.randrange(len(running))), 20)
    assert abs(served["a"] - served["b"]) <= 20 * (num_running + 2) + 20


class Model:
    """Keeps what a queue must hold as plain lists."""

    def __init__(self, source: random.Random):
        self.queue, self.source, self.now = FairQueue[int](), source, 0
        self.waiting: list[QueuedRequest[int]] = []
        self.popped: list[QueuedRequest[int]] = []

    def add(self):
        limit_s = self.source.choice([None, self.now + self.source.randint(0, 40)])
        key, tier = self.source.choice("abc"), self.source.choice(list(Tier))
        cost, deadline_s = self.source.randint(1, 9), float(self.source.randint(0, 5))
        self.waiting.append(add(self.queue, self.now, key, cost, deadline_s, tier, limit_s=limit_s))

    def pop(self):
        if not self.waiting:
            return
        queued = self.queue.pop()
        rank = max(each.tier.rank for each in self.waiting)
        own = [each for each in self.waiting if each.key == queued.key and each.tier.rank == rank]
        assert queued is min(own, key=lambda each: (each.deadline_s, each.arrival))
        self.waiting.remove(queued)
        self.popped.append(queued)

    def remove(self):
        if self.waiting:
            queued = self._any_of(self.waiting)
            assert self.queue.remove(queued)
            assert not self.queue.remove(queued)

    def expire(self):
        gone = self.queue.expire(self.now)
        assert gone == sorted(gone, key=lambda each: (each.limit_s, each.arrival))
        self.waiting = [each for each in self.waiting if each not in gone]
        assert all(each.limit_s is None or each.limit_s > self.now for each in self.waiting)

    def settle(self):
        if self.popped:
            self.queue.settle(self._any_of(self.popped), self.source.randint(0, 20))

    def check(self):
        assert len(self.queue) == len(self.waiting) == len(list(self.queue))
        assert set(self.queue) == set(self.waiting)
        limits = [queued.limit_s for queued in self.waiting if queued.limit_s is not None]
        assert self.queue.first_limit_s() == min(limits, default=None)

    def _any_of(self, queued_requests):
        return queued_requests.pop(self.source.randrange(len(queued_requests)))


@given(SEEDS, st.integers(1, 150))
def test_a_queue_holds_what_it_should_after_any_operations(seed, num_operations):
    model = Model(random.Random(seed))
    kinds = (model.add, model.add, model.pop, model.remove, model.expire)
    for model.now in range(num_operations):
        model.source.choice((*kinds, model.settle))()
        model.check()
    while model.waiting:
        model.pop()
    assert num_keys(model.queue) == 0


def test_keys_that_went_away_are_forgotten_while_others_wait():
    queue = FairQueue[str]()
    for _ in range(2_001):
        add(queue, key="steady")
    for number in range(1_000):
        add(queue, key=f"passing {number}", cost=15)
        for _ in range(2):
            queue.settle(queue.pop(), 10)
        assert num_keys(queue) <= 4
    queue.remove(add(queue, key="cancelled"))
    while queue:
        queue.settle(queue.pop(), 10)
    assert num_keys(queue) == 0


def test_a_flood_of_cancelled_requests_leaves_nothing_behind():
    class Item:
        pass

    queue, items = FairQueue[Item](), weakref.WeakSet[Item]()
    for tier in Tier:
        add(queue, Item(), tier=tier, limit_s=0.0)  # is first in every order and stays
    for number in range(5_000):
        items.add(item := Item())
        key, limit_s = str(number % 3), 10.0 + number
        queue.remove(add(queue, item, key, number + 1, number, limit_s=limit_s))
        del item
        assert len(items) <= 100
    gc.collect()
    assert len(queue) == 3
    assert num_keys(queue) == 3


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9) | st.none())))
def test_a_ranked_set_returns_its_smallest_member(operations):
    ranked, expected = RankedSet[str](), dict[str, int]()
    for member, rank in operations:
        if rank is None:
            ranked.discard(member)
            expected.pop(member, None)
        else:
            ranked.place(member, rank, ord(member))
            expected[member] = rank
        smallest = min(expected, key=lambda each: (expected[each], each), default=None)
        assert ranked.first() == smallest
        assert set(ranked) == set(expected)
        assert all((each in ranked) == (each in expected) for each in "abcdef")
