"""Drafts from a request's own text, and what is learnt from them."""

from __future__ import annotations

import random
from math import prod

import pytest

from decoding.engine_requests import make_request
from mars_platform.method.mode import Mode
from mars_serve.engine.drafting.lookup import LookupDrafter
from mars_serve.engine.request import Draft, Request

SOURCE = random.Random(7).sample(range(1000), 60)


def request_for(prompt: list[int], max_tokens: int = 200) -> Request:
    return make_request("r", prompt, max_tokens, mode=Mode.EXACT)


def follow(
    drafter: LookupDrafter,
    request: Request,
    tokens: list[int],
    own: list[Draft] | None = None,
    least_chance: float = 0.0,
) -> list[int]:
    """Commit tokens and return the drafts behind them."""
    rejected = request.drafts[len(tokens) :]
    request.tokens += tokens
    request.set_drafts(own or [])
    drafter.follow(request, rejected, least_chance)
    return [draft.token for draft in request.drafts]


def test_a_copy_is_drafted_from_its_source_and_gone_on_with_behind_a_change() -> None:
    drafter, request = LookupDrafter(8, 8), request_for(SOURCE)
    assert follow(drafter, request, [2000]) == []
    drafts = follow(drafter, request, SOURCE[:9])
    assert drafts == SOURCE[9 : 9 + len(drafts)]
    assert len(drafts) >= 3
    assert request.num_lookup_drafts == len(drafts)
    # A token of the copy is another one; nothing like the new end stands in the text.
    drafts = follow(drafter, request, [3000])
    assert drafts
    assert drafts == SOURCE[10 : 10 + len(drafts)]


def test_a_text_that_repeats_itself_is_drafted_past_its_end() -> None:
    drafter, request = LookupDrafter(8, 8), request_for([1, 2, 3] * 4)
    for _ in range(20):  # until the drafts are trusted
        drafts = follow(drafter, request, [1, 2, 3])
    assert drafts == [1, 2, 3, 1, 2, 3, 1, 2]


def test_suggestions_that_no_step_checked_are_learnt_from() -> None:
    right, wrong = LookupDrafter(8, 8), LookupDrafter(8, 8)
    chances = []
    for drafter, is_right in ((right, True), (wrong, False)):
        request = request_for(SOURCE * 2, 1000)
        for index in range(40):
            follow(drafter, request, SOURCE if is_right else [2000 + index, *SOURCE[:20]])
            request.set_drafts([])
        other = request_for(SOURCE)
        other.id = "other"
        follow(drafter, other, SOURCE[:20])
        chances.append(other.drafts[0].confidence if other.drafts else 0.0)
    assert chances[0] > 0.9
    assert chances[1] < 0.3


@pytest.mark.parametrize(("confidence", "kept"), [(0.99, 4), (0.1, 0)])
def test_drafts_of_masks_are_completed_or_replaced_by_what_gains_more(
    confidence: float, kept: int
) -> None:
    drafter, request = LookupDrafter(12, 12), request_for(SOURCE)
    follow(drafter, request, [2000])
    for place in range(0, 24, 4):
        follow(drafter, request, SOURCE[place : place + 4])
    own = [Draft(token, confidence) for token in SOURCE[28:32]]
    drafts = follow(drafter, request, SOURCE[24:28], own)
    assert drafts == SOURCE[28 : 28 + len(drafts)]
    assert len(drafts) > 4
    assert request.num_own_drafts == kept
    assert request.num_own_drafts + request.num_lookup_drafts == len(drafts)


def test_rejected_drafts_stand_in_where_nothing_else_drafts() -> None:
    drafter, request = LookupDrafter(8, 8), request_for([10, 20, 30])
    follow(drafter, request, [40])
    request.set_drafts([Draft(token, 0.9) for token in (50, 60, 70)])
    assert follow(drafter, request, [51]) == [60, 70]


def test_few_drafts_come_from_the_text_even_if_masks_give_more() -> None:
    drafter, request = LookupDrafter(2, 6), request_for(SOURCE)
    follow(drafter, request, [2000])
    for place in range(0, 24, 4):
        assert len(follow(drafter, request, SOURCE[place : place + 4])) <= 2
    sure = [Draft(token, 0.99) for token in SOURCE[28:32]]
    assert follow(drafter, request, SOURCE[24:28], sure) == SOURCE[28:34]
    unsure = [Draft(token, 0.1) for token in SOURCE[32:36]]
    assert follow(drafter, request, SOURCE[28:32], unsure) == SOURCE[32:34]
    assert (request.num_own_drafts, request.num_lookup_drafts) == (0, 2)


def test_no_draft_reaches_past_the_last_token() -> None:
    drafter, request = LookupDrafter(8, 8), request_for([1, 2, 3] * 6, 9)
    for left in range(8, 0, -1):
        drafts = follow(drafter, request, [1 + (8 - left) % 3])
        assert len(drafts) <= left - 1


@pytest.mark.parametrize(("least_chance", "first"), [(0.1, 6), (0.3, 8)])
def test_where_positions_are_dear_a_text_without_matches_is_searched_in_every_eighth_step(
    least_chance: float, first: int
) -> None:
    drafter, request = LookupDrafter(8, 8), request_for(SOURCE)
    for step in range(1, 6):
        assert follow(drafter, request, [2000 + step], least_chance=least_chance) == []
    copied = [SOURCE[:16], SOURCE[16:20], SOURCE[20:24], SOURCE[24:28]]
    found = [bool(follow(drafter, request, each, least_chance=least_chance)) for each in copied]
    assert found.index(True) + 6 == first
    assert all(found[first - 6 :])  # a search that finds drafts ends the pause


def test_nothing_is_drafted_below_the_least_chance() -> None:
    drafter, request = LookupDrafter(8, 8), request_for(SOURCE)
    follow(drafter, request, [2000])
    assert 1 < len(follow(drafter, request, SOURCE[:4])) < 8
    chances = [draft.confidence for draft in request.drafts]
    assert prod(chances) >= 0.05
    assert chances == sorted({*chances})  # each draft lengthens the match
    other = request_for(SOURCE)
    other.id = "other"
    follow(drafter, other, [2000])
    assert follow(drafter, other, SOURCE[:3], least_chance=0.9) == []


def test_a_long_prompt_gives_no_drafts_until_all_of_it_is_indexed() -> None:
    drafter, request = LookupDrafter(4, 4), request_for(list(range(5000)) + SOURCE)
    found = [bool(follow(drafter, request, [token])) for token in (0, 1, 2, 3)]
    assert found == [False, False, True, True]


def test_rejected_drafts_do_not_replace_those_of_masks() -> None:
    drafter, request = LookupDrafter(8, 8), request_for([10, 20, 30])
    follow(drafter, request, [40])
    request.set_drafts([Draft(token, 0.9) for token in (50, 60, 70)])
    assert follow(drafter, request, [51], [Draft(80, 0.1)]) == [80]


def test_nothing_is_learnt_from_drafts_behind_wrong_ones_of_masks() -> None:
    drafter, request = LookupDrafter(12, 12), request_for(SOURCE)

    def chance_of_a_copy() -> float:
        other = request_for(SOURCE)
        other.id = "other"
        follow(drafter, other, SOURCE[:20])
        drafter.forget(other.id)
        return other.drafts[0].confidence

    follow(drafter, request, SOURCE[:20], [Draft(token, 0.99) for token in SOURCE[20:24]])
    assert request.num_lookup_drafts > 0
    before = chance_of_a_copy()
    follow(drafter, request, list(range(3000, 3008)))
    assert chance_of_a_copy() == before
