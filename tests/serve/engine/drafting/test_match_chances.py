from __future__ import annotations

from itertools import pairwise

import pytest

from mars_serve.engine.drafting.match_chances import LONGEST, MatchChances


def observe(chances: MatchChances, outcomes: str, length: int = 3) -> None:
    for outcome in outcomes:
        chances.observe(length, is_right=outcome == "+")


def test_before_any_evidence_longer_matches_are_trusted_more() -> None:
    chances = MatchChances().of
    assert all(0 < one < other < 1 for one, other in pairwise(chances[: LONGEST + 1]))
    assert len(chances) == LONGEST + 2


def test_newer_evidence_outweighs_older() -> None:
    chances = MatchChances(MatchChances())
    observe(chances, "+" * 200)
    assert chances.of[3] > 0.95
    observe(chances, "-" * 200)
    assert chances.of[3] < 0.15
    assert chances.of[4] == MatchChances().of[4]


def test_a_request_starts_from_the_evidence_of_all_and_departs_from_it_by_its_own() -> None:
    shared = MatchChances()
    first = MatchChances(shared)
    observe(first, "-" * 100)
    assert shared.of[3] < 0.05
    other = MatchChances(shared)
    assert other.of == pytest.approx(shared.of)
    observe(other, "+" * 40)
    assert other.of[3] > 0.8
    assert other.of[3] > shared.of[3] + 0.3
