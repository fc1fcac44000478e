"""Fits a straight line to a table of step times: t0 and K of ``t0 * (1 + positions / K)``."""

import math
from dataclasses import dataclass

import numpy as np

from mars_autoscale.model.step_times import StepTime

_LEAST_RISE = 0.001
"""Least share of t0 by which the longest step is longer; a smaller rise is numerical noise."""


@dataclass(frozen=True)
class LinearSteps:
    """The parameters of `linear_step_time`, and the errors of measured steps against it."""

    t0_s: float
    """Seconds that a step without positions would take."""
    positions_to_double: float
    """K, the positions that double the time of a step; infinite if steps do not grow."""
    error_mean: float
    """Mean relative error of the measured steps."""
    error_max: float
    """Largest relative error of a measured step."""


def fit_steps(steps: StepTime) -> LinearSteps | None:
    """Return the line with the least squares of relative errors.

    The result is None if steps grow faster than any line that begins above 0.
    """
    positions, seconds = np.array(steps.positions), np.array(steps.seconds)
    shares = np.stack([1 / seconds, positions / seconds], axis=1)  # [points, (t0, slope)]
    (t0_s, slope), *_ = np.linalg.lstsq(shares, np.ones(len(seconds)), rcond=None)
    if slope * positions[-1] <= _LEAST_RISE * t0_s:
        t0_s, slope = shares[:, 0].sum() / (shares[:, 0] ** 2).sum(), 0.0
    if t0_s <= 0:
        return None
    errors = np.abs(shares @ (t0_s, slope) - 1)
    return LinearSteps(
        t0_s=float(t0_s),
        positions_to_double=float(t0_s / slope) if slope else math.inf,
        error_mean=float(errors.mean()),
        error_max=float(errors.max()),
    )
