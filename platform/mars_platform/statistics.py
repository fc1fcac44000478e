"""Quantiles, ranges over rounds, and 95% intervals of rates and ratios of a sample of items.

Imports no Ray, torch or HTTP library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

_Z95 = 1.959964


class Estimate(NamedTuple):
    """An estimated value and its 95% interval."""

    value: float
    low: float
    high: float


class RoundRange(NamedTuple):
    """A median over the rounds, with the lowest and the highest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> RoundRange:
        """Return the range of at least one value."""
        return cls(median(values), min(values), max(values))

    def text(self, spec: str) -> str:
        """Return the range in words, with the format ``spec`` for each number.

        One round has no range.
        """
        middle, low, high = (format(part, spec) for part in self)
        return middle if low == high else f"{middle} ({low}-{high})"


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value at a quantile, such as 0.99; None if there are no values.

    It is one of the values: some may be infinite, and those cannot be interpolated.
    """
    if not values:
        return None
    return sorted(values)[math.ceil(share * (len(values) - 1))]


def proportion(num_successes: int, num_trials: int) -> Estimate:
    """Return a success rate with Wilson's score interval (JASA 22(158), 1927).

    The interval lies in [0, 1] and has a width even if all trials, or none, succeed.
    """
    rate, weight = num_successes / num_trials, _Z95**2 / num_trials
    center = (rate + weight / 2) / (1 + weight)
    half = math.sqrt(weight * (rate * (1 - rate) + weight / 4)) / (1 + weight)
    # min and max undo rounding, which could put an end past a rate of 0 or 1
    return Estimate(rate, max(min(center - half, rate), 0.0), min(max(center + half, rate), 1.0))


def paired_difference(ours: Sequence[bool], theirs: Sequence[bool]) -> Estimate:
    """Return the success rate of ``ours`` minus that of ``theirs``, over the same items in one
    order.

    The interval is Bonett and Price's adjusted Wald interval (Journal of Educational and Behavioral
    Statistics 37(4), 2012), which stays sensible if few items, or none, differ.
    """
    gained = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    lost = sum(b and not a for a, b in zip(ours, theirs, strict=True))
    num = len(ours)
    up, down = (gained + 1) / (num + 2), (lost + 1) / (num + 2)
    half = _Z95 * math.sqrt((up + down - (up - down) ** 2) / (num + 2))
    return Estimate((gained - lost) / num, max(up - down - half, -1.0), min(up - down + half, 1.0))


def ratio_of_totals(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Return the total of the numerators over the total of the denominators.

    Both sequences have one value for each item, in the same order; the total of ``denominators`` is
    positive. The interval is the ratio estimator's (Cochran, Sampling Techniques, section 6.4). The
    items are the sample, and the spread is that of ``numerator - ratio * denominator`` over the
    items; one item has no spread to measure, so that its interval is infinite.
    """
    num = len(numerators)
    ratio, residuals = _residuals(numerators, denominators)
    if num == 1:
        return Estimate(ratio, -math.inf, math.inf)
    half = _Z95 * math.sqrt(num / (num - 1) * math.fsum(each**2 for each in residuals))
    return Estimate(ratio, ratio - half, ratio + half)


def difference_of_ratios(
    ours: tuple[Sequence[float], Sequence[float]],
    theirs: tuple[Sequence[float], Sequence[float]],
) -> Estimate:
    """Return our ratio of totals minus theirs.

    ``ours`` and ``theirs`` are numerators and denominators of the same items, in the same order.
    The interval is that of `ratio_of_totals` with the difference of both ratios' residuals, so that
    what both have in common cancels out.
    """
    (ratio, residuals), (other, others) = _residuals(*ours), _residuals(*theirs)
    num, difference = len(residuals), ratio - other
    if num == 1:
        return Estimate(difference, -math.inf, math.inf)
    squares = math.fsum((one - two) ** 2 for one, two in zip(residuals, others, strict=True))
    half = _Z95 * math.sqrt(num / (num - 1) * squares)
    return Estimate(difference, difference - half, difference + half)


def _residuals(
    numerators: Sequence[float], denominators: Sequence[float]
) -> tuple[float, list[float]]:
    total = math.fsum(denominators)
    ratio = math.fsum(numerators) / total
    pairs = zip(numerators, denominators, strict=True)
    return ratio, [(above - ratio * below) / total for above, below in pairs]
