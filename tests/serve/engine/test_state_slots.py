"""Slots for states of recurrent layers and the prefixes that they allow, without a model."""

from __future__ import annotations

import random

import pytest

from decoding.scheduler_steps import Steps, make_scheduler, request_of
from mars_platform.method.mode import Mode
from mars_platform.tier import Tier

PAGE = 4
TEXT = list(range(100, 160))


def steps_of(num_snapshots: int = 8, **sizes: int) -> Steps:
    sizes = {"page_size": PAGE, "max_num_batched_tokens": 100, **sizes}
    return Steps(make_scheduler(256, num_snapshots=num_snapshots, **sizes))


def hits(steps: Steps, prompt: list[int], max_tokens: int = 1) -> int:
    """Run a request and return the tokens that it found in the prefix cache."""
    steps.add(request := request_of("hit", prompt, max_tokens))
    steps.run()
    return request.num_prefix_hit_tokens


def num_snapshots(steps: Steps) -> int:
    return len(steps.scheduler.memory.states.pool._cached)


@pytest.mark.parametrize("mode", [Mode.AR, Mode.THRESHOLD, Mode.EXACT])
@pytest.mark.parametrize("length", range(1, 3 * PAGE + 1))
def test_a_prompt_is_found_up_to_its_last_border_in_all_modes(mode: Mode, length: int) -> None:
    steps, prompt = steps_of(), TEXT[:length]
    requests = [request_of("a", text, 9, mode=mode) for text in (prompt, prompt, [*prompt[:-1], 7])]
    for request in requests:
        steps.add(request)
        steps.run()
    found = [request.num_prefix_hit_tokens for request in requests]
    assert found == [0, *[(length - 1) // PAGE * PAGE] * 2]


def test_where_texts_part_a_snapshot_is_taken_the_second_time() -> None:
    steps = steps_of()
    first, second, third = ([*TEXT[:41], *range(number, number + 9)] for number in (1, 20, 40))
    assert hits(steps, first) == 0
    assert hits(steps, second) == 0, "pages of 40 tokens are cached, but no state behind them"
    assert steps.scheduler.memory.num_computed_again == 40
    assert hits(steps, third) == 40
    assert steps.scheduler.memory.num_computed_again == 40


def test_the_next_turn_finds_the_answer() -> None:
    steps = steps_of()
    steps.add(first := request_of("first", TEXT[:10], 33, threshold=1.0))
    steps.run()  # all but the last of 43 tokens have been fed
    assert hits(steps, [*first.tokens, 5, 6]) == 40


def test_of_a_long_answer_only_the_newest_snapshot_outlasts_others() -> None:
    steps = steps_of(num_snapshots=2, max_num_seqs=4)
    steps.add(first := request_of("first", TEXT[:10], 33, threshold=1.0))
    steps.run()
    assert num_snapshots(steps) == 8
    for number in range(7):
        hits(steps, [number] * (PAGE + 1))
    pool, keys = steps.scheduler.memory.states.pool, enumerate(first.page_keys, 1)
    assert [PAGE * count for count, key in keys if pool.has(key)] == [8, 40]


@pytest.mark.parametrize("max_num_batched_tokens", [5, 100, 1024, 4096])
@pytest.mark.parametrize("shared", [510, 512])
def test_a_prefix_shared_by_requests_that_come_together_is_computed_once(
    max_num_batched_tokens: int, shared: int
) -> None:
    scheduler = make_scheduler(
        400,
        page_size=16,
        max_num_seqs=32,
        max_num_batched_tokens=max_num_batched_tokens,
        num_snapshots=32,
    )
    steps, prefix = Steps(scheduler), list(range(shared))
    steps.add(*(request_of(str(i), [*prefix, *[600 + i] * 20], 8) for i in range(32)))
    steps.run()
    assert steps.num_computed <= shared + 32 * (20 + 8 + shared % 16)
    assert scheduler.num_prefix_hit_tokens == 31 * (shared - shared % 16)


def test_requests_that_part_at_several_borders_compute_each_part_once() -> None:
    steps = steps_of(max_num_seqs=8)
    for count in (60, 41, 41, 30, 13):
        steps.add(request_of(str(count), [*TEXT[:count], *[count] * 3], 1))
    steps.run()
    assert steps.num_computed <= 60 + 4 * (3 + PAGE) + 5


def test_without_room_for_snapshots_nobody_waits_for_a_page() -> None:
    steps = steps_of(num_snapshots=0)
    steps.add(request_of("a", TEXT, 1), request_of("b", TEXT[:20], 1))
    assert [row.num_tokens for row in steps.step()] == [60, 20]
    assert hits(steps, TEXT) == 0


def test_a_preempted_request_goes_on_from_its_newest_snapshot() -> None:
    steps = steps_of(max_num_seqs=1)
    victim = request_of("a", 22, 40)
    steps.add(victim)
    steps.step(num_accepted=5)
    steps.step(num_accepted=5)  # 27 tokens are cached, 32 committed
    steps.add(request_of("b", 2, 1, tier=Tier.PRIORITY))
    steps.step()
    assert (victim.num_preemptions, victim.state) == (1, None)
    (row,) = steps.step()
    assert (row.request, row.num_tokens) == (victim, 32 - 24)
    steps.run()


def test_right_drafts_are_absorbed_by_the_step_behind_them() -> None:
    """A border among them gets its snapshot then."""
    steps = steps_of(max_num_seqs=1)
    steps.add(request := request_of("a", TEXT[:10], 20, mode=Mode.EXACT))
    steps.step(num_accepted=1)  # 10 tokens are cached, and 4 drafts are left
    assert steps.step(num_accepted=4)[0].num_drafts == 4
    assert (request.num_cached, request.state.num_right) == (10 + 1 + 3, 3)
    assert num_snapshots(steps) == 1  # behind 8 tokens of the prompt
    steps.step(num_accepted=1)
    assert num_snapshots(steps) == 2
    assert request.rolling == 12 // PAGE


def test_nobody_finds_a_snapshot_of_a_discarded_request() -> None:
    steps = steps_of()
    steps.add(failing := request_of("failing", TEXT, 9, threshold=1.0))
    while failing.num_output < 5:
        steps.step()
    steps.scheduler.discard(failing)
    assert num_snapshots(steps) == 0
    assert hits(steps, [*TEXT, 5]) == 0
    assert hits(steps, [*TEXT, 6]) == 60


def test_random_texts_find_their_prefixes_with_few_snapshots() -> None:
    """Every state that `SlotsOfTexts` reads is that of the reader's own text."""
    source, num_found = random.Random(0), 0
    for num in (1, 3, 9):
        sizes = {"page_size": 2, "max_num_batched_tokens": 9, "window": 2}
        steps = Steps(make_scheduler(60, num_snapshots=num, **sizes), source)
        stems = [[stem] * 30 for stem in range(5, 9)]
        for index in range(80):
            stem = source.choice(stems)[: source.randint(1, 30)]
            mode = source.choice([Mode.THRESHOLD, Mode.EXACT])
            prompt = [*stem, *source.choices([0, 1], k=4)]
            steps.add(request_of(str(index), prompt, 6, mode=mode))
            for _ in range(source.randrange(6)):
                steps.step(fails=source.random() < 0.1, fails_alone=0.1)
        steps.run()
        num_found += steps.scheduler.num_prefix_hit_tokens
    assert num_found > 300
