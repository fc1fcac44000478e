"""Intervals for proportions measured on the same items."""

from __future__ import annotations

import math
from collections.abc import Sequence

_Z95 = 1.959964


def paired_difference(ours: Sequence[bool], theirs: Sequence[bool]) -> tuple[float, float, float]:
    """Difference of two success rates over the same items, with a 95% interval.

    The interval is Bonett and Price's adjusted Wald interval (Journal of Educational and
    Behavioral Statistics 37(4), 2012), which stays sensible where few items, or none, differ.

    Args:
        ours: success of each item.
        theirs: success of the same items, in the same order.

    Returns:
        Rate of ``ours`` minus rate of ``theirs``, and the interval's lower and upper end.
    """
    num = len(ours)
    gained = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    lost = sum(b and not a for a, b in zip(ours, theirs, strict=True))
    up, down = (gained + 1) / (num + 2), (lost + 1) / (num + 2)
    half = _Z95 * math.sqrt((up + down - (up - down) ** 2) / (num + 2))
    return (gained - lost) / num, max(up - down - half, -1.0), min(up - down + half, 1.0)
