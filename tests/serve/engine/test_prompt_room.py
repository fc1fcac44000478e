"""How far prompts may lengthen a step, counted in positions by a given table of step times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decoding.scheduler_steps import Steps, make_scheduler, request_of
from mars_autoscale.model.step_times import StepTimes
from mars_platform.tier import Tier
from mars_serve.engine.prompt_room import PromptRoom
from mars_serve.engine.request import Request
from mars_serve.engine.scheduler import Scheduler

LARGEST = 1000


def linear(first_s: float, position_s: float, cached_s: float = 0.0) -> StepTimes:
    """Return times of a step, and of what each cached token adds to steps of the largest size."""
    seconds = [first_s, first_s + (LARGEST - 1) * position_s]
    cached = (seconds[0], seconds[1] + 1000 * cached_s)
    return StepTimes((1, LARGEST), (0, 1000), tuple(zip(seconds, cached, strict=True)))


def scheduler_of(times: StepTimes, now: list[float] | None = None) -> Scheduler:
    scheduler = make_scheduler(
        2000, max_num_seqs=10, max_num_batched_tokens=LARGEST, window=0, page_size=16
    )
    clock = [0.0] if now is None else now
    scheduler.prompt_room = PromptRoom(times, num_rows=10, clock=lambda: clock[0])
    return scheduler


def prompt(name: str, length: int, key: str = "a", tier: Tier = Tier.DEFAULT) -> Request:
    request = request_of(name, length, max_tokens=50, tier=tier)
    request.key = key
    return request


def fed(steps: Steps) -> dict[str, int]:
    return {row.request.id: row.num_positions for row in steps.step(num_accepted=1)}


def test_a_prompt_lengthens_the_steps_of_a_row_that_decodes_by_20_ms() -> None:
    steps = Steps(scheduler_of(linear(0.005, 0.001)))
    steps.add(prompt("row", 2))
    steps.step()
    steps.add(prompt("long", 2000))
    assert fed(steps) == {"row": 1, "long": 20}
    steps.add(prompt("short", 8))
    assert fed(steps) == {"row": 1, "long": 20}, "those of one key go in order"


def test_prompts_are_priced_by_steps_whose_logits_are_hardly_read() -> None:
    steps = Steps(scheduler_of(replace(linear(0.005, 0.001), unread=0.5)))
    steps.add(prompt("row", 2))
    steps.step()
    steps.add(prompt("a", 15), prompt("b", 2000))
    assert fed(steps) == {"row": 1, "a": 15, "b": 25}


@pytest.mark.parametrize(
    ("waited_s", "key", "tier", "has_begun", "expected"),
    [
        (0.4, "a", Tier.DEFAULT, False, 100),  # a quarter of the wait, in ms
        (0.04, "a", Tier.DEFAULT, False, 20),
        (9.0, "a", Tier.DEFAULT, False, 250),
        (9.0, "a", Tier.DEFAULT, True, 20),
        (9.0, "a", Tier.FLEX, False, 20),  # rows of a higher tier do not wait for it
        (9.0, "b", Tier.DEFAULT, False, 20),  # nor do those of another key
    ],
)
def test_prompts_that_wait_lengthen_steps_of_their_own_key_more(
    waited_s: float, key: str, tier: Tier, has_begun: bool, expected: int
) -> None:
    now = [0.0]
    steps = Steps(scheduler_of(linear(0.005, 0.001), now))
    steps.add(prompt("row", 2, key=key))
    steps.step()
    steps.add(prompt("first", 15, tier=tier), prompt("long", 2000, tier=tier))
    assert fed(steps) == {"row": 1, "first": 15, "long": 5}
    now[0] += waited_s
    steps.scheduler.running[-1].queue_s = 0.0 if has_begun else None
    steps.scheduler.finish(steps.scheduler.running[1])
    assert fed(steps) == {"row": 1, "long": expected}


def test_a_prompt_takes_whole_steps_only_while_no_other_key_is_active() -> None:
    now = [0.0]
    steps = Steps(scheduler_of(linear(0.005, 0.001), now))
    steps.add(prompt("other", 2, key="b"))
    steps.scheduler.finish(steps.scheduler.waiting[0])
    steps.add(*(prompt(f"{index}", 3000) for index in range(3)))
    now[0] = 9.0
    assert fed(steps) == {"0": 21}
    now[0] = 11.0
    assert fed(steps) == {"0": LARGEST}
    steps.add(prompt("new", 15, key="b"))
    assert fed(steps) == {"0": 6, "new": 15}, "the new key is first"


def test_prompts_may_triple_a_step_that_reads_large_weights() -> None:
    steps = Steps(scheduler_of(linear(0.1, 0.001)))
    steps.add(prompt("a", 2000), prompt("b", 2000, key="b"))
    assert fed(steps) == {"a": 201}


@pytest.mark.parametrize("position_s", [0.0, 0.02 / LARGEST])
def test_a_device_that_computes_whole_steps_quickly_has_no_bound(position_s: float) -> None:
    steps = Steps(scheduler_of(linear(0.005, position_s)))
    steps.add(prompt("a", 2000), prompt("b", 2000, key="b"))
    assert sum(fed(steps).values()) == LARGEST


def test_parts_of_a_prompt_get_shorter_as_its_cached_tokens_get_more() -> None:
    # Rows of 100 positions take 99 us for each cached token more than those of one, so a position
    # takes 1 ms, and 1 ms more for each 1,000 cached tokens.
    steps = Steps(scheduler_of(linear(0.001, 0.001, cached_s=99e-6)))
    long = prompt("a", 4000)
    steps.add(prompt("row", 1, key="b"), long)
    parts = []
    while long.num_cached < 1000:
        parts.append(fed(steps)["a"])
    assert (parts[0], parts[-1]) == (19, 10)
    assert parts == sorted(parts, reverse=True)


def test_every_step_goes_on_with_a_prompt_however_slow() -> None:
    steps = Steps(scheduler_of(linear(0.001, 1.0)))
    steps.add(prompt("a", 9), prompt("b", 9, key="b"))
    for _ in range(8):
        assert 1 <= fed(steps)["a"] <= 2
