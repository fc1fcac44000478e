"""Translates thresholds of ``probability`` into those of another confidence.

Floors, keys and the autoscaler's τ speak of ``probability``. A threshold of another confidence
means the same if as many wrong tokens are accepted for each token that is generated, which depends
on the model and is measured; see `mars_platform.checkpoint.translations`. Imports no Ray, torch or
HTTP library.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from mars_platform.method.mode import Confidence

NUM_KNOTS_MAX = 64
"""Most knots of a translation."""


@dataclass(frozen=True)
class Translation:
    """Thresholds of a confidence by the thresholds of ``probability`` that mean the same."""

    confidence: Confidence
    """The other measure."""
    calibrated: bool
    """Whether temperatures correct it."""
    probability: tuple[float, ...]
    """Thresholds of ``probability`` in (0, 1), rising."""
    threshold: tuple[float, ...]
    """Threshold of the confidence for each, in (0, 1], never falling."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.probability) <= NUM_KNOTS_MAX:
            raise ValueError(f"probability must have 1 to {NUM_KNOTS_MAX} values")
        if len(self.probability) != len(self.threshold):
            raise ValueError("threshold must have a value for each of probability")
        if any(low >= high for low, high in pairwise(self.probability)):
            raise ValueError("probability must rise")
        if any(low > high for low, high in pairwise(self.threshold)):
            raise ValueError("threshold must not fall")
        if not 0 < self.probability[0] <= self.probability[-1] < 1:
            raise ValueError("probability must lie in (0, 1)")
        if not 0 < self.threshold[0] <= self.threshold[-1] <= 1:
            raise ValueError("threshold must lie in (0, 1]")

    def of(self, probability: float) -> float:
        """Return the threshold that means the same as one of ``probability``, in (0, 1].

        Between the knots the threshold is interpolated; below the first knot it is that knot's; and
        for 1 it is 1, because plain AR decoding is the same by any confidence.
        """
        index = bisect_left(self.probability, probability)
        if index == 0:
            return self.threshold[0]
        low, low_threshold = self.probability[index - 1], self.threshold[index - 1]
        high, high_threshold = 1.0, 1.0
        if index < len(self.probability):
            high, high_threshold = self.probability[index], self.threshold[index]
        share = (probability - low) / (high - low)
        # rounding could lift it above that of the next knot
        return min(low_threshold + share * (high_threshold - low_threshold), high_threshold)
