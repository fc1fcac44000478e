"""95% intervals of what was measured on a sample of items. Knows no model and no text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_Z95 = 1.959964


class Estimate(NamedTuple):
    """An estimated value and its 95% interval."""

    value: float
    low: float
    high: float


def proportion(num_successes: int, num_trials: int) -> Estimate:
    """A success rate with Wilson's score interval (JASA 22(158), 1927).

    The interval stays inside [0, 1] and has a width even where all trials, or none, succeed.
    """
    rate, weight = num_successes / num_trials, _Z95**2 / num_trials
    center = (rate + weight / 2) / (1 + weight)
    half = math.sqrt(weight * (rate * (1 - rate) + weight / 4)) / (1 + weight)
    # the ends pass the rate by rounding alone, where it is 0 or 1
    return Estimate(rate, max(min(center - half, rate), 0.0), min(max(center + half, rate), 1.0))


def paired_difference(ours: Sequence[bool], theirs: Sequence[bool]) -> Estimate:
    """Difference of two success rates over the same items.

    The interval is Bonett and Price's adjusted Wald interval (Journal of Educational and
    Behavioral Statistics 37(4), 2012), which stays sensible where few items, or none, differ.

    Args:
        ours: success of each item.
        theirs: success of the same items, in the same order.

    Returns:
        Rate of ``ours`` minus rate of ``theirs``.
    """
    num = len(ours)
    gained = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    lost = sum(b and not a for a, b in zip(ours, theirs, strict=True))
    up, down = (gained + 1) / (num + 2), (lost + 1) / (num + 2)
    half = _Z95 * math.sqrt((up + down - (up - down) ** 2) / (num + 2))
    return Estimate((gained - lost) / num, max(up - down - half, -1.0), min(up - down + half, 1.0))


def ratio_of_totals(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Total of the numerators over total of the denominators, as a property of the items' source.

    The interval is the ratio estimator's (Cochran, Sampling Techniques, section 6.4): the items
    are the sample, and what varies is each one's numerator about the ratio times its denominator.
    One item tells nothing of that, so that its interval is infinite.

    Args:
        numerators: of each item.
        denominators: of the same items, in the same order; their total is positive.
    """
    num, total = len(numerators), math.fsum(denominators)
    ratio = math.fsum(numerators) / total
    if num == 1:
        return Estimate(ratio, -math.inf, math.inf)
    squares = math.fsum(
        (above - ratio * below) ** 2 for above, below in zip(numerators, denominators, strict=True)
    )
    half = _Z95 * math.sqrt(num / (num - 1) * squares) / total
    return Estimate(ratio, ratio - half, ratio + half)
