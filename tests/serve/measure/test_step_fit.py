"""The line that is fitted to measured step times."""

from __future__ import annotations

import math

import pytest

from mars_autoscale.model.step_times import StepTime, linear_step_time
from mars_serve.measure.frontier.step_fit import fit_steps


def test_linear_step_times_are_fitted_exactly() -> None:
    exact = linear_step_time(0.032, 128)
    grid = (1.0, 4.0, 16.0, 64.0, 256.0)
    found = fit_steps(StepTime(grid, tuple(map(exact.at, grid))))
    assert found is not None
    assert (found.t0_s, found.positions_to_double) == pytest.approx((0.032, 128))
    assert found.error_max == pytest.approx(0, abs=1e-9)


def test_the_fit_weighs_short_steps_like_long_ones() -> None:
    # The best line passes between 1 and 1.1 ms at 10 positions and 10 and 11 ms at 1000.
    steps = StepTime((10.0, 10.0001, 1000.0, 1000.0001), (1e-3, 1.1e-3, 1e-2, 1.1e-2))
    found = fit_steps(steps)
    assert found is not None
    share = (1 + 1 / 1.1) / (1 + 1 / 1.1**2)  # minimises (1 - x)^2 + (1 - x / 1.1)^2
    assert found.t0_s + 10 * found.t0_s / found.positions_to_double == pytest.approx(1e-3 * share)
    errors = share - 1, 1 - share / 1.1
    assert found.error_max == pytest.approx(max(errors), rel=1e-3)
    assert found.error_mean == pytest.approx(sum(errors) / 2, rel=1e-3)


def test_constant_steps_have_no_slope_and_superlinear_steps_no_fit() -> None:
    flat = fit_steps(StepTime((1.0, 9.0, 99.0), (2e-3, 2.1e-3, 1.9e-3)))
    assert flat is not None
    assert flat.t0_s == pytest.approx(2e-3, rel=0.02)
    assert flat.positions_to_double == math.inf
    assert fit_steps(StepTime((1.0, 10.0, 100.0), (1e-5, 1e-3, 1e-1))) is None
