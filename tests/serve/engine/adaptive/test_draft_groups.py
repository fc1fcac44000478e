from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.engine_requests import make_request, requested_masks
from mars_platform.method.mode import Mode
from mars_serve.engine.adaptive.acceptance_statistics import bin_of
from mars_serve.engine.adaptive.draft_groups import (
    Chances,
    candidates_of,
    chosen_masks,
    num_given_drafts,
)
from mars_serve.engine.decoding_options import Outcomes, Sampling
from mars_serve.engine.request import Draft, Request

MAX_WINDOW = 4
BINS = [index / 10 for index in range(12)]
CHANCES = Chances([0.9, 0.54, 0.27, 0.135], BINS)


def exact_row(
    drafts: Sequence[float], *, num_left: int = 100, temperature: float = 0.0, **options: Any
) -> Request:
    """Build a row in mode exact with drafts of these confidences."""
    sampling = Sampling(temperature)
    row = make_request(max_tokens=num_left, mode=Mode.EXACT, sampling=sampling, **options)
    row.drafts = [Draft(7, chance) for chance in drafts]
    return row


def test_a_draft_from_the_text_gains_the_chance_that_it_and_all_before_it_are_right() -> None:
    row = exact_row([0.8, 0.7, 0.6])
    row.num_own_drafts, row.num_lookup_drafts = 1, 2
    assert num_given_drafts(row) == 1
    *masks, first, second = candidates_of(row, CHANCES, MAX_WINDOW)
    assert len(masks) == 4 * MAX_WINDOW
    own = BINS[bin_of(0.8)]
    assert [first, second] == [(pytest.approx(own * gain), 0.0) for gain in (0.7, 0.7 * 0.6)]


def test_only_accepted_tokens_of_masks_that_are_not_checked_are_fed_again() -> None:
    row = make_request(max_tokens=4, mode=Mode.THRESHOLD)
    assert candidates_of(row, CHANCES, MAX_WINDOW) == [(0.9, 0.9), (0.54, 0.54), (0.27, 0.27)]
    for least_gain, num_masks in [(0.2, 3), (0.22, 2), (0.35, 2), (0.36, 1), (0.48, 0), (1.0, 0)]:
        assert chosen_masks(row, CHANCES, MAX_WINDOW, least_gain) == (num_masks,)


@pytest.mark.parametrize(
    ("least_gain", "masks"),
    [
        (1e-9, (4, 4, 4, 4)),
        # The outcomes have 0.2, 0.4, 0.36 and 0.04; the third draft is right with 0.04, and is
        # left out, so that the last outcome has 0.4.
        (0.1, (1, 2, 2)),
        (0.25, (0, 1, 1)),  # 0.36 tokens for 1.4 positions
        (0.3, (0, 0, 0)),
        (0.5, (0, 0)),
        (0.95, (0,)),
        (float("inf"), (0,)),
    ],
)
def test_masks_are_chosen_and_drafts_pruned_by_the_least_gain(
    least_gain: float, masks: tuple[int, ...]
) -> None:
    assert chosen_masks(exact_row([0.8, 0.5, 0.1]), CHANCES, 4, least_gain) == masks


@pytest.mark.parametrize(
    ("least_gain", "num_masks"), [(0.12, 4), (0.14, 2), (0.26, 2), (0.28, 1), (0.44, 1), (0.46, 0)]
)
def test_without_drafts_a_mask_must_gain_for_itself_and_for_the_draft_that_it_becomes(
    least_gain: float, num_masks: int
) -> None:
    chances = Chances([0.9, 0.54, 0.27, 0.2565], BINS)
    assert chosen_masks(exact_row([]), chances, MAX_WINDOW, least_gain) == (num_masks,)
    assert chosen_masks(exact_row([]), Chances([], BINS), 0, least_gain) == (0,)


@given(
    st.lists(st.floats(0.0, 1.0), max_size=MAX_WINDOW),
    st.integers(1, 12),
    st.sampled_from([0.0, 1.0]),
    st.floats(1e-6, 1.5),
)
def test_no_mask_is_fed_past_the_last_token(
    drafts: list[float], num_left: int, temperature: float, least_gain: float
) -> None:
    row = exact_row(drafts, num_left=num_left, temperature=temperature)
    for masks in (
        chosen_masks(row, CHANCES, MAX_WINDOW, least_gain),
        requested_masks(row, MAX_WINDOW),
    ):
        assert 1 <= len(masks) <= min(len(drafts), num_left - 1) + 1
        for outcome, num_masks in enumerate(masks):
            # The outcome gives outcome + 1 tokens, and the step after it one without drafts.
            assert 0 <= num_masks <= max(0, min(MAX_WINDOW, num_left - outcome - 2))
    gained, most = (
        sum(gain for gain, _ in candidates_of(row, CHANCES, MAX_WINDOW)),
        sum(CHANCES.masks),
    )
    assert gained <= most + 1e-9
    if num_left > 2 * MAX_WINDOW + 1:
        assert gained == pytest.approx(most)  # exactly one outcome occurs


def test_nothing_is_fed_behind_a_draft_that_ends_the_output() -> None:
    row = make_request(max_tokens=100, mode=Mode.EXACT)
    row.end_ids = frozenset({2})
    row.set_drafts([Draft(token, 0.9) for token in (7, 8, 9)])
    assert chosen_masks(row, CHANCES, MAX_WINDOW, 1e-9) == (4, 4, 4, 4)
    row.set_drafts([Draft(token, 0.9) for token in (7, 2, 9)], [Draft(2, 0.9)])
    assert [draft.token for draft in row.drafts] == [7, 2]
    assert (row.num_own_drafts, row.num_lookup_drafts) == (2, 0)
    assert chosen_masks(row, CHANCES, MAX_WINDOW, 1e-9) == (4, 4, 0)
    assert len(candidates_of(row, CHANCES, MAX_WINDOW)) == 2 * MAX_WINDOW
    row.set_drafts([Draft(7, 0.9), Draft(2, 0.5)])
    assert chosen_masks(row, CHANCES, MAX_WINDOW, 0.3) == (0, 1)  # the end is not fed
    row.set_drafts([Draft(7, 0.9)], [Draft(8, 0.9), Draft(2, 0.9), Draft(3, 0.9)])
    assert (row.num_own_drafts, row.num_lookup_drafts) == (1, 2)


@pytest.mark.parametrize(
    ("num_drafts", "options", "masks"),
    [
        (4, {"outcomes": Outcomes.ALL}, (4, 4, 4, 4, 4)),
        (4, {"outcomes": Outcomes.LAST}, (0, 0, 0, 0, 4)),
        (2, {"outcomes": Outcomes.ALL, "window": 2}, (2, 2, 2)),
        (2, {"window": 2}, (0, 0, 2)),
        (0, {"outcomes": Outcomes.LAST, "window": 3}, (3,)),
        (4, {"outcomes": Outcomes.ALL, "num_left": 4}, (2, 1, 0, 0)),
        (4, {"outcomes": Outcomes.LAST, "num_left": 1}, (0,)),
    ],
)
def test_pinned_outcomes_and_windows_are_fed_as_requested(
    num_drafts: int, options: dict[str, Any], masks: tuple[int, ...]
) -> None:
    assert requested_masks(exact_row([0.9] * num_drafts, **options), 4) == masks
