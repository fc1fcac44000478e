from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_autoscale.capacity import Capacity, Rung, linear_step_time
from mars_autoscale.local import LocalController, LocalSettings
from mars_autoscale.observe import Look

# The 7B model of the MARS paper, Table 8
LADDER = (
    Rung(1.0, 1.0, 0.0),
    Rung(0.95, 1.695, 1.7, 3),
    Rung(0.9, 1.85, 2.95, 3),
    Rung(0.8, 2.065, 7.6, 3),
    Rung(0.7, 2.255, 12.6, 3),
)
SLOTS = 16
CAPACITY = Capacity(linear_step_time(0.032, 128), LADDER, SLOTS, 20_000)
ANY = st.floats(allow_nan=True, allow_infinity=True)


@pytest.fixture
def controller() -> LocalController:
    return LocalController(CAPACITY, LocalSettings())


def test_a_replica_with_free_slots_decodes_plainly(controller: LocalController) -> None:
    for now in range(20):
        assert controller.update(Look(now, 10, feed_forward=1.5)).threshold == 1.0


def test_it_drops_at_once_and_climbs_a_rung_at_a_time(controller: LocalController) -> None:
    assert controller.update(Look(0.0, 40)).threshold == 0.7
    seen = [controller.update(Look(0.5 * step, 2)).threshold for step in range(1, 9)]
    assert seen == [0.7, 0.8, 0.8, 0.9, 0.9, 0.95, 0.95, 1.0]


def test_what_arrives_counts_where_slots_are_taken(controller: LocalController) -> None:
    assert controller.update(Look(0.0, 14, feed_forward=1.25)).threshold == 0.9
    assert controller.update(Look(1.0, 14, feed_forward=math.inf)).threshold == 0.95


def test_the_floor_holds_at_once(controller: LocalController) -> None:
    assert controller.update(Look(0.0, 64, floor_threshold=0.9)).threshold == 0.9
    assert controller.update(Look(0.5, 64, floor_threshold=0.7)).threshold == 0.7
    assert controller.update(Look(0.6, 64, floor_threshold=0.95)).threshold == 0.95
    assert controller.update(Look(0.7, 64, floor_threshold=1.0)).threshold == 1.0


def test_a_clock_that_jumps_does_not_hold_it(controller: LocalController) -> None:
    controller.update(Look(5000.0, 64))
    assert controller.update(Look(1400.0, 0)).threshold == 0.8


def test_past_the_break_even_batch_there_is_one_rung() -> None:
    wide = Capacity(linear_step_time(0.032, 128), LADDER, 64, 20_000)
    controller = LocalController(wide, LocalSettings())
    assert controller.update(Look(0.0, 1000, feed_forward=3)).threshold == 1.0


@pytest.mark.parametrize(("share", "threshold"), [(0.2, 0.7), (0.34, 0.7), (0.35, 1.0), (0.9, 1.0)])
def test_no_quality_is_paid_where_prompts_are_the_load(
    controller: LocalController, share: float, threshold: float
) -> None:
    assert controller.update(Look(0.0, 64, prompt_share=share)).threshold == threshold


@given(st.lists(st.tuples(ANY, ANY, ANY, ANY, ANY), max_size=30))
def test_any_look_gives_a_rung_above_the_floor(looks: list[tuple[float, ...]]) -> None:
    controller = LocalController(CAPACITY, LocalSettings())
    for look in (Look(*each) for each in looks):
        rung = controller.update(look)
        assert rung in LADDER
        assert rung.threshold >= look.floor_threshold or rung.threshold == 1.0


@given(st.integers(0, 200), st.integers(0, 200), st.floats(1, 3))
def test_more_load_never_raises_the_threshold(one: int, more: int, feed_forward: float) -> None:
    low, high = (
        LocalController(CAPACITY, LocalSettings()).update(Look(0.0, load, 0.0, feed_forward))
        for load in (one, one + more)
    )
    assert high.threshold <= low.threshold
