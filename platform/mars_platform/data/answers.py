"""Scores responses that state their answer behind a mark, at their end.

Imports no Ray, torch or HTTP library.
"""

from __future__ import annotations

import re
from decimal import Decimal

ANSWER_MARK = "Answer:"
_MARKS = re.compile(rf"{ANSWER_MARK}|####")
_NUMBER = re.compile(r"[-+]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?")


def is_correct(response: str, answer: str) -> bool:
    """Return whether a response ends with a mark followed by exactly this answer.

    The marks are ``Answer:`` and GSM8K's ``####``; the last one counts. White space around the
    answer does not matter, and numbers are compared by value: 1,234 is 1234 and 72.0 is 72.
    Everything else is compared exactly.

    Args:
        response: text that the model wrote.
        answer: the expected answer, alone or at the end of a worked solution behind a mark.
    """
    given = _behind_mark(response)
    return bool(given) and _value(given) == _value(_behind_mark(answer) or answer.strip())


def _behind_mark(text: str) -> str:
    """Return the text behind the last mark; the empty text if there is no mark."""
    return _MARKS.split(text)[-1].strip() if _MARKS.search(text) else ""


def _value(text: str) -> Decimal | str:
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else text
