import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_platform.statistics import (
    difference_of_ratios,
    paired_difference,
    proportion,
    quantile,
    ratio_of_totals,
)

OUTCOMES = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


@given(
    st.lists(st.floats(allow_nan=False), min_size=1), st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0])
)
def test_a_quantile_is_the_value_that_numpy_rounds_up_to(values, share):
    found = quantile(values, share)
    assert found == np.quantile(values, share, method="higher")
    assert quantile([], share) is None


def test_a_paired_difference_equals_the_value_computed_by_hand():
    # 10 items, 3 won and 1 lost. Adjusted: p = 4/12 and q = 2/12, p - q = 1/6,
    # variance (1/2 - 1/36) / 12 = 17/432, half width 1.959964 * sqrt(17/432) = 0.388804
    ours = [True] * 3 + [False] + [True] * 4 + [False] * 2
    theirs = [False] * 3 + [True] + [True] * 4 + [False] * 2
    expected = (0.2, 1 / 6 - 0.388804, 1 / 6 + 0.388804)
    assert paired_difference(ours, theirs) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("outcome", [True, False])
def test_the_interval_of_equal_results_covers_zero(outcome):
    # p = q = 1/102: half width 1.959964 * sqrt(2/102/102)
    estimate, low, high = paired_difference([outcome] * 100, [outcome] * 100)
    assert estimate == 0
    assert (low, high) == pytest.approx((-0.027174, 0.027174), abs=1e-6)


@given(OUTCOMES)
def test_a_difference_lies_in_its_interval_within_plus_minus_one(outcomes):
    ours, theirs = zip(*outcomes, strict=True)
    estimate, low, high = paired_difference(ours, theirs)
    assert -1.0 <= low < high <= 1.0
    assert low <= estimate <= high
    assert estimate == pytest.approx((sum(ours) - sum(theirs)) / len(outcomes))


# --- proportions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_successes", "num_trials", "low", "high"),
    [
        (8, 10, 0.490162, 0.943318),  # Wilson's interval as published tables give it
        (0, 10, 0.0, 0.277533),  # z^2 / (n + z^2)
        (10, 10, 0.722467, 1.0),
        (1, 1, 0.206549, 1.0),
        (50, 100, 0.403832, 0.596168),
    ],
)
def test_proportions_equal_published_values(num_successes, num_trials, low, high):
    found = proportion(num_successes, num_trials)
    assert found == pytest.approx((num_successes / num_trials, low, high), abs=1e-6)


# --- ratios of totals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numerators", "denominators", "ratio", "half"),
    [
        # residuals 4 - 2*1 = 2, 2 - 2*2 = -2, 6 - 2*3 = 0: squares sum to 8,
        # half width 1.959964 * sqrt(3/2 * 8) / 6
        ([4, 2, 6], [1, 2, 3], 2.0, 1.131586),
        # over ones the ratio is the mean
        ([1, 5, 2, 8], [1] * 4, 4.0, 1.959964 * statistics.stdev([1, 5, 2, 8]) / 2),
        ([3, 6, 9], [1, 2, 3], 3.0, 0.0),
        ([6], [4], 1.5, math.inf),
    ],
)
def test_a_ratio_equals_the_value_computed_by_hand(numerators, denominators, ratio, half):
    found = ratio_of_totals(numerators, denominators)
    assert found == pytest.approx((ratio, ratio - half, ratio + half), abs=1e-6)


# --- differences of ratios ------------------------------------------------------------------------


def test_a_difference_of_ratios_equals_the_value_computed_by_hand():
    # ours 12/6 with residuals (2, -2, 0) / 6, theirs 9/3 with residuals (1, 0, -1) / 3: their
    # differences (0, -1/3, 1/3) have squares that sum to 2/9
    half = 1.959964 * math.sqrt(3 / 2 * 2 / 9)
    found = difference_of_ratios(([4, 2, 6], [1, 2, 3]), ([4, 3, 2], [1, 1, 1]))
    assert found == pytest.approx((-1.0, -1.0 - half, -1.0 + half), abs=1e-6)


def test_what_two_ratios_have_in_common_cancels_out():
    source = random.Random(0)
    ours = [source.gauss(0, 10) for _ in range(50)], [1 + source.random() for _ in range(50)]
    assert difference_of_ratios(ours, ours) == (0, 0, 0)
    shifted = [above + 0.3 * below for above, below in zip(*ours, strict=True)]
    assert difference_of_ratios((shifted, ours[1]), ours) == pytest.approx((0.3, 0.3, 0.3))
    assert difference_of_ratios(([6], [4]), ([1], [1])) == (0.5, -math.inf, math.inf)
