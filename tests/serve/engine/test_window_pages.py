"""Pages of layers that see no more than the last tokens of a text, without a model."""

from __future__ import annotations

import random

import pytest

from decoding.scheduler_steps import Steps, make_scheduler, request_of, windowed
from mars_serve.engine.attention.interface import LayerGroup
from mars_serve.engine.request import Request

PAGE = 4


def steps_of(group: LayerGroup, **sizes: int) -> Steps:
    return Steps(make_scheduler(256, page_size=PAGE, group=group, **sizes), group=group)


def held(steps: Steps, request: Request) -> list[int]:
    """Return which pages of its text a request holds for the layers with windows."""
    none = steps.scheduler.memory.windows.pool.num_pages
    return [index for index, page in enumerate(request.window_pages) if page != none]


def hits(steps: Steps, prompt: list[int]) -> int:
    """Run a request and return the tokens that it found in the prefix cache."""
    steps.add(request := request_of("hit", prompt, 1))
    steps.run()
    return request.num_prefix_hit_tokens


def compute_another(steps: Steps) -> None:
    """Compute a text that needs more pages of windows than there are."""
    steps.add(request_of(f"another {steps.num_computed}", 160, 1))
    steps.run()


@pytest.mark.parametrize(
    ("reach", "first"),
    [
        ({"window": 1}, 10),
        ({"window": 2}, 9),
        ({"window": 5}, 9),
        ({"window": 6}, 8),
        ({"window": 64}, 0),
        ({"chunk": 8}, 10),
        ({"chunk": 16}, 8),
        ({"chunk": 6}, 9),
    ],
)
@pytest.mark.parametrize("inside", [0, 1, 3])
def test_a_row_holds_what_is_seen_behind_its_last_full_page(
    reach: dict[str, int], first: int, inside: int
) -> None:
    steps = steps_of(windowed(**reach))
    steps.add(request := request_of("long", 40 + inside, 3, threshold=1.0))
    while request.num_cached < 40 + inside:
        steps.step()
    assert held(steps, request) == list(range(first, -(-request.num_cached // PAGE)))
    assert len(request.pages) >= 40 // PAGE


def test_all_rows_may_reach_into_another_page_at_once() -> None:
    group, num_rows = windowed(window=5), 12
    scheduler = make_scheduler(
        400,
        page_size=16,
        group=group,
        max_num_seqs=num_rows,
        max_num_batched_tokens=3 * num_rows,
        window=1,
    )
    steps = Steps(scheduler, group=group)
    rows = [request_of(str(index), 31, 40) for index in range(num_rows)]
    steps.add(*rows)
    scheduler.max_num_batched_tokens = 400  # so that all prompts end at once
    steps.step(num_accepted=2)
    scheduler.max_num_batched_tokens = 3 * num_rows
    assert len(steps.step(fails=True)) == num_rows
    assert [held(steps, request) for request in rows] == [[0, 1, 2]] * num_rows
    steps.run()


def test_prompts_of_failed_steps_keep_no_pages_from_others() -> None:
    group = windowed(window=5)
    sizes = {"page_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 200}
    scheduler = make_scheduler(400, group=group, enable_prefix_caching=False, **sizes)
    steps = Steps(scheduler, group=group)
    prompts = [request_of(str(index), 300, 1) for index in range(4)]
    for request in prompts:
        request.key = request.id
    steps.add(*prompts)
    fed = [row.request.id for _ in prompts for row in steps.step(fails=True)]
    assert set(fed) == {"0", "1", "2", "3"}
    steps.run()


def test_a_prefix_is_found_only_with_the_window_behind_it() -> None:
    steps = steps_of(windowed(window=7), max_num_seqs=1)
    text = list(range(100, 160))
    assert hits(steps, text) == 0
    assert hits(steps, [*text, 5]) == 60
    compute_another(steps)
    assert hits(steps, text[:40]) == 0, "other layers still have these pages"
    assert hits(steps, [*text[:40], 5]) == 40


def test_pages_at_which_texts_part_outlast_those_inside_texts() -> None:
    """Kept are the ends of texts and of prompts, and what a second request has shared."""
    steps = steps_of(windowed(window=7), max_num_seqs=1, num_spare=12)
    text = list(range(100, 160))
    steps.add(first := request_of("first", text, 24, threshold=1.0))
    steps.run()
    compute_another(steps)
    compute_another(steps)
    assert hits(steps, [*first.tokens, 5]) == 80
    assert hits(steps, [*text, 5]) == 60
    assert hits(steps, [*text[:40], *range(30)]) < 40
    compute_another(steps)
    compute_another(steps)
    assert hits(steps, [*text[:40], *range(50, 80)]) == 40


def test_what_a_discarded_request_gave_back_is_found_by_nobody() -> None:
    steps = steps_of(windowed(window=5))
    text = list(range(100, 140))
    steps.add(failing := request_of("failing", text, 9, threshold=1.0))
    while failing.num_cached < 40:
        steps.step()
    steps.scheduler.discard(failing)
    steps.window_slots.clear()
    assert hits(steps, [*text, 5]) == 0
    assert hits(steps, [*text, 6]) == 40


def test_random_texts_find_their_prefixes_with_few_pages() -> None:
    """Every read of `Steps` is of the reader's own prefix, however few windows are kept."""
    source, num_found = random.Random(0), 0
    for reach in ({"window": 3}, {"window": 9}, {"chunk": 6}):
        steps = Steps(
            make_scheduler(
                60, page_size=2, group=windowed(**reach), max_num_batched_tokens=9, window=2
            ),
            source,
            windowed(**reach),
        )
        stems = [[stem] * 30 for stem in range(5, 9)]
        for index in range(60):
            stem = source.choice(stems)[: source.randint(1, 30)]
            steps.add(request_of(str(index), [*stem, *source.choices([0, 1], k=4)], 6))
            for _ in range(source.randrange(6)):
                steps.step(fails=source.random() < 0.1)
        steps.run()
        num_found += steps.scheduler.num_prefix_hit_tokens
    assert num_found > 300
