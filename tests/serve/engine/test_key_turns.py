"""Rows of a key take turns and pause for other keys, by given times of steps."""

from __future__ import annotations

from collections import Counter

import pytest

from decoding.scheduler_steps import Steps, make_scheduler, request_of
from mars_autoscale.model.step_times import StepTimes
from mars_platform.tier import Tier
from mars_serve.engine.prompt_room import PromptRoom
from mars_serve.engine.request import Request

NUM_ROWS = 8


def running(position_s: float, keys: str = "a" * NUM_ROWS + "b") -> tuple[Steps, list[Request]]:
    """Return steps of 5 ms and more, in which a row of each key's has had its first token."""
    times = StepTimes((1, 101), (0,), ((0.005,), (0.005 + 100 * position_s,)))
    steps = Steps(make_scheduler(500, max_num_seqs=20, max_num_batched_tokens=200, window=0))
    steps.scheduler.prompt_room = PromptRoom(times, num_rows=20, clock=lambda: 0.0)
    requests = [of_key(key, f"{key}{index}") for index, key in enumerate(keys)]
    steps.add(*requests)
    while not all(request.num_output for request in requests):
        steps.step(num_accepted=1)
    return steps, requests


def of_key(key: str, name: str, tier: Tier = Tier.DEFAULT) -> Request:
    request = request_of(name, 1, 60, tier=tier)
    request.key = key
    return request


def fed(steps: Steps) -> Counter[str]:
    """Step once, and return the number of rows of each key."""
    return Counter(row.request.key for row in steps.step(num_accepted=1))


def test_rows_of_a_key_take_turns_if_they_would_add_more_than_a_smallest_step() -> None:
    steps, requests = running(0.002)
    before = [request.num_output for request in requests]
    for _ in range(NUM_ROWS):
        assert fed(steps) == {"a": 2, "b": 1}
    gained = [each.num_output - num for each, num in zip(requests, before, strict=True)]
    assert gained == [2] * NUM_ROWS + [NUM_ROWS]


@pytest.mark.parametrize("keys", ["a" * NUM_ROWS, "abcdefgh", "ab"])
def test_nobody_pauses_where_one_key_is_alone_or_each_has_one_row(keys: str) -> None:
    steps, _ = running(0.02, keys)
    assert all(fed(steps) == Counter(keys) for _ in range(5))


def test_a_choice_of_tokens_that_takes_long_counts() -> None:
    steps, (*ours, other) = running(0.0)
    assert fed(steps) == {"a": NUM_ROWS, "b": 1}
    for request in ours:
        request.charge(0.0016)
    other.charge(0.05)
    assert fed(steps) == {"a": 3, "b": 1}


@pytest.mark.parametrize("tier", [Tier.DEFAULT, Tier.FLEX])
def test_the_key_of_most_rows_pauses_for_first_tokens_in_every_other_step(tier: Tier) -> None:
    steps, _ = running(0.0005, "aaaaaaaa")
    steps.add(of_key("b", "first"))
    assert fed(steps) == {"a": NUM_ROWS, "b": 1}, "the first step of two keys tells who is heavy"
    seen = []
    for number in range(4):
        steps.add(of_key("b", f"{number}", tier))
        seen.append(fed(steps)["a"])
    assert seen == ([0, NUM_ROWS] * 2 if tier is Tier.DEFAULT else [NUM_ROWS] * 4)


def test_a_key_whose_rows_all_end_is_still_known_when_as_many_come_back() -> None:
    steps, requests = running(0.001)
    steps.step(num_accepted=1)
    for request in requests[:NUM_ROWS]:
        steps.scheduler.finish(request)
    assert fed(steps) == {"b": 1}
    steps.add(*(of_key("a", f"again{index}") for index in range(NUM_ROWS)), of_key("b", "first"))
    assert fed(steps) == {"b": 2}
