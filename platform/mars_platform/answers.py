"""Checkable answers: a response states its answer behind a mark, at its end."""

ANSWER_MARK = "Answer:"


def is_correct(response: str, answer: str) -> bool:
    """Whether a response ends with the mark and this answer, and nothing but it."""
    _, mark, given = response.rpartition(ANSWER_MARK)
    return bool(mark) and given.strip() == answer
