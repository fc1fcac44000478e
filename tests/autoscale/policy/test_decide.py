import math
import pickle
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ladders import CAPACITY, LADDER, exact_rung
from mars_autoscale.model.capacity import AR
from mars_autoscale.policy.decide import decide
from mars_autoscale.policy.decision import AT_TARGET, OuterState, Reason
from mars_autoscale.policy.inner_loop import EngineSample, InnerLoop
from mars_autoscale.policy.observe import RATE_WINDOW_S, Arrivals, ReplicaLoad, Snapshot
from mars_autoscale.policy.settings import InnerSettings, OuterSettings
from mars_platform.config import build_settings
from mars_platform.errors import UserError

ONE = CAPACITY.tokens_per_s(LADDER[0])
"""Tokens per second of one replica at τ = 1."""
SETTINGS = OuterSettings(min_replicas=2, max_replicas=16, cold_start_s=60, utilization=0.8)
PERIOD = SETTINGS.period_s
FLOOR_LOSS, FLOOR_GAIN = LADDER[2].loss, CAPACITY.gain(LADDER[2])
"""Loss and gain of the rung at tier default's floor, 0.9."""

ANY = st.floats(allow_nan=True, allow_infinity=True)
LOADS = st.builds(ReplicaLoad, ANY, ANY, ANY, ANY, ANY, st.booleans(), ANY)
ARRIVALS = st.none() | st.builds(Arrivals, ANY, ANY, ANY)
SNAPSHOTS = st.builds(
    Snapshot, ANY, st.lists(LOADS, max_size=20), st.integers(0, 50), ARRIVALS, ANY, st.booleans()
)


def snapshot_of(
    now,
    replicas,
    *,
    ready=8,
    starting=0,
    threshold=1.0,
    is_lowest=False,
    waiting=0.0,
    running=8.0,
    prompts=0.0,
    pace=0.0,
    output=100.0,
):
    """Return a snapshot with a demand of so many replicas, by outputs of ``output`` tokens."""
    rung = next(rung for rung in LADDER if rung.threshold <= threshold)
    load = ReplicaLoad(now, running, waiting, CAPACITY.gain(rung), rung.loss, is_lowest, pace)
    arrivals = Arrivals(replicas * ONE / output, prompts * CAPACITY.prefill_tokens_per_s, output)
    return Snapshot(now, [load] * ready, starting, arrivals, now)


def run(snapshots, state=None):
    """Decide on each snapshot; returns the decisions and the last state."""
    state, decisions = state or OuterState(), []
    for each in snapshots:
        decision, state = decide(each, state, CAPACITY, SETTINGS)
        decisions.append(decision)
    return decisions, state


def decision_on(snapshot, state=None):
    return run([snapshot], state)[0][0]


def steady(replicas, seconds, start=0.0, **more):
    """Return the snapshots of a constant demand."""
    return [snapshot_of(start + PERIOD * i, replicas, **more) for i in range(int(seconds / PERIOD))]


BURSTS_S = 240.0


def bursts(*peaks):
    """Return snapshots of 20 s bursts of (decoding, prompts), each within 240 s."""
    return [
        each
        for i, (load, prompts) in enumerate(peaks)
        for each in (
            *steady(0.0, 60, start=BURSTS_S * i),
            *steady(load, 20, start=BURSTS_S * i + 60, prompts=prompts),
            *steady(0.0, 160, start=BURSTS_S * i + 80),
        )
    ]


# Properties


@given(st.lists(SNAPSHOTS, max_size=6))
def test_any_snapshots_give_decisions_within_bounds(snapshots):
    for decision in run(snapshots)[0]:
        assert SETTINGS.min_replicas <= decision.num_replicas <= SETTINGS.max_replicas
        assert decision.range.floor_threshold in (SETTINGS.floor_threshold, 1.0)
        assert decision.range.flex_floor_threshold in (SETTINGS.flex_floor_threshold, 1.0)
        assert decision.range.floor_threshold >= decision.range.flex_floor_threshold
        assert decision.range.feed_forward >= 1.0
        assert 0.1 <= decision.pace <= 1.0
        figures = decision.decode_tokens_per_s, decision.needed, decision.debt
        assert all(math.isfinite(value) for value in figures)


@given(st.floats(0, 30), st.floats(0, 30), st.floats(0, 5), st.integers(1, 16))
def test_more_load_never_lowers_replicas(load, more, prompts, ready):
    low, high = (
        run(steady(each, 20, prompts=prompts, ready=ready))[0][-1] for each in (load, load + more)
    )
    assert high.num_replicas >= low.num_replicas
    assert high.range.feed_forward >= low.range.feed_forward


UNKNOWN = st.sampled_from([0.0, -1.0, math.nan, math.inf])


@given(st.lists(SNAPSHOTS, max_size=6), UNKNOWN)
def test_an_unknown_pace_decides_as_that_of_the_frontier_does(snapshots, unknown):
    def at(pace):
        return [
            replace(each, replicas=[replace(load, pace=pace) for load in each.replicas])
            for each in snapshots
        ]

    assert repr(run(at(unknown))) == repr(run(at(1.0)))


@given(
    st.floats(0, 30),
    st.tuples(st.floats(0.01, 2), st.floats(0.01, 2)),
    st.floats(0, 5),
    st.integers(1, 16),
)
def test_a_lower_pace_never_lowers_replicas(load, paces, prompts, ready):
    high, low = (
        run(steady(load, 20, prompts=prompts, ready=ready, pace=pace))[0][-1]
        for pace in sorted(paces, reverse=True)
    )
    assert low.num_replicas >= high.num_replicas
    assert low.range.feed_forward >= high.range.feed_forward or low.range.feed_forward == 1.0


@given(st.floats(-3600, 3600), st.floats(0, 20))
def test_a_clock_that_jumps_stops_no_replica(jump, load):
    decisions, state = run(steady(10, 400))
    after = decision_on(snapshot_of(400 + jump, load), state)
    assert after.num_replicas >= decisions[-1].num_replicas


@given(st.floats(0.1, 14), st.floats(0.0, 1.0))
def test_replicas_settle_under_a_constant_load(load, prompts):
    decisions, _ = run(steady(load, 1200, prompts=prompts))
    numbers = [decision.num_replicas for decision in decisions]
    changes = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1]]
    assert len([i for i in changes if i * PERIOD > 200]) <= 1, changes


@given(st.floats(2, 8), st.floats(1, 2))
def test_a_step_in_load_overshoots_by_at_most_one_replica(load, times):
    before, state = run(steady(load, 300))
    decisions, _ = run(steady(load * times, 400, start=300), state)
    settled = decisions[-1].num_replicas
    assert max(decision.num_replicas for decision in decisions) <= max(
        settled + 1, math.ceil(settled * SETTINGS.max_trend), before[-1].num_replicas
    )


@given(
    # prompts of hardly any requests would be chance
    st.lists(st.tuples(st.just(0.0) | st.floats(1, 8), st.floats(0, 16)), min_size=2, max_size=4)
)
def test_bursts_keep_the_replicas_that_the_second_highest_needs(peaks):
    decisions, _ = run(bursts(*peaks))
    lowest = sorted(load / FLOOR_GAIN + prompts for load, prompts in peaks)
    kept = min(math.ceil(lowest[-2] - 1e-9), SETTINGS.max_replicas)
    assert decisions[-1].num_replicas == max(kept, SETTINGS.min_replicas)


@given(
    st.lists(st.tuples(st.floats(0, 8), st.floats(0, 8)), min_size=1, max_size=4),
    st.floats(0, 20),
    st.floats(0, 20),
)
def test_more_load_after_bursts_never_lowers_replicas(peaks, load, more):
    _, state = run(bursts(*peaks))
    now = BURSTS_S * len(peaks)
    low, high = (decision_on(snapshot_of(now, each), state) for each in (load, load + more))
    assert high.num_replicas >= low.num_replicas


@given(st.floats(0.70, 0.99), st.floats(0, 4))
def test_no_replica_is_stopped_while_the_threshold_is_low(threshold, load):
    decisions, state = run(steady(10, 300))
    after, _ = run(steady(load, 600, start=300, threshold=threshold), state)
    assert min(each.num_replicas for each in after) >= decisions[-1].num_replicas


@given(st.lists(SNAPSHOTS, max_size=8), st.integers(0, 8))
def test_a_restored_state_continues_as_if_nothing_had_happened(snapshots, cut):
    whole, _ = run(snapshots)
    half, state = run(snapshots[:cut])
    for kept in (pickle.loads(pickle.dumps(state)), OuterState(**asdict(state))):  # noqa: S301
        rest, _ = run(snapshots[cut:], kept)
        assert repr(half + rest) == repr(whole), "as text, because NaN is not equal to itself"


@given(
    st.integers(1, 16),
    st.lists(st.tuples(st.floats(0, 40), st.booleans()), min_size=1, max_size=16),
)
def test_saturated_only_with_all_replicas_busy_and_at_their_lowest(most, replicas):
    bounds = SETTINGS.model_copy(update={"min_replicas": 1, "max_replicas": most})
    loads = [ReplicaLoad(0.0, load, 0.0, 1.2, 1.0, is_lowest) for load, is_lowest in replicas]
    snapshot = replace(snapshot_of(0, 8), replicas=loads)
    decision, _ = decide(snapshot, OuterState(), CAPACITY, bounds)
    mean = sum(load for load, _ in replicas) / len(replicas)
    is_busy = mean >= bounds.busy * CAPACITY.max_num_seqs
    nothing_left = decision.num_replicas == most and all(lowest for _, lowest in replicas)
    assert decision.range.is_saturated == (nothing_left and is_busy)


# The loss budget

HOURS_PERIOD = 10.0


class Hours:
    """Some replicas with their inner loops and one outer loop, over hours."""

    def __init__(self, num_replicas, budget):
        self.settings = SETTINGS.model_copy(
            update={"loss_budget": budget, "period_s": HOURS_PERIOD}
        )
        self.loops = [InnerLoop(CAPACITY, InnerSettings()) for _ in range(num_replicas)]
        self.state = OuterState()
        self.chosen = [each.update(EngineSample(0.0, 0.0)) for each in self.loops]
        self.now_s = 0.0
        self.lost = []
        """Points that the average token lost, for each period."""
        self.decisions = []

    def serve(self, loads, seconds):
        """Keep so many requests at each replica for some time."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += HOURS_PERIOD
            replicas = [
                ReplicaLoad(
                    self.now_s,
                    min(load, 16),
                    max(load - 16, 0),
                    each.gain,
                    each.loss,
                    each.is_lowest,
                )
                for load, each in zip(loads, self.chosen, strict=True)
            ]
            snapshot = replace(snapshot_of(self.now_s, len(loads)), replicas=replicas)
            decision, self.state = decide(snapshot, self.state, CAPACITY, self.settings)
            self.decisions.append(decision)
            tokens = [each.num_running * each.gain for each in replicas]
            points = sum(n * each.loss for n, each in zip(tokens, replicas, strict=True))
            self.lost.append(points / max(sum(tokens), 1e-9))
            self.chosen = [
                each.update(EngineSample(self.now_s, load, decision.range))
                for each, load in zip(self.loops, loads, strict=True)
            ]

    def worst_hour(self):
        """Return the mean points that the average token lost in the hour in which it lost most."""
        size = int(3600 / HOURS_PERIOD)
        begins = range(max(len(self.lost) - size, 0) + 1)
        return max(sum(self.lost[i : i + size]) for i in begins) / size

    def first_overspent(self):
        return next(i for i, each in enumerate(self.decisions) if each.is_overspent)


@given(
    st.floats(0.1, 2.0),
    st.lists(
        st.tuples(st.lists(st.floats(0, 40), min_size=2, max_size=2), st.floats(60, 2500)),
        min_size=1,
        max_size=5,
    ),
)
def test_no_hour_loses_more_than_the_budget(budget, spans):
    hours = Hours(2, budget)
    for loads, seconds in spans:
        hours.serve(loads, seconds)
    # the loss of a period is known only after it
    assert hours.worst_hour() <= budget + FLOOR_LOSS * 3 * HOURS_PERIOD / 3600


def test_a_spent_budget_pins_tier_default_until_some_of_it_is_back():
    hours = Hours(2, 1.0)
    hours.serve([40, 40], 5000)
    first = hours.first_overspent()
    assert HOURS_PERIOD * first == pytest.approx(3600 / FLOOR_LOSS, abs=3 * HOURS_PERIOD)
    assert hours.decisions[first].range.floor_threshold == 1.0
    assert hours.decisions[first].range.flex_floor_threshold == SETTINGS.flex_floor_threshold
    again = next(i for i, each in enumerate(hours.decisions) if i > first and not each.is_overspent)
    assert 3600 <= HOURS_PERIOD * again <= 3600 + 180, "an hour after the first of it was lost"
    assert hours.decisions[again].range.floor_threshold == SETTINGS.floor_threshold
    assert max(hours.lost[first + 2 : again]) == 0.0


def test_idle_replicas_do_not_dilute_the_loss():
    hours = Hours(2, 1.0)
    hours.serve([40, 0], 5000)
    spent_s = HOURS_PERIOD * hours.first_overspent()
    assert spent_s == pytest.approx(3600 / FLOOR_LOSS, abs=3 * HOURS_PERIOD)


def test_a_constant_loss_within_the_budget_is_never_stopped():
    decisions, _ = run(steady(5, 4 * 3600, ready=7, threshold=0.95))
    assert not any(decision.is_overspent for decision in decisions)


def test_without_a_budget_nothing_is_lost():
    hours = Hours(1, 0.0)
    hours.serve([40], 60)
    assert all(decision.range.floor_threshold == 1.0 for decision in hours.decisions)
    assert sum(hours.lost) == 0.0


# Examples


@pytest.mark.parametrize(
    ("snapshot", "is_saturated"),
    [
        (snapshot_of(0, 30, ready=16, running=16, waiting=9, is_lowest=True), True),
        # replicas that are starting do not help requests that come now
        (snapshot_of(0, 30, ready=9, running=16, waiting=9, is_lowest=True), True),
        (snapshot_of(0, 7, ready=9, running=16, is_lowest=True), False),
        (snapshot_of(0, 30, ready=16, running=16, waiting=9), False),
    ],
    ids=["all are full", "all are ordered", "more may be ordered", "a lower τ is allowed"],
)
def test_saturated_means_that_nothing_is_left_to_give(snapshot, is_saturated):
    assert decision_on(snapshot).range.is_saturated == is_saturated


def test_tier_flex_must_not_have_the_higher_floor():
    with pytest.raises(UserError, match="flex_floor_threshold is above floor_threshold"):
        build_settings({"floor_threshold": 0.6}, OuterSettings, "config.yaml")


@pytest.mark.parametrize(("prompts", "needed", "number"), [(0.0, 6.25, 7), (1.0, 7.5, 8)])
def test_replicas_follow_the_token_rate_and_prompts(prompts, needed, number):
    """By hand: (5 + prompts) / 0.8, rounded up."""
    last = run(steady(5, 100, prompts=prompts, ready=5))[0][-1]
    assert (last.needed, last.num_replicas) == (pytest.approx(needed), number)


def test_a_burst_counts_at_once_if_replicas_are_busy():
    _, state = run(steady(5, 300))
    calm = decision_on(snapshot_of(300, 10), state)
    assert calm.num_replicas == 8, "it counts as a part of the mean if batches are free"
    busy = decision_on(snapshot_of(300, 10, running=15), state)
    assert (busy.num_replicas, busy.reason) == (10, Reason.LOAD), "it hides nothing as a mean does"
    assert busy.range.feed_forward == 10 / 8 / SETTINGS.full


def test_noise_does_not_count_at_once():
    decisions, state = run(steady(5, 300))
    after = decision_on(snapshot_of(300, 6, running=16), state)
    assert after.num_replicas == decisions[-1].num_replicas


def test_waiting_requests_alone_order_no_replicas():
    """The replicas for the arrivals work them off, and more would come when they are gone."""
    (calm, full), _ = run([snapshot_of(0, 4, ready=5), snapshot_of(2, 4, ready=5, waiting=50)])
    assert full.num_replicas == calm.num_replicas


def test_slow_replicas_need_more_of_them():
    """By hand: 2 / 0.8, over the mean pace of 0.5."""
    snapshots = steady(2, 100, ready=2)
    for each in snapshots:
        each.replicas[:] = [replace(each.replicas[0], pace=pace) for pace in (0.3, 0.7)]
    last = run(snapshots)[0][-1]
    assert (last.needed, last.num_replicas) == (pytest.approx(5.0), 5)
    assert last.pace == pytest.approx(0.5)


def test_the_last_pace_holds_while_none_is_known():
    _, state = run(steady(2, 100, ready=5, pace=0.5))
    unknown, state = run(steady(2, 200, start=100, ready=5), state)
    assert {each.pace for each in unknown} == {0.5}
    held = decision_on(replace(snapshot_of(300, 2), arrivals=None), state)
    assert (held.reason, held.pace) == (Reason.HELD, 0.5)


def test_a_state_of_an_earlier_version_is_continued():
    decisions, state = run(steady(5, 100))
    for name in ("pace", "late_queue"):
        del state.__dict__[name]  # as a pickle of a state without them is read
    after = decision_on(snapshot_of(100, 5), pickle.loads(pickle.dumps(state)))  # noqa: S301
    assert (after.num_replicas, after.pace) == (decisions[-1].num_replicas, 1.0)


def queued(seconds, *, waiting=100.0, start=100.0, starting=0):
    """Return snapshots of two full replicas that get 4.4 requests a second and do not keep up."""
    return steady(
        1.0, seconds, start=start, ready=2, running=16.0, waiting=waiting / 2, starting=starting
    )


def test_a_queue_that_stays_too_long_orders_replicas_whatever_was_measured():
    """By hand: 32 run and 100 wait for batches of 16."""
    _, state = run(steady(1, 100, ready=2))
    decisions, state = run(queued(22), state)
    assert [each.num_replicas for each in decisions] == [2] * 10 + [9]
    assert decisions[-1].reason is Reason.QUEUE
    assert decisions[-1].needed < 2
    after, _ = run(steady(1, 80, start=122, ready=9), state)
    assert {each.num_replicas for each in after} == {9}, "they stay for a scale-in window"


@pytest.mark.parametrize(
    "snapshots",
    [
        queued(60, starting=1),
        queued(20),
        queued(60, waiting=4),
        [*queued(18), *queued(2, start=118, waiting=0), *queued(18, start=120)],
    ],
    ids=["a replica starts", "not yet long enough", "it takes no longer", "it was empty once"],
)
def test_a_queue_orders_nothing_before_that(snapshots):
    _, state = run(steady(1, 100, ready=2))
    assert {each.num_replicas for each in run(snapshots, state)[0]} == {2}


@pytest.mark.parametrize("period_s", [2.21, 6.1])
def test_a_queue_orders_replicas_however_late_decisions_come(period_s):
    """No two of them are 20 to 22 s apart."""
    late = {"ready": 2, "running": 16.0, "waiting": 50.0}
    snapshots = [snapshot_of(period_s * number, 1.0, **late) for number in range(12)]
    assert Reason.QUEUE in [each.reason for each in run(snapshots)[0]]


def test_a_queue_orders_sooner_where_a_start_takes_less():
    settings, state = SETTINGS.model_copy(update={"cold_start_s": 6.0}), OuterState()
    numbers = []
    for each in queued(6):
        decision, state = decide(each, state, CAPACITY, settings)
        numbers.append(decision.num_replicas)
    assert numbers == [2, 9, 9]


def test_replicas_are_stopped_only_after_a_window():
    decisions, state = run(steady(10, 300))
    assert decisions[-1].num_replicas == 13
    after, _ = run(steady(4, 400, start=300), state)
    reasons = [decision.reason for decision in after]
    first = reasons.index(Reason.IDLE)
    assert PERIOD * first >= SETTINGS.scale_in_window_s / 2
    assert after[-1].num_replicas == 5
    assert set(reasons[:first]) <= {Reason.WAITING, Reason.STEADY}


def test_one_burst_keeps_no_replicas():
    decisions, _ = run(bursts((0.0, 10.0)))
    assert max(each.num_replicas for each in decisions) > SETTINGS.min_replicas
    assert decisions[-1].num_replicas == SETTINGS.min_replicas


@pytest.mark.parametrize("per_s", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_chance_in_a_constant_load_is_no_burst(per_s, seed):
    """Requests arrive at random for ten minutes and keep .7 replicas busy in the mean."""
    arrived = np.random.default_rng(seed).poisson(per_s * PERIOD, int(600 / PERIOD))
    num_periods = int(RATE_WINDOW_S / PERIOD)
    rates = np.convolve(arrived, np.ones(num_periods))[: len(arrived)] / RATE_WINDOW_S
    each = 0.7 / per_s
    _, state = run(
        snapshot_of(PERIOD * i, rate * each, output=each * ONE) for i, rate in enumerate(rates)
    )
    assert len(state.bursts) <= 1, "only the first arrivals may be one"


def test_bursts_that_do_not_recur_are_forgotten():
    _, state = run(bursts(*[(2.0, 8.0)] * 2))
    length_s = SETTINGS.burst_memory_s + SETTINGS.scale_in_window_s
    decisions, state = run(steady(0.0, length_s, start=2 * BURSTS_S), state)
    assert decisions[-1].num_replicas == SETTINGS.min_replicas
    assert state.bursts == ()


def test_a_burst_that_a_lower_threshold_carries_needs_fewer_replicas():
    prompts, decoding = (run(bursts(*[each] * 2))[0][-1] for each in ((0.0, 10.0), (10.0, 0.0)))
    assert decoding.needed == pytest.approx(prompts.needed / FLOOR_GAIN)
    spent = OuterState(losses=((0.0, 3600 * SETTINGS.loss_budget),))
    pinned = run(bursts(*[(10.0, 0.0)] * 2), spent)[0][-1]
    assert pinned.is_overspent
    assert pinned.needed == pytest.approx(prompts.needed), "τ must not be lowered"


def test_a_load_that_lasted_keeps_no_replicas():
    _, state = run([*steady(2, 300), *steady(10, 600, start=300)])
    assert len(state.bursts) == 1
    decisions, _ = run(steady(2, 400, start=900), state)
    assert decisions[-1].num_replicas == 3


def test_a_lasting_low_threshold_buys_replicas_one_by_one():
    decisions, state = run(steady(5, 100, ready=7))
    after, _ = run(steady(5, 60, start=100, threshold=0.7, ready=7), state)
    numbers = [decision.num_replicas for decision in after]
    assert Reason.DEBT in {decision.reason for decision in after}
    assert numbers[-1] > decisions[-1].num_replicas
    assert all(after - before in (0, 1) for before, after in pairwise(numbers))


@pytest.mark.parametrize(
    ("change", "is_used"),
    [
        ({"observed_s": -6 * PERIOD}, True),
        ({"observed_s": -7 * PERIOD}, False),
        ({"num_running": math.nan}, False),
        ({"gain": math.inf}, False),
        ({"loss": -1.0}, False),
    ],
    ids=["after six periods", "after seven", "not a number", "infinite", "negative"],
)
def test_a_report_is_used_for_six_periods_and_only_if_its_numbers_are_sound(change, is_used):
    others = snapshot_of(0.0, 8.0, ready=4)
    one_more = replace(ReplicaLoad(0.0, 16, 60), **change)
    decision = decision_on(replace(others, replicas=[*others.replicas, one_more]))
    shared = decision.range.feed_forward < decision_on(others).range.feed_forward
    assert shared == is_used


@pytest.mark.parametrize(
    "change",
    [
        {"arrivals_observed_s": 300 - 7 * PERIOD},
        {"arrivals": None},
        {"arrivals": Arrivals(math.nan, 0, 100)},
        {"replicas": [ReplicaLoad(300 - 7 * PERIOD, 8, 0)] * 8},
    ],
    ids=["stale arrivals", "unknown arrivals", "not a number", "no replica reports"],
)
def test_without_known_arrivals_or_replicas_nothing_changes(change):
    decisions, state = run(steady(10, 300))
    held = decision_on(replace(snapshot_of(300, 0), **change), state)
    assert held.num_replicas == decisions[-1].num_replicas
    assert (held.reason, held.range) == (Reason.HELD, AT_TARGET)


# Lossless speed


def debt_after_20_s(threshold, *, capacity=CAPACITY, **changes):
    """Return the debt of 20 s in which every replica has a certain τ."""
    settings, state = SETTINGS.model_copy(update={"debt_s": 100.0, **changes}), OuterState()
    for step in range(11):
        snapshot = snapshot_of(PERIOD * step, 4.0, threshold=threshold)
        decision, state = decide(snapshot, state, capacity, settings)
    return decision.debt


@pytest.mark.parametrize("num_rungs", [3, 5])
def test_time_at_the_floor_counts_in_full_whatever_else_was_measured(num_rungs):
    """20 s at the floor of .9 are 20 s of debt, with and without rungs of .8 and .7."""
    capacity = replace(CAPACITY, rungs=LADDER[:num_rungs])
    assert debt_after_20_s(0.9, capacity=capacity) == pytest.approx(20.0)


def test_tier_flex_alone_makes_debt_where_tier_default_may_not_be_lowered():
    assert debt_after_20_s(0.7, floor_threshold=1.0) == pytest.approx(20.0)
    share = (CAPACITY.gain(LADDER[1]) - 1) / (CAPACITY.gain(LADDER[4]) - 1)
    assert debt_after_20_s(0.95, floor_threshold=1.0) == pytest.approx(20.0 * share)
    assert debt_after_20_s(0.7, floor_threshold=1.0, flex_floor_threshold=1.0) == 0.0


def test_a_full_batch_in_mode_exact_makes_no_debt():
    capacity = replace(CAPACITY, rungs=(AR, exact_rung(2.2, 5), *LADDER[1:]))
    loop, state = InnerLoop(capacity, InnerSettings()), OuterState()
    for step in range(11):
        chosen = loop.update(EngineSample(PERIOD * step, 40.0))
        load = ReplicaLoad(PERIOD * step, 16, 24, chosen.gain, chosen.loss, chosen.is_lowest)
        snapshot = replace(snapshot_of(PERIOD * step, 4.0), replicas=[load] * 4)
        decision, state = decide(snapshot, state, capacity, SETTINGS)
    assert (decision.debt, decision.is_overspent) == (0.0, False)
