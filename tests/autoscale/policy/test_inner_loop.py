import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ladders import CAPACITY, LADDER, exact_rung, threshold_rung
from mars_autoscale.model.capacity import AR, Rung, Window
from mars_autoscale.policy.decision import ThresholdRange
from mars_autoscale.policy.inner_loop import Cause, EngineSample, InnerLoop
from mars_autoscale.policy.settings import InnerSettings
from mars_platform.method.mode import Mode

ANY = st.floats(allow_nan=True, allow_infinity=True)


def make_loop(capacity=CAPACITY):
    return InnerLoop(capacity, InnerSettings())


@pytest.fixture
def loop():
    return make_loop()


def look(now_s, load, floor=0.0, flex_floor=0.0, feed_forward=1.0, **shares):
    return EngineSample(now_s, load, ThresholdRange(floor, flex_floor, feed_forward), **shares)


def thresholds(decision):
    return decision.live.threshold, decision.live.flex_threshold


def threshold_after(loop, look):
    return loop.update(look).live.threshold


def test_a_replica_with_a_free_batch_decodes_plainly(loop):
    for now in range(20):
        assert threshold_after(loop, look(now, 10, feed_forward=1.5)) == 1.0


def test_the_threshold_drops_at_once_and_climbs_a_rung_at_a_time(loop):
    assert threshold_after(loop, look(0.0, 40)) == 0.7
    seen = [threshold_after(loop, look(0.5 * step, 2)) for step in range(1, 9)]
    assert seen == [0.7, 0.8, 0.8, 0.9, 0.9, 0.95, 0.95, 1.0]


def test_the_arrivals_lower_the_threshold_of_a_full_batch(loop):
    loop.update(look(0.0, 14, feed_forward=1.25))
    assert threshold_after(loop, look(1.0, 14, feed_forward=1.25)) == 0.9
    assert threshold_after(loop, look(2.0, 14, feed_forward=math.inf)) == 0.95


def test_a_batch_that_is_full_for_a_moment_lowers_nothing(loop):
    assert [threshold_after(loop, look(now, 16)) for now in (0.0, 0.5, 1.0)] == [1.0, 1.0, 0.9]
    flickering = make_loop()
    looks = [look(0.6 * step, load) for step, load in enumerate([16, 10, 16, 16, 10, 16])]
    assert {threshold_after(flickering, each) for each in looks} == {1.0}
    assert threshold_after(flickering, look(3.6, 21)) < 1.0, "a queue lowers it at once"


def test_the_latest_change_of_the_threshold_has_its_cause(loop):
    assert loop.update(look(0.0, 4)).cause is Cause.START
    assert loop.update(look(1.0, 40)).cause is Cause.LOAD
    assert loop.update(look(1.5, 40)).cause is Cause.LOAD, "nothing has changed since"
    assert loop.update(look(2.0, 40, floor=0.95)).cause is Cause.FLOOR
    assert loop.update(look(9.0, 2)).cause is Cause.EASED
    assert loop.update(look(10.0, 40)).cause is Cause.LOAD
    assert loop.update(look(11.0, 40, prompt_share=0.9)).cause is Cause.PROMPTS


def test_arrivals_that_need_more_than_the_queue_are_the_cause(loop):
    loop.update(look(0.0, 14, feed_forward=1.25))
    assert loop.update(look(1.0, 14, feed_forward=1.25)).cause is Cause.ARRIVALS


def test_a_clock_that_jumps_back_does_not_stop_the_climb(loop):
    loop.update(look(5000.0, 64))
    assert threshold_after(loop, look(1400.0, 0)) == 0.8


@pytest.mark.parametrize(("share", "threshold"), [(0.2, 0.7), (0.34, 0.7), (0.35, 1.0), (0.9, 1.0)])
def test_no_quality_is_paid_if_prompts_are_the_load(loop, share, threshold):
    assert threshold_after(loop, look(0.0, 64, prompt_share=share)) == threshold


# Tiers


def test_tier_flex_goes_down_first_and_comes_back_last(loop):
    seen = []
    for load in (10, 14, 15, 16, 17, 18, 20, 40):
        fresh = make_loop()
        fresh.update(look(0.0, load, flex_share=0.5))
        seen.append(thresholds(fresh.update(look(1.0, load, flex_share=0.5))))
    assert seen[0] == (1.0, 1.0)
    assert seen[-1] == (0.7, 0.7)
    assert any(default == 1.0 > (flex or 1.0) for default, flex in seen)
    assert all(flex == 0.7 for default, flex in seen if default < 1.0)
    loop.update(look(0.0, 40, flex_share=0.5))
    back = [thresholds(loop.update(look(now, 2, flex_share=0.5))) for now in range(1, 11)]
    assert back[:4] == [(0.8, 0.7), (0.9, 0.7), (0.95, 0.7), (1.0, 0.7)]
    assert back[-1] == (1.0, 1.0)


def test_each_tier_keeps_its_floor(loop):
    decision = loop.update(look(0.0, 64, 0.9, 0.8, flex_share=0.5))
    assert (thresholds(decision), decision.is_lowest) == ((0.9, 0.8), True)
    assert thresholds(loop.update(look(0.5, 64, 1.0, 0.7, flex_share=0.5))) == (1.0, 0.7)
    # tier flex's floor also holds for tier default, because flex never decodes more carefully
    assert thresholds(loop.update(look(1.0, 64, 0.7, 0.95, flex_share=0.5))) == (0.95, 0.95)


def test_the_gain_is_that_of_the_mixture_of_requests(loop):
    """By hand: the mean seconds per token are those of each rung, weighted by its tokens."""
    decision = loop.update(look(0.0, 64, flex_share=0.25, pinned_share=0.5))
    assert thresholds(decision) == (0.7, 0.7)
    assert decision.gain == pytest.approx(1 / (0.5 + 0.5 / CAPACITY.gain(LADDER[-1])))


def test_a_tier_without_requests_is_not_lowered(loop):
    decision = loop.update(look(0.0, 64, flex_share=1.0))
    assert (thresholds(decision), decision.is_lowest) == ((1.0, 0.7), True)


def test_no_quality_is_paid_for_hardly_any_speed(loop):
    decision = loop.update(look(0.0, 64, pinned_share=0.95))
    assert decision.live.threshold == decision.gain == 1.0
    assert decision.is_lowest


@given(st.floats(0, 1), st.floats(0, 1))
def test_at_a_target_below_one_gain_and_loss_count_from_the_target(flex, pinned):
    loop = make_loop(replace(CAPACITY, target_threshold=LADDER[1].threshold))
    calm = loop.update(look(0.0, 2, flex_share=flex, pinned_share=pinned))
    assert (calm.gain, calm.loss) == (1.0, 0.0)
    assert loop.update(look(1.0, 64)).loss == LADDER[-1].loss - LADDER[1].loss


# Mode exact

EXACT = exact_rung(1.9, 16)
"""By hand: faster than plain AR decoding up to 128 * .9 / (16 - 1.9) = 8 rows."""


def exact_loop():
    return make_loop(replace(CAPACITY, rungs=(AR, EXACT, *LADDER[1:])))


def test_requests_that_keep_their_quality_count_at_the_speed_of_mode_exact():
    deep = threshold_rung(0.8, 2.6, 5.0)
    capacity = replace(CAPACITY, rungs=(AR, exact_rung(2.2, 5), deep))
    decision = make_loop(capacity).update(look(0.0, 40, pinned_share=0.5))
    assert (decision.live.threshold, decision.live.is_exact) == (0.8, True)
    assert decision.gain == pytest.approx(1 / (0.5 + 0.5 / capacity.gain(deep)))


# Properties

LOOKS = st.builds(EngineSample, ANY, ANY, st.builds(ThresholdRange, ANY, ANY, ANY), ANY, ANY, ANY)
SHARES = st.floats(0, 1)
FLOORS = st.sampled_from([0.5, 0.7, 0.8, 0.9, 0.95, 1.0])
REAL_LOOKS = st.builds(
    EngineSample,
    st.floats(0, 10),
    st.floats(0, 100),
    st.builds(ThresholdRange, FLOORS, FLOORS, st.floats(1, 3)),
    st.floats(0, 0.5),
    SHARES,
    SHARES,
)


@given(st.lists(st.one_of(LOOKS, REAL_LOOKS), max_size=30))
def test_any_looks_keep_to_the_floors_and_lower_flex_first(looks):
    loop = exact_loop()
    known = [rung.threshold for rung in LADDER]
    for each in looks:
        decision, allowed = loop.update(each), each.allowed
        default, flex = decision.live.threshold, decision.live.flex_threshold
        assert default in known
        assert flex in known
        assert default >= allowed.floor_threshold or default == 1.0
        assert flex >= allowed.flex_floor_threshold or flex == 1.0
        assert flex <= default
        if default < 1.0:
            lowest = [tau for tau in known if tau >= allowed.flex_floor_threshold][-1]
            assert flex == lowest, "tier flex could still have gone lower"
        assert math.isfinite(decision.gain)
        assert decision.gain >= 1.0


@given(st.lists(REAL_LOOKS, min_size=1, max_size=20), st.floats(0, 100))
def test_more_load_never_raises_the_threshold(looks, more):
    low, high = exact_loop(), exact_loop()
    for each in looks[:-1]:
        assert low.update(each) == high.update(each)
    less = low.update(looks[-1]).live
    larger = high.update(replace(looks[-1], load=looks[-1].load + more)).live
    assert larger.threshold <= less.threshold
    assert (larger.flex_threshold or 1.0) <= (less.flex_threshold or 1.0)
    assert less.is_exact or not larger.is_exact


POINTS = st.tuples(st.floats(1.0, 4.0), st.floats(0.0, 8.0))
"""Tokens per pass, and the positions of a row beyond them."""


@given(POINTS, st.lists(POINTS, min_size=1, max_size=4), st.lists(REAL_LOOKS, max_size=20))
def test_quality_is_paid_only_for_more_speed_than_the_best_lossless_decoding_has(
    lossless, lossy, looks
):
    exact = exact_rung(lossless[0], sum(lossless))
    taus = {
        tau: Rung(Mode.THRESHOLD, tau, (Window(tokens, tokens + more),), 10 * (1 - tau))
        for tau, (tokens, more) in zip((0.95, 0.9, 0.8, 0.7), sorted(lossy), strict=False)
    }
    capacity = replace(CAPACITY, rungs=(AR, exact, *taus.values()))
    loop = make_loop(capacity)
    for each in looks:
        live = loop.update(each).live
        rows = round(min(max(each.load, 1.0), capacity.max_num_seqs))
        best = max(capacity.tokens_per_s(rung, rows) for rung in (AR, exact))
        for tau in {live.threshold, live.flex_threshold} - {1.0}:
            gain = capacity.tokens_per_s(taus[tau], rows) / best
            assert gain >= InnerSettings().min_gain - 1e-9


@given(st.lists(REAL_LOOKS, min_size=1, max_size=20))
def test_mode_exact_is_never_slower_and_always_used_if_faster(looks):
    loop = exact_loop()
    for each in looks:
        rows = round(min(max(each.load, 1.0), CAPACITY.max_num_seqs))
        gain = CAPACITY.gain(EXACT, rows)
        if loop.update(each).live.is_exact:
            assert gain >= 1.0
        else:
            assert gain < InnerSettings().exact_gain
