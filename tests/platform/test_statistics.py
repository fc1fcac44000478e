import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_platform.statistics import paired_difference

OUTCOMES = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


def test_known_value():
    # 10 items, 3 won and 1 lost. Adjusted: p = 4/12 and q = 2/12, p - q = 1/6,
    # variance (1/2 - 1/36) / 12 = 17/432, half width 1.959964 * sqrt(17/432) = 0.388804
    ours = [True] * 3 + [False] + [True] * 4 + [False] * 2
    theirs = [False] * 3 + [True] + [True] * 4 + [False] * 2
    expected = (0.2, 1 / 6 - 0.388804, 1 / 6 + 0.388804)
    assert paired_difference(ours, theirs) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("outcome", [True, False])
def test_equal_results_cover_zero(outcome):
    # p = q = 1/102: half width 1.959964 * sqrt(2/102/102)
    estimate, low, high = paired_difference([outcome] * 100, [outcome] * 100)
    assert estimate == 0
    assert (low, high) == pytest.approx((-0.027174, 0.027174), abs=1e-6)


def test_balanced_wins_and_losses_cover_zero_symmetrically():
    estimate, low, high = paired_difference([True, False] * 20, [False, True] * 20)
    assert estimate == 0
    assert low == pytest.approx(-high)
    assert high > 0.2


def test_clear_difference_excludes_zero():
    estimate, low, high = paired_difference([True] * 30 + [False] * 10, [False] * 40)
    assert estimate == 0.75
    assert 0.5 < low < 0.75 < high < 0.9


def test_more_items_narrow_the_interval():
    ours, theirs = [True, True, False, True], [True, False, False, True]
    _, low, high = paired_difference(ours * 5, theirs * 5)
    _, low_of_many, high_of_many = paired_difference(ours * 50, theirs * 50)
    assert high_of_many - low_of_many < (high - low) / 2


@given(OUTCOMES)
@settings(deadline=None)
def test_swapping_the_sides_mirrors_the_interval(outcomes):
    ours, theirs = zip(*outcomes, strict=True)
    estimate, low, high = paired_difference(ours, theirs)
    assert paired_difference(theirs, ours) == pytest.approx((-estimate, -high, -low))


@given(OUTCOMES)
@settings(deadline=None)
def test_bounds_are_differences_of_rates(outcomes):
    ours, theirs = zip(*outcomes, strict=True)
    estimate, low, high = paired_difference(ours, theirs)
    assert -1.0 <= low < high <= 1.0
    assert low <= estimate <= high
    assert estimate == pytest.approx((sum(ours) - sum(theirs)) / len(outcomes))


@given(OUTCOMES, st.randoms())
@settings(deadline=None)
def test_order_of_the_items_does_not_matter(outcomes, random):
    shuffled = random.sample(outcomes, len(outcomes))
    first, second = (paired_difference(*zip(*o, strict=True)) for o in (outcomes, shuffled))
    assert first == second


def test_sides_of_different_length():
    with pytest.raises(ValueError, match="shorter"):
        paired_difference([True, False], [True])
