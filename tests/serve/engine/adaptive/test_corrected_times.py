from __future__ import annotations

import numpy as np
import pytest

from mars_serve.engine.adaptive.corrected_times import CorrectedTimes
from mars_serve.engine.adaptive.step_times import StepTimes

TABLE = StepTimes((1, 33), (0, 65536), ((0.010, 0.010), (0.026, 0.026)))  # 0.5 ms a position
GRID = np.array([1.0, 5.0, 9.0, 20.0])


def followed(excess_s: float, position_s: float, *, num_steps: int = 400) -> CorrectedTimes:
    """Return times that have followed noisy steps of 1 to 9 positions with such an excess."""
    times, source = CorrectedTimes(TABLE), np.random.default_rng(0)
    for _ in range(num_steps):
        positions = int(source.integers(1, 10))
        real_s = float(TABLE.at(positions, 0)) + excess_s + position_s * positions
        times.observe(positions, 0, real_s * source.normal(1.0, 0.05), has_masks=False)
        times.learn()
    return times


@pytest.mark.parametrize("excess_s", [-0.003, 0.0, 0.004])
@pytest.mark.parametrize("position_s", [-0.0002, 0.0, 0.0003])
def test_steps_are_predicted_with_their_excess(excess_s: float, position_s: float) -> None:
    real = TABLE.at(GRID, 0) + excess_s + position_s * GRID
    assert followed(excess_s, position_s).at(GRID, 0) == pytest.approx(real, rel=0.15)


def test_without_steps_the_table_holds() -> None:
    times = CorrectedTimes(TABLE)
    times.learn()
    assert times.at(GRID, 7).tolist() == TABLE.at(GRID, 7).tolist()


def test_the_cost_of_a_position_is_kept_while_steps_are_equally_large() -> None:
    times = followed(0.001, 0.0003)
    before_s = times.at(9.0, 0) - times.at(1.0, 0)
    for _ in range(1000):
        times.observe(1, 0, 0.0113, has_masks=False)
        times.learn()
    assert times.at(9.0, 0) - times.at(1.0, 0) == pytest.approx(before_s, rel=0.05)
    assert times.at(1.0, 0) == pytest.approx(0.0113, rel=0.01)


def test_long_pauses_change_little() -> None:
    times = followed(0.0, 0.0)
    for positions in (1, 9):
        times.observe(positions, 0, 3600.0, has_masks=False)
        times.learn()
    assert np.all(times.at(GRID, 0) < 1.6 * TABLE.at(GRID, 0))
    for _ in range(40):
        times.observe(5, 0, 0.012, has_masks=False)
        times.learn()
    assert times.at(GRID[:3], 0) == pytest.approx(TABLE.at(GRID[:3], 0), rel=0.15)


def test_masks_add_their_time_to_predictions_and_not_to_what_steps_without_them_take() -> None:
    table = StepTimes(TABLE.positions, TABLE.cached_tokens, TABLE.seconds, mask_s=0.004)
    times = CorrectedTimes(table)
    for _ in range(200):  # without masks a step takes 1 ms longer than in the table, with them 5
        times.observe(1, 0, 0.011, has_masks=False)
        times.observe(9, 0, 0.010 + 8 * 0.0005 + 0.005, has_masks=True)
        times.learn()
    assert times.at(1.0, 0) == pytest.approx(0.011, rel=0.03)
    assert times.at(9.0, 0, True) == pytest.approx(0.019, rel=0.03)
    both = times.at(np.array([9.0, 9.0]), 0, np.array([False, True]))
    assert both == pytest.approx([0.015, 0.019], rel=0.03)


def test_steps_beyond_the_table_are_ignored() -> None:
    times = CorrectedTimes(TABLE)
    times.observe(34, 0, 9.0, has_masks=False)
    times.learn()
    assert times.at(1.0, 0) == 0.010


def test_a_large_step_takes_at_least_half_of_its_time_in_the_table() -> None:
    times = followed(-0.009, -0.0005)
    assert np.all(times.at(np.arange(1.0, 500.0), 0) >= 0.5 * TABLE.at(np.arange(1.0, 500.0), 0))
