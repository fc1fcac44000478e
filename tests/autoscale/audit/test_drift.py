"""The detectors of a frontier that no longer holds."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_autoscale.audit.counts import AuditCounts, AuditKey, AuditOutcome
from mars_autoscale.audit.drift import Drift
from mars_autoscale.model.expectations import Expectation, expectation_of
from mars_platform.tier import Tier

EXPECTED = (Expectation(0.9, 0.001), Expectation(0.8, 0.002))
LENGTH = 80
"""Tokens of an output; about 15% of them diverge at τ = .8 by what is expected."""


def outcomes(
    rate: float,
    seed: int,
    threshold: float = 0.8,
    *,
    is_plain: bool = True,
    groups: Sequence[int] = (0,),
) -> Iterator[Mapping[AuditKey, AuditCounts]]:
    """Yield audits whose tokens diverge with a rate."""
    draw = np.random.default_rng(seed)
    while True:
        position = int(draw.geometric(rate))
        has_diverged = position <= LENGTH
        outcome = AuditOutcome(
            Tier.DEFAULT,
            is_plain,
            {threshold: min(position, LENGTH)},
            threshold if has_diverged else None,
            group=int(draw.choice(groups)),
        )
        yield outcome.counts()


def audits_to_alarm(
    drift: Drift, source: Iterator[Mapping[AuditKey, AuditCounts]], most: int
) -> int | None:
    for number in range(1, most + 1):
        drift = drift.heard(next(source), now_s=float(number))
        if drift.is_refuted:
            assert drift.refuted_s == number
            return number
    return None


def test_losses_of_three_times_what_was_said_are_found_within_300_audits() -> None:
    found = [audits_to_alarm(Drift(EXPECTED), outcomes(0.006, seed), 1000) for seed in range(40)]
    assert None not in found
    assert np.median([each for each in found if each]) <= 300


@pytest.mark.parametrize("rate", [0.002, 0.001, 0.0021])
def test_a_frontier_that_holds_raises_no_alarm(rate: float) -> None:
    """The last one holds almost: what is 5% worse than said is no reason to stop."""
    for seed in range(2):
        assert audits_to_alarm(Drift(EXPECTED), outcomes(rate, seed), 5000) is None


def in_turn(*sources: Iterator[Mapping[AuditKey, AuditCounts]]) -> Iterator[Any]:
    return chain.from_iterable(zip(*sources, strict=False))


@pytest.mark.parametrize("num_others", [1, 3])
def test_no_tenant_raises_the_alarm_or_spends_the_budget_with_prompts_of_its_choice(
    num_others: int,
) -> None:
    for seed in range(2):
        chosen = outcomes(0.3, seed, groups=[7])
        others = outcomes(0.002, seed, groups=range(num_others))
        drift, told = Drift(EXPECTED), in_turn(chosen, chosen, others)
        for number, audit in enumerate(islice(told, 3000)):
            drift = drift.heard(audit, float(number))
        assert drift.whole.has_alarmed
        assert not drift.is_refuted
        assert drift.evidence < 1
        assert drift.loss_factor < 1.5


@pytest.mark.parametrize(("num_tenants", "most"), [(2, 800), (4, 500), (60, 400)])
def test_a_drift_that_all_tenants_see_is_found(num_tenants: int, most: int) -> None:
    found = [
        audits_to_alarm(Drift(EXPECTED), outcomes(0.006, seed, groups=range(num_tenants)), 2000)
        for seed in range(12)
    ]
    assert None not in found
    assert np.median([each for each in found if each]) <= most


@pytest.mark.parametrize("num_tenants", [2, 12])
def test_tenants_raise_no_alarm_while_the_frontier_holds(num_tenants: int) -> None:
    for seed in range(2):
        right = outcomes(0.002, seed, groups=range(num_tenants))
        assert audits_to_alarm(Drift(EXPECTED), right, 2500) is None


def test_an_alarm_of_one_tenant_alone_lasts_until_enough_of_others_is_audited() -> None:
    drift, alone = Drift(EXPECTED), outcomes(0.3, 1, groups=[7])
    for number in range(100):
        drift = drift.heard(next(alone), float(number))
    assert drift.is_refuted
    refuted_s, others = drift.refuted_s, outcomes(0.002, 2, groups=[1])
    for number in range(100, 119):
        drift = drift.heard(next(others), float(number))
    assert drift.refuted_s == refuted_s
    assert not drift.heard(next(others), 119.0).is_refuted


def test_a_change_is_found_after_a_long_time_without_one() -> None:
    drift, right = Drift(EXPECTED), outcomes(0.002, 1)
    for number in range(5000):
        drift = drift.heard(next(right), float(number))
    found = audits_to_alarm(drift, outcomes(0.006, 2), 1000)
    assert found is not None
    assert found < 400, "what was right before does not hide what is wrong now"


def test_an_alarm_stays_until_the_frontier_is_another() -> None:
    drift = Drift(EXPECTED).heard({AuditKey(Tier.FLEX, 0.8, True): AuditCounts(90, 900, 90)}, 5.0)
    assert drift.refuted_s == 5.0
    calm = {AuditKey(Tier.FLEX, 0.8, True): AuditCounts(900, 90_000, 0)}
    assert drift.heard(calm, 6.0).refuted_s == 5.0
    assert drift.expecting(EXPECTED) is drift
    other = (Expectation(0.9, 0.002),)
    assert drift.expecting(other) == Drift(other)
    assert pickle.loads(pickle.dumps(drift)) == drift  # noqa: S301 - made here


@pytest.mark.parametrize(
    "key",
    [
        AuditKey(Tier.DEFAULT, 0.8, False),
        AuditKey(Tier.DEFAULT, 0.7, True),
        AuditKey(Tier.DEFAULT, 1.0, True),
    ],
)
def test_what_the_frontier_says_nothing_about_is_only_counted(key: AuditKey) -> None:
    counts = AuditCounts(100, 1000, 100)
    drift = Drift(EXPECTED).heard({key: counts}, 1.0)
    assert not drift.is_refuted
    assert (drift.evidence, drift.loss_factor) == (0.0, 1.0)
    assert drift.tally == {key: counts}
    assert not Drift().heard({AuditKey(Tier.DEFAULT, 0.8, True): counts}, 1.0).is_refuted


def test_a_threshold_is_compared_with_the_next_measured_one_below_it() -> None:
    found = [expectation_of(EXPECTED, tau) for tau in (1.0, 0.95, 0.9, 0.85, 0.8, 0.79)]
    assert found == [None, EXPECTED[0], EXPECTED[0], EXPECTED[1], EXPECTED[1], None]


def test_the_loss_factor_follows_the_audits_and_forgets() -> None:
    key = AuditKey(Tier.DEFAULT, 0.8, True)
    drift = Drift(EXPECTED)
    assert drift.loss_factor == 1.0
    drift = drift.heard({key: AuditCounts(100, 10_000, 40)}, 1.0)  # 20 are expected
    assert drift.loss_factor == pytest.approx((40 + 10) / (20 + 10))
    better = drift
    for _ in range(20):
        better = better.heard({key: AuditCounts(100, 10_000, 10)}, 2.0)
    assert better.loss_factor == 1.0, "what is better than said spends no less"


@given(
    st.dictionaries(
        st.builds(
            AuditKey,
            st.sampled_from(list(Tier)),
            st.sampled_from([0.7, 0.8, 0.85, 0.9, 1.0]),
            st.booleans(),
        ),
        st.builds(
            lambda n, d: AuditCounts(n, 50 * n, min(d, n)),
            *[st.integers(0, 10**6)] * 2,
        ),
        max_size=5,
    ),
    st.floats(1e-9, 1.0),
)
def test_no_counts_make_figures_that_are_not_finite(
    tally: Mapping[AuditKey, AuditCounts], divergence: float
) -> None:
    expected = (EXPECTED[0], Expectation(0.8, divergence))
    drift = Drift(expected).heard(tally, 1.0).heard(tally, 2.0)
    assert math.isfinite(drift.evidence)
    assert drift.evidence >= 0
    assert 1.0 <= drift.loss_factor < math.inf
    assert drift.is_refuted or drift.evidence < 1
