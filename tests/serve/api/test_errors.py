from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_serve.api.errors import retry_after

DRAWS = st.floats(0, 1, exclude_max=True)


@given(st.floats(0, 1e9), DRAWS)
def test_retry_after_lies_between_a_second_and_a_minute(wait_s, drawn):
    assert 1 <= retry_after(wait_s, lambda: drawn) <= 60


@given(st.floats(0, 1e9), st.floats(0, 1e9), DRAWS)
def test_retry_after_grows_with_the_wait(one_s, other_s, drawn):
    shorter, longer = sorted((one_s, other_s))
    assert retry_after(shorter, lambda: drawn) <= retry_after(longer, lambda: drawn)


@given(st.floats(0, 40), DRAWS)
def test_nobody_is_told_to_come_back_too_early(wait_s, drawn):
    assert retry_after(wait_s, lambda: drawn) >= wait_s


@pytest.mark.parametrize(("wait_s", "expected"), [(0.2, {1, 2, 3}), (20, set(range(20, 32)))])
def test_clients_that_were_refused_together_do_not_come_back_together(wait_s, expected):
    drawn = (number / 1000 for number in range(1000))
    assert {retry_after(wait_s, lambda: next(drawn)) for _ in range(1000)} == expected


def test_the_longest_waits_are_spread_too():
    drawn = (number / 1000 for number in range(1000))
    assert {retry_after(1e6, lambda: next(drawn)) for _ in range(1000)} == set(range(40, 61))
