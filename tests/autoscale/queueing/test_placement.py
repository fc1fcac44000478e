from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mars_autoscale.queueing.placement import TOKENS_PER_REQUEST, Placement, load_of

PAGE = 4
SHARED = list(range(100, 140))


def keys_of(tokens: list[int], tenant: str = "") -> list[bytes]:
    """Name each page of four tokens by everything up to its end, as the engine's keys do."""
    ends = range(PAGE, len(tokens) + 1, PAGE)
    return [f"{tenant}:{tokens[:end]}".encode() for end in ends]


def test_a_cached_beginning_outweighs_a_small_difference_in_load():
    placement = Placement(slack=3)
    assert placement.choose(keys_of([*SHARED, 1, 2, 3, 4]), {"a": 1, "b": 0}) == "b"
    for load in range(4):
        assert placement.choose(keys_of([*SHARED, *[load] * 8]), {"a": 0, "b": load}) == "b"


def test_a_much_busier_replica_is_avoided_and_the_prefix_gets_a_second_holder():
    placement = Placement(slack=3)
    assert placement.choose(keys_of(SHARED), {"a": 1, "b": 0}) == "b"
    assert placement.choose(keys_of(SHARED), {"a": 0, "b": 4, "c": 1}) == "a"
    assert placement.choose(keys_of(SHARED), {"a": 2, "b": 1, "c": 0}) == "b"
    assert placement.choose(keys_of(SHARED), {"a": 1, "b": 2, "c": 0}) == "a"


def test_a_beginning_that_saves_more_than_it_waits_for_outweighs_the_slack():
    """By hand: ten pages of 1,024 tokens save as much as 20 requests' load."""
    keys = keys_of(SHARED)

    def chosen(**loads: float) -> str:
        placement = Placement(slack=1, tokens_per_key=2 * TOKENS_PER_REQUEST)
        placement.choose(keys, {"a": 0.0})
        placement.choose(keys[:4], {"b": 0.0})
        return placement.choose(keys, loads)

    assert chosen(a=19, b=12, c=0) == "a"
    assert chosen(a=21, b=7, c=0) == "b", "four pages save 8"
    assert chosen(a=21, b=9, c=0) == "c"


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 30), min_size=1),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 10)),
    st.integers(0, 4),
)
def test_no_replica_is_worth_much_more_than_the_chosen_one(loads, held, slack):
    placement = Placement(slack, tokens_per_key=TOKENS_PER_REQUEST)
    keys = keys_of(SHARED)
    for name, depth in held.items():
        placement.prefixes.record(keys[:depth], name)
    assert placement.prefixes.depths(keys, loads) == {
        name: depth for name, depth in held.items() if depth and name in loads
    }
    chosen = placement.choose(keys, loads)
    worth = {name: load - held.get(name, 0) for name, load in loads.items()}
    is_within_slack = loads[chosen] <= min(loads.values()) + slack
    assert is_within_slack or worth[chosen] == min(worth.values())


def test_the_longest_cached_beginning_decides():
    placement = Placement(slack=9)
    assert placement.choose(keys_of([*SHARED, 1, 1, 1, 1]), {"a": 0, "b": 1}) == "a"
    assert placement.choose(keys_of([7, 7, 7, 7]), {"a": 1, "b": 0}) == "b"
    assert placement.choose(keys_of([*SHARED, 2, 2, 2, 2]), {"a": 9, "b": 0}) == "a"
    assert placement.choose(keys_of([7, 7, 7, 7, 1, 1, 1, 1]), {"a": 0, "b": 5}) == "b"


def test_a_prompt_without_cached_beginning_goes_to_the_least_busy_replica():
    placement = Placement(slack=3)
    assert placement.choose([], {"a": 2, "b": 1}) == "b"
    assert placement.choose(keys_of([1, 2, 3, 4]), {"a": 2, "b": 3}) == "a"


def test_the_prefix_of_another_tenant_does_not_count():
    placement = Placement(slack=3)
    assert placement.choose(keys_of(SHARED, "x"), {"a": 0, "b": 1}) == "a"
    assert placement.choose(keys_of(SHARED, "y"), {"a": 1, "b": 0}) == "b"


def test_a_replica_that_is_gone_is_forgotten():
    placement = Placement(slack=3)
    placement.choose(keys_of(SHARED), {"a": 0})
    placement.choose(keys_of([1, 2, 3, 4]), {"b": 0})
    placement.retain({"b"})
    assert len(placement.prefixes) == 1
    assert placement.choose(keys_of(SHARED), {"a": 1, "b": 0}) == "b"


def test_memory_is_bounded_and_ends_of_prompts_are_forgotten_first():
    placement = Placement(slack=3, max_keys=10)
    placement.choose(keys_of(SHARED), {"a": 0})
    placement.choose(keys_of([1, 2, 3, 4] * 2), {"b": 0})
    assert len(placement.prefixes) == 10
    assert placement.choose(keys_of(SHARED[:PAGE]), {"a": 1, "b": 0}) == "a"


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=80), st.integers(1, 6))
def test_no_replica_exceeds_the_least_busy_by_more_than_the_slack(arrivals, slack):
    placement, loads = Placement(slack), Counter({"a": 0, "b": 0, "c": 0})
    ends = random.Random(0)
    for conversation, one_ends in arrivals:
        loads[placement.choose(keys_of([conversation] * 12), dict(loads))] += 1
        assert max(loads.values()) <= min(loads.values()) + slack + 1
        if one_ends:
            busiest = max(loads.values())
            loads[ends.choice([name for name in loads if loads[name] == busiest])] -= 1


def test_a_session_stays_with_its_replica_within_the_slack():
    placement = Placement(slack=2)
    assert placement.choose([], {"a": 1, "b": 0}, "user") == "b"
    assert placement.choose([], {"a": 0, "b": 2}, "user") == "b"
    assert placement.choose([], {"a": 0, "b": 2}, "another") == "a"
    assert placement.choose([], {"a": 0, "b": 3}, "user") == "a"
    assert placement.choose([], {"a": 2, "b": 0}, "user") == "a", "the last replica counts"


def test_a_session_decides_between_holders_and_not_against_them():
    placement = Placement(slack=4)
    placement.choose(keys_of(SHARED), {"a": 0})
    placement.choose(keys_of(SHARED), {"b": 0})
    placement.choose([], {"b": 0}, "holder")
    placement.choose([], {"c": 0}, "stranger")
    loads = {"a": 0, "b": 1, "c": 0}
    assert placement.choose(keys_of(SHARED), loads, "holder") == "b"
    assert placement.choose(keys_of(SHARED), loads, "stranger") == "a"


def test_a_holder_without_credit_is_not_waited_for():
    placement = Placement(slack=4)
    placement.choose(keys_of(SHARED), {"a": 0}, "user")
    assert placement.choose(keys_of(SHARED), {"b": 9, "c": 8}, "user") == "c"


def test_sessions_are_bounded_and_forgotten_with_their_replica():
    placement = Placement(slack=2, max_sessions=3)
    for session in "vwxyz":
        assert placement.choose([], {"a": 0, "b": 1}, session) == "a"
    loads = {"a": 1, "b": 0}
    assert [placement.choose([], loads, session) for session in "zyx"] == ["a"] * 3
    assert placement.choose([], loads, "v") == "b"
    placement.retain({"b"})
    assert placement.choose([], loads, "y") == "b"


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 10_000)), min_size=1, max_size=6),
    st.integers(0, 4),
)
def test_a_prompt_waits_behind_few_more_tokens_than_elsewhere(replicas, slack):
    loads = {str(name): load_of(*each) for name, each in enumerate(replicas)}
    placement = Placement(slack)
    for name in loads:  # every replica holds the beginning, and the session was last on the last
        placement.prefixes.record(keys_of(SHARED), name)
        placement.choose([], {name: 0.0}, "user")
    chosen = replicas[int(placement.choose(keys_of(SHARED), loads, "user"))]
    least = replicas[int(min(loads, key=loads.__getitem__))]
    assert chosen[1] <= least[1] + (slack + least[0] - chosen[0]) * TOKENS_PER_REQUEST + 1e-6
