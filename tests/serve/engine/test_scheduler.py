from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.engine_requests import make_request, requested_masks
from decoding.scheduler_steps import (
    Steps,
    check_all_free,
    ids,
    make_scheduler,
    request_of,
    windowed,
)
from mars_autoscale.model.step_times import StepTimes
from mars_platform.method.mode import LiveDecoding, Mode
from mars_platform.tier import Tier
from mars_serve.engine.attention.interface import LayerGroup
from mars_serve.engine.decoding_options import Outcomes
from mars_serve.engine.prompt_room import PromptRoom
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import Masks, ScheduledRow
from mars_serve.engine.scheduler import Scheduler

# Rules that hold in every step


def test_a_request_in_quarantine_is_alone_in_its_steps_and_takes_turns_with_the_others() -> None:
    scheduler = make_scheduler(100, window=2)
    steps = Steps(scheduler, random.Random(0))
    plain = [make_request(name, [5, 6, 7], 40) for name in ("a", "b")]
    suspects = [make_request(name, [5, 6, 8], 40) for name in ("c", "d")]
    for suspect in suspects:
        suspect.quarantine_tokens = 2
    for each in [*plain, *suspects]:
        steps.add(each)
    seen = []
    for _ in range(200):
        rows = scheduler.schedule()
        seen.append("".join(row.request.id for row in rows))
        for row in rows:
            if row.reads_logits:
                row.request.tokens.append(9)
            scheduler.commit_cached(row)
        if not any(each.is_quarantined for each in suspects):
            break
    assert set(seen) == {"c", "d", "ab", "abc"}  # the first suspect is free before the second
    assert all(("ab" in first) != ("ab" in then) for first, then in itertools.pairwise(seen))
    assert ids(row.request for row in scheduler.schedule()) == "abcd"


@dataclass(frozen=True)
class Sizes:
    page_size: int
    spare_pages: int
    max_num_seqs: int
    window: int
    spare_positions: int
    enable_prefix_caching: bool
    group: LayerGroup | None
    """Layers that see the last tokens only."""
    num_snapshots: int | None
    """Snapshots of states of recurrent layers; None if there are no such layers."""
    position_s: float | None
    """Seconds of a position if prompts are bounded by time, which is 20 ms or more a step."""


_SIZES = st.builds(
    Sizes,
    page_size=st.integers(1, 5),
    spare_pages=st.integers(0, 8),
    max_num_seqs=st.integers(1, 6),
    window=st.integers(0, 4),
    spare_positions=st.integers(1, 30),
    enable_prefix_caching=st.sampled_from([True, True, True, False]),
    group=st.sampled_from(
        [None, *(windowed(window=size) for size in (1, 2, 5, 9)), windowed(chunk=6)]
    ),
    num_snapshots=st.sampled_from([None, None, 0, 1, 2, 8]),
    position_s=st.sampled_from([None, 0.002, 0.007, 1.0]),
)


@settings(max_examples=300)
@given(_SIZES, st.integers(1, 12), st.randoms(use_true_random=False))
def test_every_step_keeps_the_rules(sizes: Sizes, count: int, source: random.Random) -> None:
    """Random arrivals, cancels, priorities, shared prefixes and failed steps on a small pool."""
    coming = [_random_request(str(index), source) for index in range(count)]
    scheduler = make_scheduler(
        max(-(-item.max_length // sizes.page_size) for item in coming) + sizes.spare_pages,
        page_size=sizes.page_size,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.window + sizes.spare_positions,
        window=sizes.window,
        enable_prefix_caching=sizes.enable_prefix_caching,
        group=sizes.group,
        num_snapshots=sizes.num_snapshots,
    )
    if sizes.position_s is not None:
        times = StepTimes((1, 101), (0,), ((0.001,), (0.001 + 100 * sizes.position_s,)))
        scheduler.prompt_room = PromptRoom(times, num_rows=1)
    steps, pauses = Steps(scheduler, source, sizes.group), Counter[Request]()
    for _ in range(5000):
        while coming and source.random() < 0.5:
            steps.add(coming.pop())
        alive = [*scheduler.running, *scheduler.waiting]
        if alive and source.random() < 0.03:
            leave = source.choice([scheduler.finish, scheduler.finish, scheduler.discard])
            leave(source.choice(alive))
            scheduler.check_integrity()
        if source.random() < 0.1:
            live = LiveDecoding(source.choice([0.5, 1.0]), is_exact=source.random() < 0.5)
            for request in alive:
                request.follow(live)
        _check_step(steps, source, pauses)
        if not (coming or scheduler.running or scheduler.waiting):
            break
    else:
        raise AssertionError("it does not end")
    check_all_free(scheduler)


def _random_request(name: str, source: random.Random) -> Request:
    shared = [[5] * 24, [5] * 8 + [6] * 16, [7] * 24][source.randrange(3)]
    prompt = shared[: source.randint(0, 24)] + source.choices([0, 1], k=source.randint(1, 12))
    request = request_of(
        name,
        prompt,
        source.randint(1, 20),
        threshold=source.choice([0.5, None, 1.0]),
        window=source.choice([None, None, 0, 1, 3]),
        tier=source.choice([Tier.DEFAULT, Tier.DEFAULT, *Tier]),
        tenant=source.choice(["a", "a", "b"]),
        mode=source.choice([Mode.THRESHOLD, Mode.EXACT]),
        outcomes=source.choice([None, None, Outcomes.ALL, Outcomes.LAST]),
    )
    request.key = source.choice("xyz")
    return request


def _check_step(steps: Steps, source: random.Random, pauses: Counter[Request]) -> None:
    scheduler, chosen = steps.scheduler, dict[Request, Masks]()

    def choose(requests: list[Request]) -> list[Masks]:
        assert not chosen, "windows are chosen once a step"
        assert all(request.plan.leaves_masks for request in requests)
        chosen.update(
            (each, requested_masks(each, source.randint(0, scheduler.window))) for each in requests
        )
        return [chosen[request] for request in requests]

    def check(rows: list[ScheduledRow]) -> None:
        _check_order(scheduler, rows, pauses)
        assert sum(row.num_positions for row in rows) <= scheduler.max_num_batched_tokens
        assert len({row.request for row in rows}) == len(rows)
        for row in rows:
            masks = chosen.get(row.request, requested_masks(row.request, scheduler.window))
            _check_row(row, masks, may_shrink=row.request in chosen)

    fails, alone = source.random() < 0.05, source.choice([0.0, 0.1])
    steps.step(choose=choose, check=check, fails=fails, fails_alone=alone)


def _check_order(scheduler: Scheduler, rows: list[ScheduledRow], pauses: Counter[Request]) -> None:
    """The first running request moves, if only in its turn, and nobody overtakes within a tier."""
    running, waiting = scheduler.running, scheduler.waiting
    assert len(running) <= scheduler.max_num_seqs
    assert bool(running) == bool(running or waiting)
    for first in running[:1]:
        pauses[first] = 0 if rows and rows[0].request is first else pauses[first] + 1
        assert pauses[first] <= (2 * scheduler.max_num_seqs if scheduler.prompt_room else 0)
    for request in waiting[:1]:
        behind = [item for item in running if _rank(item) > _rank(request)]
        assert all(item.options.tier.rank < request.options.tier.rank for item in behind)


def _rank(request: Request) -> tuple[int, int]:
    return -request.options.tier.rank, request.arrival


def _check_row(row: ScheduledRow, masks: Masks, *, may_shrink: bool) -> None:
    request = row.request
    assert 1 <= row.num_tokens <= request.num_uncached
    if row.reads_logits:
        assert row.num_tokens == request.num_uncached
        if may_shrink or request.plan.checks_drafts:
            assert row.num_drafts < len(masks)
            assert all(fed <= asked for fed, asked in zip(row.masks, masks, strict=False))
        else:
            assert row.masks == masks, "cut short"
    else:
        assert row.masks == (0,)
        assert row.num_tokens < request.num_uncached


# Order


def test_admission_is_first_come_first_served() -> None:
    scheduler = make_scheduler()
    for name, length in (("a", 150), ("b", 120), ("c", 2)):  # of 256 tokens, a and b do not fit
        scheduler.add(request_of(name, length))
    scheduler.schedule()
    assert (ids(scheduler.running), ids(scheduler.waiting)) == ("a", "bc")
    scheduler.finish(scheduler.running[0])
    scheduler.schedule()
    assert (ids(scheduler.running), ids(scheduler.waiting)) == ("bc", "")


def test_higher_priority_waits_in_front() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    low, middle, high = Tier.FLEX, Tier.DEFAULT, Tier.PRIORITY
    for name, tier in (("a", low), ("b", middle), ("c", low), ("d", high), ("e", middle)):
        scheduler.add(request_of(name, 3, tier=tier))
    assert ids(scheduler.waiting) == "dbeac"
    scheduler.schedule()
    assert (ids(scheduler.running), ids(scheduler.waiting)) == ("db", "eac")


def test_a_long_prompt_never_holds_decoding_requests_up() -> None:
    steps = Steps(make_scheduler(max_num_batched_tokens=24))
    long, short = request_of("long", 100), [request_of(name, 2, 50) for name in "ab"]
    steps.add(long, *short)
    while not long.num_output:
        rows = {row.request: row for row in steps.step(num_accepted=1)}
        assert all(rows[request].reads_logits for request in short)
        assert rows[long].num_tokens >= 24 - 2 * (2 + 4) or rows[long].reads_logits


def test_the_prompts_of_one_key_hold_those_of_another_up_for_a_step_at_most() -> None:
    scheduler = make_scheduler(500, max_num_seqs=20, max_num_batched_tokens=20)
    steps = Steps(scheduler)
    flood = [request_of(f"flood {number}", 40, 1) for number in range(10)]
    steps.add(*flood)
    steps.step()
    for number in range(3):
        short, long = request_of(f"short {number}", 5, 1), request_of(f"long {number}", 60, 1)
        short.key, long.key = "other", "third"
        steps.add(short, long)
        steps.step()
        assert short.num_cached == 5
        for _ in range(6):  # the other keys take turns
            steps.step()
        assert long.num_cached == 60
    assert [each.num_cached for each in flood[:6]] == [40] * 6  # in order


def test_decoding_requests_never_hold_the_first_request_up() -> None:
    """Two rows of 1 token and 4 masks would take all 10 positions."""
    steps = Steps(make_scheduler(max_num_batched_tokens=10, window=4))
    steps.add(*(request_of(name, 1, 50) for name in "ab"))
    steps.step(num_accepted=1)
    first = request_of("first", 20, tier=Tier.PRIORITY)
    steps.add(first)
    for _ in range(5):
        before = first.num_cached
        steps.step(num_accepted=1)
        assert first.num_cached > before


# Preemption


def test_priority_preempts_the_youngest_of_the_lowest_priority() -> None:
    steps = Steps(make_scheduler(max_num_seqs=4))
    low, middle, high = Tier.FLEX, Tier.DEFAULT, Tier.PRIORITY
    for name, tier in (("a", middle), ("b", low), ("c", low), ("d", middle)):
        steps.add(request_of(name, 3, 40, tier=tier))
    steps.step(num_accepted=1)
    steps.add(request_of("e", 3, 40, tier=high))
    steps.step(num_accepted=1)
    assert (ids(steps.scheduler.running), ids(steps.scheduler.waiting)) == ("eadb", "c")
    steps.add(request_of("f", 3, 40, tier=middle))
    steps.step(num_accepted=1)
    assert (ids(steps.scheduler.running), ids(steps.scheduler.waiting)) == ("eadf", "bc")
    assert steps.scheduler.num_preemptions == 2
    steps.add(request_of("g", 3, tier=middle))  # nobody is lower
    steps.step(num_accepted=1)
    assert (ids(steps.scheduler.running), ids(steps.scheduler.waiting)) == ("eadf", "gbc")
    steps.run()


def test_priority_preempts_as_many_as_it_needs_pages() -> None:
    steps = Steps(make_scheduler(12, page_size=4, max_num_batched_tokens=100))
    steps.add(*(request_of(name, 10) for name in "abc"))  # 3 pages each
    steps.step(num_accepted=1)
    steps.add(request_of("d", 20, tier=Tier.PRIORITY))  # 6 pages, 3 are free
    steps.step(num_accepted=1)
    assert (ids(steps.scheduler.running), ids(steps.scheduler.waiting)) == ("dab", "c")
    steps.run()


def test_no_request_is_preempted_if_that_would_not_free_enough_pages() -> None:
    steps = Steps(make_scheduler(12, page_size=4, max_num_batched_tokens=100))
    steps.add(request_of("a", 30, tier=Tier.PRIORITY), request_of("b", 8))  # 8 and 3 pages
    steps.step(num_accepted=1)
    steps.add(request_of("c", 20, tier=Tier.PRIORITY))
    steps.step(num_accepted=1)
    assert (ids(steps.scheduler.running), ids(steps.scheduler.waiting)) == ("ab", "c")
    assert steps.scheduler.num_preemptions == 0
    steps.run()


def test_shared_pages_do_not_count_as_freed() -> None:
    """Preempting b frees only its own page: it shares the others with a, which stays."""
    steps = Steps(make_scheduler(8, page_size=4, max_num_batched_tokens=100))
    prefix = list(range(16))
    steps.add(request_of("a", [*prefix, 50], tier=Tier.PRIORITY))
    steps.step(num_accepted=1)
    steps.add(request_of("b", [*prefix, 60]))
    steps.step(num_accepted=1)
    assert steps.scheduler.memory.pool.num_free == 2
    steps.add(request_of("c", 12, tier=Tier.PRIORITY))  # needs 4 pages, 3 at the most
    steps.step(num_accepted=1)
    assert (ids(steps.scheduler.running), ids(steps.scheduler.waiting)) == ("ab", "c")
    steps.run()


def test_the_youngest_is_preempted_when_pages_run_out() -> None:
    steps = Steps(make_scheduler(9, page_size=4, max_num_batched_tokens=100))
    oldest, middle, youngest = (request_of(name, 10, 24) for name in "abc")
    steps.add(oldest, middle, youngest)
    while not youngest.num_preemptions:
        steps.step(num_accepted=1)
    assert (youngest.pages, youngest.num_cached, youngest.arrival) == ([], 0, 2)
    assert (ids(steps.scheduler.running), ids(steps.scheduler.waiting)) == ("ab", "c")
    steps.run()
    assert oldest.num_preemptions == 0
    assert 0 < youngest.num_preemptions <= steps.scheduler.num_preemptions
    assert oldest.num_output == middle.num_output == youngest.num_output == 24


def test_a_preempted_request_finds_its_pages_again() -> None:
    steps = Steps(make_scheduler(max_num_seqs=1, max_num_batched_tokens=100))
    victim = request_of("a", 22, 40)
    steps.add(victim)
    steps.step(num_accepted=5)
    steps.step(num_accepted=5)  # 27 tokens are cached, 32 committed
    steps.add(request_of("b", 2, 1, tier=Tier.PRIORITY))
    steps.step()
    assert (victim.num_preemptions, victim.num_cached) == (1, 0)
    (row,) = steps.step()
    assert (row.request, row.num_tokens) == (victim, 32 - 24)
    assert victim.num_prefix_hit_tokens == 0, "only hits before the first preemption count"
    assert steps.scheduler.num_prefix_hit_tokens == 24
    steps.run()


def test_nothing_is_reserved_for_output() -> None:
    steps = Steps(make_scheduler(8, page_size=4, max_num_batched_tokens=100))
    steps.add(*(request_of(name, 4, 28) for name in "abcd"))  # each may come to fill the pool
    assert len(steps.step()) == 4
    steps.run()


# Prefix caching


@pytest.mark.parametrize("max_num_batched_tokens", [5, 100, 1024, 4096])
@pytest.mark.parametrize("num_pages", [64, 34 + 32 * 4])
def test_a_prefix_shared_by_requests_that_come_together_is_computed_once(
    max_num_batched_tokens: int, num_pages: int
) -> None:
    scheduler = make_scheduler(
        num_pages,
        page_size=16,
        max_num_seqs=32,
        max_num_batched_tokens=max_num_batched_tokens,
        window=4,
    )
    steps, prefix = Steps(scheduler), list(range(512))
    requests = [request_of(str(i), [*prefix, *[600 + i] * 20], 8) for i in range(32)]
    steps.add(*requests)
    most_held = 0
    while scheduler.running or scheduler.waiting:
        steps.step()
        held = {page for request in scheduler.running for page in request.pages}
        most_held = max(most_held, len(held))
    fed_twice = sum(request.num_preemptions for request in requests) * 40
    assert steps.num_computed <= 512 + 32 * (20 + 8) + fed_twice
    assert scheduler.num_prefix_hit_tokens >= 31 * 512
    assert most_held <= 32 + 32 * 2
    assert scheduler.memory.pool.num_free == num_pages


def test_a_fully_cached_prompt_still_feeds_its_last_token() -> None:
    steps = Steps(make_scheduler(max_num_batched_tokens=100))
    for length, fed in ((16, 4), (17, 1), (18, 2)):
        prompt = [length] * length
        steps.add(request_of("a", prompt, 1))
        steps.run()
        steps.add(again := request_of("b", prompt, 1))
        (row,) = steps.step()
        assert (row.num_tokens, row.reads_logits) == (fed, True)
        assert again.num_prefix_hit_tokens == 16 if length > 16 else 12
        assert again.num_prefix_hit_tokens == length - fed


def test_the_next_turn_finds_the_answer_in_the_prefix_cache() -> None:
    steps = Steps(make_scheduler(max_num_batched_tokens=100))
    steps.add(first := request_of("a", 10, 12))
    steps.run()
    assert len(first.tokens) == 22
    steps.add(second := request_of("b", [*first.tokens, 5, 6]))
    (row,) = steps.step()
    assert (second.num_prefix_hit_tokens, row.num_tokens) == (20, 4)


def test_tenants_share_no_prefixes() -> None:
    steps = Steps(make_scheduler(max_num_batched_tokens=100))
    prompt = list(range(20))
    for name, tenant, expected in (("a", "x", 0), ("b", "y", 0), ("c", "x", 16), ("d", "", 0)):
        steps.add(request := request_of(name, prompt, tenant=tenant))
        steps.run()
        assert request.num_prefix_hit_tokens == expected
    steps.add(*(request_of(name, list(range(50, 70)), tenant=name) for name in "xyz"))
    assert len(steps.step()) == 3, "nobody waits for another tenant's page"


def test_prefix_caching_can_be_off() -> None:
    steps = Steps(make_scheduler(max_num_batched_tokens=100, enable_prefix_caching=False))
    prompt = list(range(20))
    steps.add(request_of("a", prompt), request_of("b", prompt))
    assert [row.num_tokens for row in steps.step()] == [20, 20]
    steps.run()
    steps.add(third := request_of("c", prompt))
    assert [row.num_tokens for row in steps.step()] == [20]
    assert (third.num_prefix_hit_tokens, steps.scheduler.num_prefix_hit_tokens) == (0, 0)


def test_pages_computed_twice_are_kept_once() -> None:
    """Short prompts do not wait for each other, but keep only one copy of equal pages."""
    steps = Steps(make_scheduler(page_size=2, max_num_batched_tokens=100))
    first, second = (request_of(name, [5, 6, 7, 8, 9]) for name in "ab")
    steps.add(first, second)
    assert [row.num_tokens for row in steps.step(num_accepted=1)] == [5, 5]
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    steps.run()


def test_the_first_request_is_never_passed_over() -> None:
    """A request with the same prompt is half way when one of a higher tier arrives."""
    steps = Steps(make_scheduler(max_num_batched_tokens=10))
    prompt = list(range(40))
    steps.add(request_of("a", prompt))
    steps.step()
    steps.add(first := request_of("b", prompt, tier=Tier.PRIORITY))
    rows = steps.step()
    assert rows[0].request is first
    assert first.num_prefix_hit_tokens == 8


def test_a_request_is_not_passed_over_for_its_last_page() -> None:
    """The last token is always fed, so its page is never taken from the cache."""
    steps, prompt = Steps(make_scheduler(max_num_batched_tokens=100, window=2)), list(range(8))
    steps.add(request_of("a", prompt[:5], 1))
    steps.run()
    steps.add(request_of("b", [*prompt, 50, 51]), request_of("c", prompt))
    assert [row.num_tokens for row in steps.step()] == [6, 4]


def test_a_request_is_not_passed_over_inside_a_page() -> None:
    steps, prompt = Steps(make_scheduler(max_num_batched_tokens=6, window=2)), list(range(8))
    steps.add(request_of("a", [*prompt, *range(50, 60)], threshold=1.0))
    assert [row.num_tokens for row in steps.step()] == [6]
    steps.add(request_of("b", [*prompt, 70], threshold=1.0, tier=Tier.PRIORITY))
    assert [row.num_tokens for row in steps.step()] == [5, 1]


def test_cached_prefixes_are_evicted_for_requests() -> None:
    steps = Steps(make_scheduler(8, page_size=4, max_num_batched_tokens=100))
    steps.add(request_of("a", list(range(20)), 1))
    steps.run()
    steps.add(request_of("b", list(range(100, 125)), 4))
    steps.run()
    steps.add(again := request_of("c", list(range(20)), 1))
    steps.step()
    assert again.num_prefix_hit_tokens == 4, "of five pages, one was not needed by the other"


# Windows


@pytest.mark.parametrize(
    ("mode", "threshold", "window", "num_output", "expected"),
    [
        (Mode.THRESHOLD, 0.5, None, 0, 4),
        (Mode.THRESHOLD, 0.5, None, 5, 4),
        (Mode.THRESHOLD, 0.5, None, 7, 2),
        (Mode.THRESHOLD, 0.5, None, 9, 0),
        (Mode.THRESHOLD, 0.5, 2, 0, 2),
        (Mode.THRESHOLD, 0.5, 2, 8, 1),
        (Mode.THRESHOLD, 0.5, 9, 0, 4),
        (Mode.THRESHOLD, 0.5, 0, 0, 0),
        (Mode.THRESHOLD, 1.0, None, 0, 0),
        (Mode.THRESHOLD, 1.0, 3, 0, 0),
        (Mode.AR, 0.5, None, 0, 0),
    ],
)
def test_no_mask_is_fed_beyond_max_tokens(
    mode: Mode, threshold: float, window: int | None, num_output: int, expected: int
) -> None:
    request = make_request("one", [5, 6], 10, mode=mode, threshold=threshold, window=window)
    request.tokens += [7] * num_output
    assert request.plan.num_masks(4, request.num_left) == expected


def test_masks_are_chosen_only_for_requests_that_leave_them_to_the_engine() -> None:
    steps, asked = Steps(make_scheduler(max_num_batched_tokens=100)), list[str]()

    def choose(requests: list[Request]) -> list[Masks]:
        asked.append(ids(requests))
        return [(1,), (3,)][: len(requests)]

    steps.add(
        request_of("a", 3, 50),
        request_of("b", 3, 50, window=2),
        request_of("c", 3, 50, threshold=1.0),
        request_of("d", 3, 50),
    )
    rows = steps.step(choose=choose)
    assert asked == ["ad"]
    assert [row.num_masks for row in rows] == [1, 2, 0, 3]
    assert [row.num_masks for row in steps.step()] == [4, 2, 0, 4]


def test_chosen_windows_shrink_to_the_budget_and_pinned_ones_wait() -> None:
    for window, expected in ((None, [(1, 4), (1, 4), (1, 1)]), (4, [(1, 4), (1, 4)])):
        scheduler = make_scheduler(max_num_batched_tokens=12)
        steps = Steps(scheduler)
        steps.add(*(request_of(name, 1, 50, window=window) for name in "abc"))
        rows = steps.step(choose=lambda rows: [(4,)] * len(rows))
        assert [(row.num_tokens, row.num_masks) for row in rows] == expected


# A step that fails


def test_a_row_of_a_failed_step_is_scheduled_again() -> None:
    steps = Steps(make_scheduler(max_num_batched_tokens=30))
    steps.add(request_of("a", 20), request_of("b", 20))  # 3 masks behind the first
    first = steps.step(fails=True)
    assert [(row.num_tokens, row.request.num_cached) for row in first] == [(20, 0), (7, 0)]
    assert steps.step() == first
    steps.run()
