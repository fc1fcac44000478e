import pytest
from bench.beds.code import ends_in_loop


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        ([1, 2, 3] * 9, True),
        ([9, 8, 7, *[5] * 24], True),
        ([9, 8, 7, *[5] * 23], False),  # shorter than a loop has to be
        ([*range(20)] * 3, True),
        ([*range(20)] * 2, False),
        ([*range(40)] * 4, False),  # longer than a period may be
        ([4, 4, *([1, 2] * 11), 1], False),  # 23 tokens
        ([*([1, 2] * 20), 3], False),
        ([], False),
    ],
)
def test_a_loop_is_found_at_the_end_only(tokens, loops):
    assert ends_in_loop(tokens) is loops
