from __future__ import annotations

import pytest

from mars_platform.data.conversations import is_correct


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("Half of 144 is 72.\n#### 72", "72", True),
        ("Half of 144 is 72.\n####72 ", "72", True),
        ("#### 71\n#### 72", "72", True),
        ("#### 72\nAnswer: 71", "72", False),
        ("Answer: 71\n#### 72", "72", True),
        ("#### 72 clips", "72", False),
        ("#### 1,234", "1234", True),
        ("#### 1234", "1,234", True),
        ("#### 1,234,567.50", "1234567.5", True),
        ("#### 72.0", "72", True),
        ("#### -0.50", "-.5", False),
        ("#### -7", "7", False),
        ("#### +7", "7", True),
        ("#### 12,34", "1234", False),
        ("#### 007", "7", True),
        ("#### 0.1", "0.10000000000000000001", False),
        ("Answer: blue", "blue", True),
        ("Answer: Blue", "blue", False),
        ("Answer: 72", "Half of 144 is 72.\n#### 72", True),
        ("Answer: 71", "Half of 144 is 72.\n#### 72", False),
        ("72", "72", False),
        ("Answer: ", "", False),
    ],
)
def test_an_output_is_correct_if_it_ends_with_the_answer_behind_a_mark(response, answer, expected):
    assert is_correct(response, answer) is expected
