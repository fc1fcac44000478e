from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_autoscale.audit.counts import (
    AuditCounts,
    AuditKey,
    AuditOutcome,
    added,
    rounded_down,
    since,
)
from mars_platform.tier import Tier

KEY = AuditKey(Tier.DEFAULT, 0.9, True)
OTHER = AuditKey(Tier.FLEX, 0.8, False)


@pytest.mark.parametrize(
    ("threshold", "rounded"),
    [(0.95, 0.95), (0.9, 0.9), (0.29, 0.29), (0.999, 0.99), (0.001, 0.01), (0.07, 0.07)],
)
def test_thresholds_are_rounded_down_to_hundredths(threshold: float, rounded: float) -> None:
    assert rounded_down(threshold) == rounded


def test_an_outcome_counts_at_each_threshold() -> None:
    outcome = AuditOutcome(
        Tier.FLEX,
        is_plain=True,
        tokens={0.9: 12, 0.8: 5},
        diverged_at=0.9,
    )
    assert outcome.counts() == {
        AuditKey(Tier.FLEX, 0.9, True): AuditCounts(1, 12, 1),
        AuditKey(Tier.FLEX, 0.8, True): AuditCounts(1, 5, 0),
    }


def test_thresholds_of_the_same_hundredth_count_together() -> None:
    outcome = AuditOutcome(Tier.DEFAULT, True, {0.951: 3, 0.959: 4}, diverged_at=0.951)
    assert outcome.counts() == {AuditKey(Tier.DEFAULT, 0.95, True): AuditCounts(2, 7, 1)}


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 50), st.booleans()), max_size=30))
def test_differences_of_a_growing_tally_add_up_to_it(
    outcomes: list[tuple[bool, int, bool]],
) -> None:
    tally, told, summed = {}, {}, {}  # type: ignore[var-annotated]
    for is_default, num_tokens, has_diverged in outcomes:
        tier = Tier.DEFAULT if is_default else Tier.FLEX
        diverged_at = 0.9 if has_diverged else None
        tally = added(tally, AuditOutcome(tier, True, {0.9: num_tokens}, diverged_at).counts())
        if num_tokens % 3:  # some reports are lost
            summed = added(summed, since(tally, told))
            told = tally
    assert added(summed, since(tally, told)) == tally


def test_counts_that_have_fallen_count_whole() -> None:
    before = {KEY: AuditCounts(10, 100, 5), OTHER: AuditCounts(1, 1, 0)}
    now = {KEY: AuditCounts(2, 20, 1), OTHER: AuditCounts(1, 1, 0)}
    assert since(now, before) == {KEY: AuditCounts(2, 20, 1)}
