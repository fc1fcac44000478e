"""What a table of step times comes down to: t0 and K of ``t0 * (1 + positions / K)``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mars_autoscale.model.capacity import StepTime

_LEAST_RISE = 0.001
"""Share of t0 by which the longest step must be longer; less is the noise of numbers."""


@dataclass(frozen=True)
class LinearSteps:
    """The fit of `linear_step_time`, and how far measured steps are from it."""

    t0_s: float
    """Seconds of a step without positions."""
    positions_to_double: float
    """K, the positions that take as long again; infinite where steps do not grow."""
    error_mean: float
    """Share of its own time by which a measured step is off, mean over the table."""
    error_max: float
    """The same of the step that is off the most."""


def fit_steps(steps: StepTime) -> LinearSteps | None:
    """The straight line with the least squares of relative errors; None where steps grow faster
    than any that begins above 0.
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
        float(t0_s),
        float(t0_s / slope) if slope else math.inf,
        float(errors.mean()),
        float(errors.max()),
    )
