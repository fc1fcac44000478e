from __future__ import annotations

import math
import os
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_autoscale.model.capacity import Capacity, Rung, linear_step_time
from mars_autoscale.policy.inner_loop import LocalController, LocalSettings, LocalState
from mars_autoscale.policy.observe import Look

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
MANY = settings(max_examples=int(os.environ.get("MARSRAY_EXAMPLES", "50")), deadline=None)
"""More of them are for whoever changes the inner loop: ``MARSRAY_EXAMPLES=2000``."""


@pytest.fixture
def controller() -> LocalController:
    return LocalController(CAPACITY, LocalSettings())


def test_a_replica_with_free_slots_decodes_plainly(controller: LocalController) -> None:
    for now in range(20):
        assert controller.update(Look(now, 10, feed_forward=1.5)).default.threshold == 1.0


def test_it_drops_at_once_and_climbs_a_rung_at_a_time(controller: LocalController) -> None:
    assert controller.update(Look(0.0, 40)).default.threshold == 0.7
    seen = [controller.update(Look(0.5 * step, 2)).default.threshold for step in range(1, 9)]
    assert seen == [0.7, 0.8, 0.8, 0.9, 0.9, 0.95, 0.95, 1.0]


def test_what_arrives_counts_where_slots_are_taken(controller: LocalController) -> None:
    controller.update(Look(0.0, 14, feed_forward=1.25))
    assert controller.update(Look(1.0, 14, feed_forward=1.25)).default.threshold == 0.9
    assert controller.update(Look(2.0, 14, feed_forward=math.inf)).default.threshold == 0.95


def test_a_batch_that_fills_up_for_a_moment_is_waited_out(controller: LocalController) -> None:
    seen = [controller.update(Look(now, 16)).default.threshold for now in (0.0, 0.5, 1.0)]
    assert seen == [1.0, 1.0, 0.9]
    again = LocalController(CAPACITY, LocalSettings())
    loads = [16, 10, 16, 16, 10, 16]
    looks = [Look(0.6 * step, load) for step, load in enumerate(loads)]
    assert {again.update(look).default.threshold for look in looks} == {1.0}
    assert again.update(Look(3.6, 21)).default.threshold < 1.0  # a queue is not waited out


def test_the_floor_holds_at_once(controller: LocalController) -> None:
    assert controller.update(Look(0.0, 64, floor_threshold=0.9)).default.threshold == 0.9
    assert controller.update(Look(0.5, 64, floor_threshold=0.7)).default.threshold == 0.7
    assert controller.update(Look(0.6, 64, floor_threshold=0.95)).default.threshold == 0.95
    assert controller.update(Look(0.7, 64, floor_threshold=1.0)).default.threshold == 1.0


def test_a_clock_that_jumps_does_not_hold_it(controller: LocalController) -> None:
    controller.update(Look(5000.0, 64))
    assert controller.update(Look(1400.0, 0)).default.threshold == 0.8


def test_past_the_break_even_batch_there_is_one_rung() -> None:
    wide = Capacity(linear_step_time(0.032, 128), LADDER, 64, 20_000)
    controller = LocalController(wide, LocalSettings())
    assert controller.update(Look(0.0, 1000, feed_forward=3)).default.threshold == 1.0


@pytest.mark.parametrize(("share", "threshold"), [(0.2, 0.7), (0.34, 0.7), (0.35, 1.0), (0.9, 1.0)])
def test_no_quality_is_paid_where_prompts_are_the_load(
    controller: LocalController, share: float, threshold: float
) -> None:
    assert controller.update(Look(0.0, 64, prompt_share=share)).default.threshold == threshold


# Classes


def flex_look(now: float, load: float, *, flex: float = 0.5, **more: float) -> Look:
    return Look(now, load, flex_share=flex, **more)


def test_class_flex_goes_down_first_and_comes_back_last(controller: LocalController) -> None:
    seen = []
    for load in (10, 14, 15, 16, 17, 18, 20, 40):
        fresh = LocalController(CAPACITY, LocalSettings())
        fresh.update(flex_look(0.0, load))
        stage = fresh.update(flex_look(1.0, load))
        seen.append((stage.default.threshold, stage.flex.threshold))
    assert seen[0] == (1.0, 1.0)
    assert seen[-1] == (0.7, 0.7)
    assert any(default == 1.0 > flex for default, flex in seen)
    assert all(flex == 0.7 for default, flex in seen if default < 1.0)
    controller.update(flex_look(0.0, 40))
    back = [controller.update(flex_look(float(now), 2)) for now in range(1, 11)]
    assert [each.default.threshold for each in back[:4]] == [0.8, 0.9, 0.95, 1.0]
    assert {each.flex.threshold for each in back[:4]} == {0.7}
    assert back[-1].flex.threshold == 1.0


def test_each_class_keeps_its_floor(controller: LocalController) -> None:
    floors = {"floor_threshold": 0.9, "flex_floor_threshold": 0.8}
    stage = controller.update(flex_look(0.0, 64, **floors))
    assert (stage.default.threshold, stage.flex.threshold) == (0.9, 0.8)
    assert stage.is_lowest
    pinned = controller.update(flex_look(0.5, 64, floor_threshold=1.0, flex_floor_threshold=0.7))
    assert (pinned.default.threshold, pinned.flex.threshold) == (1.0, 0.7)
    # who pays first has the lower floor; where it has not, both hold
    other = controller.update(flex_look(1.0, 64, floor_threshold=0.7, flex_floor_threshold=0.95))
    assert (other.default.threshold, other.flex.threshold) == (0.95, 0.95)


def test_gains_are_those_of_the_mixture(controller: LocalController) -> None:
    """By hand: a token's seconds are the mean of its class's, weighted by the tokens of each."""
    stage = controller.update(flex_look(0.0, 64, flex=0.25, pinned_share=0.5))
    assert stage.default == stage.flex == LADDER[-1]
    fast = CAPACITY.gain(LADDER[-1])
    assert stage.gain == pytest.approx(1 / (0.5 + 0.5 / fast))


def test_a_class_without_requests_pays_nothing(controller: LocalController) -> None:
    stage = controller.update(flex_look(0.0, 64, flex=1.0))
    assert (stage.default.threshold, stage.flex.threshold) == (1.0, 0.7)
    assert stage.is_lowest


def test_no_quality_is_paid_for_hardly_any_speed(controller: LocalController) -> None:
    stage = controller.update(Look(0.0, 64, pinned_share=0.95))
    assert stage.default.threshold == stage.gain == 1.0
    assert stage.is_lowest


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_replica_at_the_target_says_a_gain_of_one(flex: float, pinned: float) -> None:
    capacity = Capacity(CAPACITY.step_time, LADDER[1:], SLOTS, 20_000)
    look = Look(0.0, 2, flex_share=flex, pinned_share=pinned)
    assert LocalController(capacity, LocalSettings()).update(look).gain == 1.0


# Mode exact

EXACT = Rung(1.0, 1.9, 0.0, positions_per_row=16)
"""By hand: faster than plain AR decoding up to 128 * .9 / (16 - 1.9) = 8 rows."""


def exact_controller() -> LocalController:
    return LocalController(replace(CAPACITY, exact=EXACT), LocalSettings())


def test_mode_exact_stands_in_while_the_arithmetic_idles() -> None:
    controller = exact_controller()
    seen = [controller.update(Look(now, now)).is_exact for now in (1, 5, 8, 9, 8, 5)]
    assert seen == [True, True, True, False, False, True]
    assert not LocalController(CAPACITY, LocalSettings()).update(Look(0.0, 1)).is_exact


def test_a_target_below_one_has_no_mode_exact() -> None:
    capacity = Capacity(CAPACITY.step_time, LADDER[1:], SLOTS, 20_000, EXACT)
    assert not LocalController(capacity, LocalSettings()).update(Look(0.0, 1)).is_exact


# Whatever comes

LOOKS = st.builds(Look, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY)
SHARES = st.floats(0, 1)
FLOORS = st.sampled_from([0.5, 0.7, 0.8, 0.9, 0.95, 1.0])
REAL_LOOKS = st.builds(
    Look,
    st.floats(0, 10),
    st.floats(0, 100),
    FLOORS,
    st.floats(1, 3),
    st.floats(0, 0.5),
    FLOORS,
    SHARES,
    SHARES,
)


@MANY
@given(st.lists(st.one_of(LOOKS, REAL_LOOKS), max_size=30))
def test_any_looks_keep_to_the_floors_and_flex_pays_first(looks: list[Look]) -> None:
    controller = exact_controller()
    for look in looks:
        stage = controller.update(look)
        default, flex = stage.default, stage.flex
        assert default in LADDER
        assert flex in LADDER
        assert default.threshold >= look.floor_threshold or default.threshold == 1.0
        assert flex.threshold >= look.flex_floor_threshold or flex.threshold == 1.0
        assert flex.threshold <= default.threshold
        if default.threshold < 1.0:
            allowed = [r for r in LADDER if r.threshold >= look.flex_floor_threshold]
            assert flex == allowed[-1], "class flex could still have gone lower"
        assert math.isfinite(stage.gain)
        assert stage.gain >= 1.0


@MANY
@given(st.lists(REAL_LOOKS, min_size=1, max_size=20), st.floats(0, 100))
def test_more_load_never_raises_the_threshold(looks: list[Look], more: float) -> None:
    """Of two with the same history, at the same share of prompts."""
    low, high = exact_controller(), exact_controller()
    for look in looks[:-1]:
        assert low.update(look) == high.update(look)
    less = low.update(looks[-1])
    larger = high.update(replace(looks[-1], load=looks[-1].load + more))
    assert larger.default.threshold <= less.default.threshold
    assert larger.flex.threshold <= less.flex.threshold
    assert less.is_exact or not larger.is_exact


@MANY
@given(st.lists(REAL_LOOKS, min_size=1, max_size=20))
def test_mode_exact_is_never_slower(looks: list[Look]) -> None:
    controller = exact_controller()
    for look in looks:
        stage = controller.update(look)
        rows = min(max(look.load, 1.0), SLOTS)
        if stage.is_exact:
            assert CAPACITY.gain(EXACT, rows) >= 1.0
        elif CAPACITY.gain(EXACT, rows) >= LocalSettings().exact_gain:
            pytest.fail("it would have been faster")


@MANY
@given(st.lists(REAL_LOOKS, max_size=20), st.integers(0, 20))
def test_a_kept_state_goes_on_as_if_nothing_had_been(looks: list[Look], cut: int) -> None:
    whole, other = exact_controller(), exact_controller()
    expected = [whole.update(look) for look in looks]
    before = [other.update(look) for look in looks[:cut]]
    restarted = exact_controller()
    restarted.state = LocalState(**asdict(other.state))
    assert before + [restarted.update(look) for look in looks[cut:]] == expected
