from __future__ import annotations

import numpy as np
import pytest

from mars_autoscale.model.step_times import StepTimes

GRID = StepTimes((1, 5, 9), (0, 100), ((1.0, 2.0), (3.0, 6.0), (4.0, 9.0)))


@pytest.mark.parametrize(
    ("positions", "cached_tokens", "seconds"),
    [
        (5, 0, 3.0),
        (9, 100, 9.0),
        (3, 0, 2.0),
        (3, 50, 3.0),
        (0, 0, 1.0),
        (5, -7, 3.0),
        (17, 0, 6.0),
        (5, 200, 9.0),
        (17, 200, 24.0),
    ],
)
def test_times_are_interpolated_within_the_grid_and_extrapolated_past_its_end(
    positions: int, cached_tokens: int, seconds: float
) -> None:
    assert GRID.at(positions, cached_tokens) == pytest.approx(seconds, rel=1e-5)


def test_times_of_an_array_of_positions_equal_those_of_each_entry() -> None:
    positions = np.linspace(0, 20, 41)
    assert GRID.at(positions, 130).tolist() == [GRID.at(float(at), 130) for at in positions]


def test_steps_with_masks_take_longer_by_their_time() -> None:
    times = StepTimes(GRID.positions, GRID.cached_tokens, GRID.seconds, mask_s=0.25)
    assert times.at(5, 0) == pytest.approx(3.0)
    assert times.at(5, 0, True) == pytest.approx(3.25)
    found = times.at(np.array([5.0, 9.0, 9.0]), 0, np.array([True, False, True]))
    assert found.tolist() == pytest.approx([3.25, 4.0, 4.25])


def test_a_single_time_holds_everywhere_and_falling_times_are_not_extrapolated() -> None:
    assert StepTimes((4,), (0,), ((0.5,),)).at(1000, 1000) == pytest.approx(0.5)
    falling = StepTimes((1, 2), (0,), ((2.0,), (1.0,)))
    assert falling.at(10**6, 0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("positions", "cached_tokens", "seconds"),
    [
        ((), (0,), ()),
        ((1,), (), ((),)),
        ((2, 1), (0,), ((1.0,), (1.0,))),
        ((1, 1), (0,), ((1.0,), (1.0,))),
        ((1, 2), (0,), ((1.0,),)),
        ((1,), (0, 9), ((1.0,),)),
        ((1,), (0,), ((0.0,),)),
        ((1,), (0,), ((float("nan"),),)),
        ((1,), (0,), ((float("inf"),),)),
    ],
)
def test_malformed_grids_are_refused(
    positions: tuple[int, ...],
    cached_tokens: tuple[int, ...],
    seconds: tuple[tuple[float, ...], ...],
) -> None:
    with pytest.raises(AssertionError):
        StepTimes(positions, cached_tokens, seconds)


@pytest.mark.parametrize("mask_s", [-0.1, float("nan"), float("inf")])
def test_an_impossible_time_of_masks_is_refused(mask_s: float) -> None:
    with pytest.raises(AssertionError):
        StepTimes((1,), (0,), ((1.0,),), mask_s)
