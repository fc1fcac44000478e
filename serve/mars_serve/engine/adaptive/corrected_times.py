"""Step times of a table, corrected by the durations of the steps that an engine has run."""

from __future__ import annotations

from typing import overload

import numpy as np
from numpy.typing import NDArray

from mars_serve.engine.adaptive.step_times import StepTimes

_Bools = NDArray[np.bool_]
_Floats = NDArray[np.float64]

_WEIGHT = 0.1
"""Weight of the newest steps in the running means."""
_MAX_EXCESS = 2.0
"""Largest mean excess, as a multiple of the time in the table."""
_MAX_MISS = 0.5
"""Largest error of a prediction, as a share of the time in the table; more counts as a pause."""
_SLOPE_RATE = 0.1
"""Share of an error of prediction that the slope takes over from steps far from the mean."""
_NEAR_SHARE, _NEAR_POSITIONS = 1 / 8, 0.5
"""Distance from the mean positions, as their share and at least so many, up to which steps hardly
change the slope: their errors are those of the mean."""
_FAR_POSITIONS = 16.0
"""Least distance from the mean positions up to which the slope is applied."""


class CorrectedTimes:
    """Predicts the duration of whole steps, by their positions and cached tokens.

    The table holds the time of forward passes alone. A step also schedules, samples and commits,
    partly for each position that it reads, and other work may slow the machine down. The excess of
    steps over the table is followed as a straight line in their positions: its height by a running
    mean, and its slope by normalised least mean squares (Widrow and Hoff, 1960), which keeps it
    while all steps are equally large.
    """

    def __init__(self, table: StepTimes) -> None:
        self.table = table
        self._mean_positions: float | None = None  # until the first step
        self._mean_excess_s = self._slope_s = 0.0
        # sums since the means were renewed: steps, positions, cached tokens, seconds
        self._seen = np.zeros(4)

    def observe(
        self, positions: int, cached_tokens: int, seconds: float, *, has_masks: bool
    ) -> None:
        """Record the duration of a step; one with more positions than the table is ignored."""
        if positions <= self.table.positions[-1]:
            without_s = seconds - self.table.mask_s * has_masks
            self._seen += (1, positions, cached_tokens, without_s)

    def learn(self) -> None:
        """Correct the times by the steps since the last call."""
        num_steps, *totals = self._seen
        if not num_steps:
            return
        positions, cached_tokens, seconds = (float(total / num_steps) for total in totals)
        self._seen[:] = 0
        expected_s = float(self.table.at(positions, cached_tokens))
        if self._mean_positions is None:
            self._mean_positions = positions
        distance = positions - self._mean_positions
        further_s = self._slope_s * distance
        miss_s = seconds - expected_s - self._mean_excess_s - further_s
        miss_s = min(max(miss_s, -_MAX_MISS * expected_s), _MAX_MISS * expected_s)
        self._learn_slope(distance, miss_s, expected_s)
        self._mean_positions += _WEIGHT * distance
        mean_s = self._mean_excess_s + _WEIGHT * (further_s + miss_s)
        self._mean_excess_s = min(max(mean_s, -expected_s / 2), _MAX_EXCESS * expected_s)

    @overload
    def at(self, positions: float, cached_tokens: float, has_masks: bool = False) -> float: ...
    @overload
    def at(
        self, positions: _Floats, cached_tokens: float, has_masks: _Bools | bool = False
    ) -> _Floats: ...
    def at(
        self, positions: _Floats | float, cached_tokens: float, has_masks: _Bools | bool = False
    ) -> _Floats | float:
        """Return the seconds of steps with ``positions`` positions each (any shape).

        ``has_masks`` says which of them feed a mask, in a shape that broadcasts.
        """
        times = self.table.at(positions, cached_tokens) + self.table.mask_s * has_masks
        mean = self._mean_positions or 0.0
        far = max(mean, _FAR_POSITIONS)
        distance = np.minimum(np.maximum(positions - mean, -far), far)  # quicker than np.clip
        excess_s = self._mean_excess_s + self._slope_s * distance
        corrected: _Floats = np.maximum(times + excess_s, times / 2)
        return corrected

    def _learn_slope(self, distance: float, miss_s: float, expected_s: float) -> None:
        assert self._mean_positions is not None
        near = max(_NEAR_SHARE * self._mean_positions, _NEAR_POSITIONS)
        share = distance**2 / (distance**2 + near**2)
        if share:
            self._slope_s += _SLOPE_RATE * share**2 * miss_s / distance
        # the excess of a position is at most half of what positions cost on average
        limit_s = expected_s / (2 * max(self._mean_positions, 1.0))
        self._slope_s = min(max(self._slope_s, -limit_s), limit_s)
