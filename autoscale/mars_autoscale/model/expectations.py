"""Expresses what a frontier says about served outputs, as far as audits can check it.

Imports no Ray, torch or HTTP library.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Expectation:
    """A frontier's word about the outputs that are served with a τ."""

    threshold: float
    divergence: float
    """Share of tokens that are the first of an output to differ from plain AR decoding, at the
    pessimistic end of its interval; above 0."""


def expectation_of(expectations: Sequence[Expectation], threshold: float) -> Expectation | None:
    """Return what was measured for the highest τ that is not above ``threshold``, which loses no
    less.

    ``expectations`` have falling τ. None is returned if the threshold is 1, or below all of them.
    """
    if threshold >= 1.0:
        return None
    return next((each for each in expectations if each.threshold <= threshold + _ROUNDING), None)
