from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mars_serve.deploy.router import FailedReplicas, PrefixMap, prompt_keys
from mars_serve.engine.pages import page_key, root_key

PAGE = 4
SHARED = list(range(100, 140))


def keys_of(tokens: list[int], tenant: str = "") -> list[bytes]:
    return prompt_keys(tenant, tokens, PAGE)


def test_prompt_keys_equal_the_keys_of_the_engines_pages():
    first = page_key(root_key("a"), [1, 2, 3, 4])
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9], "a") == [first, page_key(first, [5, 6, 7, 8])]
    assert keys_of([1, 2, 3], "a") == []
    assert not set(keys_of(SHARED, "a")) & set(keys_of(SHARED, "b"))


def test_only_leading_pages_of_a_long_prompt_are_compared():
    assert len(keys_of(list(range(100_000)))) == 128


def test_a_cached_beginning_outweighs_a_small_difference_in_load():
    prefixes = PrefixMap(slack=3)
    assert prefixes.choose(keys_of([*SHARED, 1, 2, 3, 4]), {"a": 1, "b": 0}) == "b"
    for load in range(4):
        assert prefixes.choose(keys_of([*SHARED, *[load] * 8]), {"a": 0, "b": load}) == "b"


def test_a_much_busier_replica_is_avoided_and_the_prefix_gets_a_second_holder():
    prefixes = PrefixMap(slack=3)
    assert prefixes.choose(keys_of(SHARED), {"a": 1, "b": 0}) == "b"
    assert prefixes.choose(keys_of(SHARED), {"a": 0, "b": 4, "c": 1}) == "a"
    assert prefixes.choose(keys_of(SHARED), {"a": 2, "b": 1, "c": 0}) == "b"
    assert prefixes.choose(keys_of(SHARED), {"a": 1, "b": 2, "c": 0}) == "a"


def test_the_longest_cached_beginning_decides():
    prefixes = PrefixMap(slack=9)
    assert prefixes.choose(keys_of([*SHARED, 1, 1, 1, 1]), {"a": 0, "b": 1}) == "a"
    assert prefixes.choose(keys_of([7, 7, 7, 7]), {"a": 1, "b": 0}) == "b"
    assert prefixes.choose(keys_of([*SHARED, 2, 2, 2, 2]), {"a": 9, "b": 0}) == "a"
    assert prefixes.choose(keys_of([7, 7, 7, 7, 1, 1, 1, 1]), {"a": 0, "b": 5}) == "b"


def test_a_prompt_without_cached_beginning_goes_to_the_least_busy_replica():
    prefixes = PrefixMap(slack=3)
    assert prefixes.choose([], {"a": 2, "b": 1}) == "b"
    assert prefixes.choose(keys_of([1, 2, 3, 4]), {"a": 2, "b": 3}) == "a"


def test_the_prefix_of_another_tenant_does_not_count():
    prefixes = PrefixMap(slack=3)
    assert prefixes.choose(keys_of(SHARED, "x"), {"a": 0, "b": 1}) == "a"
    assert prefixes.choose(keys_of(SHARED, "y"), {"a": 1, "b": 0}) == "b"


def test_a_replica_that_is_gone_is_forgotten():
    prefixes = PrefixMap(slack=3)
    prefixes.choose(keys_of(SHARED), {"a": 0})
    prefixes.choose(keys_of([1, 2, 3, 4]), {"b": 0})
    prefixes.retain({"b"})
    assert len(prefixes) == 1
    assert prefixes.choose(keys_of(SHARED), {"a": 1, "b": 0}) == "b"


def test_memory_is_bounded_and_ends_of_prompts_are_forgotten_first():
    prefixes = PrefixMap(slack=3, max_keys=10)
    prefixes.choose(keys_of(SHARED), {"a": 0})
    prefixes.choose(keys_of([1, 2, 3, 4] * 2), {"b": 0})
    assert len(prefixes) == 10
    assert prefixes.choose(keys_of(SHARED[:PAGE]), {"a": 1, "b": 0}) == "a"


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=80), st.integers(1, 6))
def test_no_replica_exceeds_the_least_busy_by_more_than_the_slack(arrivals, slack):
    prefixes, loads = PrefixMap(slack), Counter({"a": 0, "b": 0, "c": 0})
    ends = random.Random(0)
    for conversation, one_ends in arrivals:
        loads[prefixes.choose(keys_of([conversation] * 12), dict(loads))] += 1
        assert max(loads.values()) <= min(loads.values()) + slack + 1
        if one_ends:
            busiest = max(loads.values())
            loads[ends.choice([name for name in loads if loads[name] == busiest])] -= 1


def test_a_replica_that_has_failed_is_avoided_for_a_while_if_there_is_another():
    now = 100.0
    failed = FailedReplicas(lambda: now)
    assert failed.without(["a", "b"]) == ["a", "b"]
    failed.note(["a"])
    assert failed.without(["a", "b"]) == ["b"]
    assert failed.without(["a"]) == ["a"]
    now += 5.1
    assert failed.without(["a", "b"]) == ["a", "b"]
