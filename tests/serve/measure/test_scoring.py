from __future__ import annotations

import pytest

from mars_serve.engine.decoding_options import FinishReason
from mars_serve.measure.evaluation.decoding import DecodedItem
from mars_serve.measure.evaluation.scoring import score


def decoded(
    name: str,
    *,
    tokens: int = 4,
    passes: int = 2,
    positions: int = 6,
    correct: bool | None = None,
    cut: bool = False,
    first: int = 0,
) -> DecodedItem:
    reason = FinishReason.LENGTH if cut else FinishReason.STOP
    return DecodedItem(name, (first, *range(1, tokens)), passes, positions, reason, correct)


def test_a_score_worked_out_by_hand() -> None:
    ours = [
        decoded("a", tokens=4, passes=1, positions=9, correct=True),
        decoded("b", tokens=2, passes=2, correct=False, cut=True),
        decoded("c", tokens=6, passes=3, correct=None, first=9),
    ]
    theirs = [
        decoded("c", tokens=6, passes=6),
        decoded("b", tokens=2, passes=2, correct=True),
        decoded("a", tokens=4, passes=4, correct=True),
    ]
    found = score(ours, theirs)
    assert (found.num_items, found.num_checkable) == (3, 2)
    assert found.accuracy == pytest.approx((0.5, 0.094531, 0.905469), abs=1e-6)  # Wilson, 1 of 2
    # lost 1 of 2: p = 1/4, q = 2/4, half width 1.959964 * sqrt((3/4 - 1/16) / 4)
    assert found.difference == pytest.approx((-0.5, -1.0, 0.562558), abs=1e-6)
    assert found.tokens_per_forward == pytest.approx((2.0, 0.868414, 3.131586), abs=1e-6)
    assert found.positions_per_forward.value == pytest.approx(21 / 6)
    assert found.identical == pytest.approx(2 / 3)
    assert found.mean_tokens == 4.0
    assert found.cut_off == pytest.approx(1 / 3)
