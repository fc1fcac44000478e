from __future__ import annotations

import math
import os
import pickle
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_autoscale.model.capacity import Capacity, Rung, linear_step_time
from mars_autoscale.policy.decide import Decision, OuterSettings, OuterState, Reason, decide
from mars_autoscale.policy.inner_loop import LocalController, LocalSettings
from mars_autoscale.policy.observe import Arrivals, Look, ReplicaLoad, Snapshot
from mars_autoscale.simulation.policies import StaticReplicas, Target
from mars_autoscale.simulation.replicas import ReplicaSettings
from mars_autoscale.simulation.run import Simulation
from mars_autoscale.traces.files import TraceRequest
from mars_platform.config import build_settings
from mars_platform.errors import UserError

LADDER = (
    Rung(1.0, 1.0, 0.0),
    Rung(0.95, 1.695, 1.7, 3),
    Rung(0.9, 1.85, 2.95, 3),
    Rung(0.8, 2.065, 7.6, 3),
    Rung(0.7, 2.255, 12.6, 3),
)
CAPACITY = Capacity(linear_step_time(0.032, 128), LADDER, 16, 20_000)
ONE = CAPACITY.tokens_per_s(LADDER[0])
SETTINGS = OuterSettings(min_replicas=2, max_replicas=16, cold_start_s=60, utilization=0.8)
PERIOD = SETTINGS.period_s

ANY = st.floats(allow_nan=True, allow_infinity=True)
LOADS = st.builds(ReplicaLoad, ANY, ANY, ANY, ANY, ANY, st.booleans())
ARRIVALS = st.none() | st.builds(Arrivals, ANY, ANY, ANY)
SNAPSHOTS = st.builds(
    Snapshot, ANY, st.lists(LOADS, max_size=20), st.integers(0, 50), ARRIVALS, ANY
)
MANY = settings(max_examples=int(os.environ.get("MARSRAY_EXAMPLES", "50")), deadline=None)
"""More of them are for whoever changes the decisions: ``MARSRAY_EXAMPLES=2000``."""


def snapshot_of(
    now: float,
    replicas: float,
    *,
    ready: int = 8,
    starting: int = 0,
    threshold: float = 1.0,
    is_lowest: bool = False,
    waiting: float = 0.0,
    running: float = 8.0,
    prompts: float = 0.0,
) -> Snapshot:
    """Decode load worth so many replicas at τ = 1, with outputs of 100 tokens each."""
    rung = next(rung for rung in LADDER if rung.threshold <= threshold)
    load = ReplicaLoad(now, running, waiting, CAPACITY.gain(rung), rung.loss, is_lowest)
    loads = [load] * ready
    arrivals = Arrivals(replicas * ONE / 100, prompts * CAPACITY.prefill_tokens_per_s, 100)
    return Snapshot(now, loads, starting, arrivals, now)


def run(
    snapshots: Sequence[Snapshot], state: OuterState | None = None
) -> tuple[list[Decision], OuterState]:
    state, decisions = state or OuterState(), []
    for each in snapshots:
        decision, state = decide(each, state, CAPACITY, SETTINGS)
        decisions.append(decision)
    return decisions, state


def steady(replicas: float, seconds: float, start: float = 0.0, **more: float) -> list[Snapshot]:
    """The same load for some time, served by the replicas that were asked for at its start."""
    times = range(int(seconds / PERIOD))
    return [snapshot_of(start + PERIOD * i, replicas, **more) for i in times]  # type: ignore[arg-type]


BURSTS_S = 240.0


def bursts(*peaks: tuple[float, float]) -> list[Snapshot]:
    """Of decoding and prompts, 20 s each, with nothing for 60 s before and 160 s after."""
    return [
        each
        for i, (load, prompts) in enumerate(peaks)
        for each in (
            *steady(0.0, 60, start=BURSTS_S * i),
            *steady(load, 20, start=BURSTS_S * i + 60, prompts=prompts),
            *steady(0.0, 160, start=BURSTS_S * i + 80),
        )
    ]


# Whatever comes


@MANY
@given(st.lists(SNAPSHOTS, max_size=6))
def test_any_snapshots_give_decisions_within_bounds(snapshots: list[Snapshot]) -> None:
    decisions, _ = run(snapshots)
    for decision in decisions:
        assert SETTINGS.min_replicas <= decision.num_replicas <= SETTINGS.max_replicas
        assert decision.floor_threshold in (SETTINGS.floor_threshold, 1.0)
        assert decision.flex_floor_threshold in (SETTINGS.flex_floor_threshold, 1.0)
        assert decision.floor_threshold >= decision.flex_floor_threshold
        assert decision.feed_forward >= 1.0
        figures = decision.decode_tokens_per_s, decision.needed, decision.debt
        assert all(math.isfinite(value) for value in figures)


@MANY
@given(st.floats(0, 30), st.floats(0, 30), st.floats(0, 5), st.integers(1, 16))
def test_more_load_never_lowers_replicas(
    load: float, more: float, prompts: float, ready: int
) -> None:
    low, high = (
        run(steady(each, 20, prompts=prompts, ready=ready))[0][-1] for each in (load, load + more)
    )
    assert high.num_replicas >= low.num_replicas
    assert high.feed_forward >= low.feed_forward


@MANY
@given(st.floats(-3600, 3600), st.floats(0, 20))
def test_a_clock_that_jumps_ends_no_replica(jump: float, load: float) -> None:
    decisions, state = run(steady(10, 400))
    before = decisions[-1].num_replicas
    after, _ = run([snapshot_of(400 + jump, load)], state)
    assert after[0].num_replicas >= before


@MANY
@given(st.floats(0.1, 14), st.floats(0.0, 1.0))
def test_constant_load_settles(load: float, prompts: float) -> None:
    decisions, _ = run(steady(load, 1200, prompts=prompts))
    numbers = [decision.num_replicas for decision in decisions]
    changes = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1]]
    late = [i for i in changes if i * PERIOD > 200]
    assert len(late) <= 1, changes


@MANY
@given(st.floats(2, 8), st.floats(1, 2))
def test_a_step_in_load_overshoots_by_one_at_the_most(load: float, times: float) -> None:
    _, state = run(steady(load, 300))
    decisions, _ = run(steady(load * times, 400, start=300), state)
    settled = decisions[-1].num_replicas
    assert max(decision.num_replicas for decision in decisions) <= max(
        settled + 1,
        math.ceil(settled * SETTINGS.max_trend),
        run(steady(load, 300))[0][-1].num_replicas,
    )


@MANY
@given(st.lists(st.tuples(st.floats(0, 8), st.floats(0, 16)), min_size=2, max_size=4))
def test_bursts_find_the_replicas_that_the_second_highest_needs(
    peaks: list[tuple[float, float]],
) -> None:
    decisions, _ = run(bursts(*peaks))
    lowest = sorted(load / CAPACITY.gain(LADDER[2]) + prompts for load, prompts in peaks)
    kept = min(math.ceil(lowest[-2] - 1e-9), SETTINGS.max_replicas)
    assert decisions[-1].num_replicas == max(kept, SETTINGS.min_replicas)


@MANY
@given(
    st.lists(st.tuples(st.floats(0, 8), st.floats(0, 8)), min_size=1, max_size=4),
    st.floats(0, 20),
    st.floats(0, 20),
)
def test_more_load_after_bursts_never_lowers_replicas(
    peaks: list[tuple[float, float]], load: float, more: float
) -> None:
    _, state = run(bursts(*peaks))
    now = BURSTS_S * len(peaks)
    low, high = (run([snapshot_of(now, each)], state)[0][0] for each in (load, load + more))
    assert high.num_replicas >= low.num_replicas


@MANY
@given(st.floats(0.70, 0.99), st.floats(0, 4))
def test_no_scale_in_while_quality_is_paid_with(threshold: float, load: float) -> None:
    decisions, state = run(steady(10, 300))
    lasting = steady(load, 600, start=300, threshold=threshold)
    after, _ = run(lasting, state)
    assert min(each.num_replicas for each in after) >= decisions[-1].num_replicas


@MANY
@given(st.lists(SNAPSHOTS, max_size=8), st.integers(0, 8))
def test_a_kept_state_goes_on_as_if_nothing_had_been(snapshots: list[Snapshot], cut: int) -> None:
    whole, _ = run(snapshots)
    half, state = run(snapshots[:cut])
    for kept in (pickle.loads(pickle.dumps(state)), OuterState(**asdict(state))):  # noqa: S301
        rest, _ = run(snapshots[cut:], kept)
        assert repr(half + rest) == repr(whole)  # as text: nan is not itself


@MANY
@given(
    st.integers(1, 16),
    st.lists(st.tuples(st.floats(0, 40), st.booleans()), min_size=1, max_size=16),
)
def test_saturated_at_all_replicas_and_the_lowest_stage_alone(
    most: int, replicas: list[tuple[float, bool]]
) -> None:
    bounds = SETTINGS.model_copy(update={"min_replicas": 1, "max_replicas": most})
    loads = [ReplicaLoad(0.0, load, 0.0, 1.2, 1.0, is_lowest) for load, is_lowest in replicas]
    snapshot = replace(snapshot_of(0, 8), replicas=loads)
    decision, _ = decide(snapshot, OuterState(), CAPACITY, bounds)
    mean = sum(load for load, _ in replicas) / len(replicas)
    nothing_left = decision.num_replicas == most and all(lowest for _, lowest in replicas)
    assert decision.is_saturated == (nothing_left and mean >= bounds.busy * CAPACITY.max_num_seqs)


HOURS_PERIOD = 10.0


class Hours:
    """Replicas, their inner loops and the outer one, as time goes by."""

    def __init__(self, num_replicas: int, budget: float) -> None:
        self.settings = SETTINGS.model_copy(
            update={"loss_budget": budget, "period_s": HOURS_PERIOD}
        )
        self.locals = [LocalController(CAPACITY, LocalSettings()) for _ in range(num_replicas)]
        self.state = OuterState()
        self.stages = [each.update(Look(0.0, 0.0)) for each in self.locals]
        self.now_s = 0.0
        self.lost: list[tuple[float, float]] = []
        """(points of an average token, seconds), a period each."""
        self.decisions: list[Decision] = []

    def serve(self, loads: Sequence[float], seconds: float) -> None:
        """The same requests at each replica for some time."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += HOURS_PERIOD
            reports = [
                ReplicaLoad(
                    self.now_s,
                    min(load, 16),
                    max(load - 16, 0),
                    stage.gain,
                    stage.default.loss,
                    stage.is_lowest,
                )
                for load, stage in zip(loads, self.stages, strict=True)
            ]
            arrivals = Arrivals(ONE * len(loads) / 100, 0.0, 100.0)
            snapshot = Snapshot(self.now_s, reports, 0, arrivals, self.now_s)
            decision, self.state = decide(snapshot, self.state, CAPACITY, self.settings)
            self.decisions.append(decision)
            tokens = [each.num_running * each.gain for each in reports]
            points = sum(n * each.loss for n, each in zip(tokens, reports, strict=True))
            self.lost.append((points / max(sum(tokens), 1e-9), HOURS_PERIOD))
            self.stages = [
                each.update(
                    Look(
                        self.now_s,
                        load,
                        floor_threshold=decision.floor_threshold,
                        feed_forward=decision.feed_forward,
                        flex_floor_threshold=decision.flex_floor_threshold,
                    )
                )
                for each, load in zip(self.locals, loads, strict=True)
            ]

    def worst_hour(self) -> float:
        """Points that the average token lost on average over the hour in which it lost most."""
        points = [points * seconds for points, seconds in self.lost]
        size = int(3600 / HOURS_PERIOD)
        return max(sum(points[i : i + size]) for i in range(max(len(points) - size, 0) + 1)) / 3600


@MANY
@given(
    st.floats(0.1, 2.0),
    st.lists(
        st.tuples(st.lists(st.floats(0, 40), min_size=2, max_size=2), st.floats(60, 2500)),
        min_size=1,
        max_size=5,
    ),
)
def test_no_hour_loses_more_than_the_budget(
    budget: float, spans: list[tuple[list[float], float]]
) -> None:
    hours = Hours(2, budget)
    for loads, seconds in spans:
        hours.serve(loads, seconds)
    # a period is over before its loss is known
    assert hours.worst_hour() <= budget + LADDER[2].loss * 3 * HOURS_PERIOD / 3600


# By example


def test_a_spent_budget_pins_class_default_until_some_is_back() -> None:
    hours = Hours(2, 1.0)
    hours.serve([40, 40], 5000)
    first = next(i for i, each in enumerate(hours.decisions) if each.is_overspent)
    assert HOURS_PERIOD * first == pytest.approx(3600 / LADDER[2].loss, abs=3 * HOURS_PERIOD)
    assert hours.decisions[first].floor_threshold == 1.0
    assert hours.decisions[first].flex_floor_threshold == SETTINGS.flex_floor_threshold
    again = next(i for i, each in enumerate(hours.decisions) if i > first and not each.is_overspent)
    assert 3600 <= HOURS_PERIOD * again <= 3600 + 180, "an hour after the first of it was lost"
    assert hours.decisions[again].floor_threshold == SETTINGS.floor_threshold
    pinned = [loss for loss, _ in hours.lost[first + 2 : again]]
    assert max(pinned) == 0.0


def test_what_idle_replicas_do_does_not_thin_the_loss() -> None:
    hours = Hours(2, 1.0)
    hours.serve([40, 0], 5000)
    first = next(i for i, each in enumerate(hours.decisions) if each.is_overspent)
    assert HOURS_PERIOD * first == pytest.approx(3600 / LADDER[2].loss, abs=3 * HOURS_PERIOD)


def test_a_constant_loss_within_the_budget_is_never_stopped() -> None:
    decisions, _ = run(steady(5, 4 * 3600, ready=7, threshold=0.95))
    assert not any(decision.is_overspent for decision in decisions)


def test_without_a_budget_nothing_is_lost() -> None:
    hours = Hours(1, 0.0)
    hours.serve([40], 60)
    assert all(decision.floor_threshold == 1.0 for decision in hours.decisions)
    assert sum(points for points, _ in hours.lost) == 0.0


def test_nothing_is_left_to_give() -> None:
    (decision,), _ = run([snapshot_of(0, 30, ready=16, running=16, waiting=9, is_lowest=True)])
    assert decision.is_saturated
    (late,), _ = run([snapshot_of(0, 30, ready=9, running=16, waiting=9, is_lowest=True)])
    assert late.is_saturated, "those that start are no help to what comes now"
    assert late.num_replicas == SETTINGS.max_replicas
    (fewer,), _ = run([snapshot_of(0, 7, ready=9, running=16, is_lowest=True)])
    assert not fewer.is_saturated
    assert fewer.num_replicas < SETTINGS.max_replicas
    (higher,), _ = run([snapshot_of(0, 30, ready=16, running=16, waiting=9)])
    assert not higher.is_saturated


def test_class_flex_must_not_pay_less() -> None:
    with pytest.raises(UserError, match="flex_floor_threshold is above floor_threshold"):
        build_settings({"floor_threshold": 0.6}, OuterSettings, "config.yaml")


def test_replicas_follow_the_token_rate_and_prompts() -> None:
    decisions, _ = run(steady(5, 100, ready=5))
    assert decisions[-1].num_replicas == 7  # 5 / 0.8, rounded up
    assert math.isclose(decisions[-1].needed, 6.25)
    both, _ = run(steady(5, 100, prompts=1.0, ready=5))
    assert both[-1].num_replicas == 8  # (5 + 1) / 0.8


def test_a_burst_counts_at_once() -> None:
    _, state = run(steady(5, 300))
    (calm,), _ = run([snapshot_of(300, 10)], state)
    assert calm.num_replicas == 8, "what slots are free for counts as a part of the mean"
    (decision,), _ = run([snapshot_of(300, 10, running=15)], state)
    assert (decision.num_replicas, decision.reason) == (14, Reason.LOAD)  # 12.5 and a trend
    assert decision.feed_forward == 10 / 8 / SETTINGS.full


def test_noise_does_not_count_at_once() -> None:
    decisions, state = run(steady(5, 300))
    after, _ = run([snapshot_of(300, 6, running=16)], state)
    assert after[0].num_replicas == decisions[-1].num_replicas


def test_no_threshold_makes_prompts_faster() -> None:
    (decision,), _ = run([snapshot_of(0, 1, ready=4, prompts=4.0)])
    assert decision.feed_forward == 1.0
    assert decision.num_replicas == 7


def test_what_waits_asks_for_replicas() -> None:
    (calm, full), _ = run([snapshot_of(0, 4, ready=5), snapshot_of(2, 4, ready=5, waiting=50)])
    assert full.num_replicas > calm.num_replicas


def test_fewer_replicas_after_a_window() -> None:
    decisions, state = run(steady(10, 300))
    assert decisions[-1].num_replicas == 13
    after, _ = run(steady(4, 400, start=300), state)
    reasons = [decision.reason for decision in after]
    first = reasons.index(Reason.IDLE)
    assert PERIOD * first >= SETTINGS.scale_in_window_s / 2
    assert after[-1].num_replicas == 5
    assert set(reasons[:first]) <= {Reason.WAITING, Reason.STEADY}


def test_one_burst_is_no_pattern() -> None:
    decisions, _ = run(bursts((0.0, 10.0)))
    assert max(each.num_replicas for each in decisions) > SETTINGS.min_replicas
    assert decisions[-1].num_replicas == SETTINGS.min_replicas


def test_bursts_of_prompts_that_come_again_find_replicas() -> None:
    decisions, _ = run(bursts(*[(2.0, 8.0)] * 4))
    lowest = 2.0 / CAPACITY.gain(LADDER[2]) + 8.0
    for num in (2, 3, 4):
        each = decisions[int(num * BURSTS_S / PERIOD) - 1]
        assert (each.num_replicas, each.reason) == (math.ceil(lowest), Reason.BURSTS)
        assert each.needed == pytest.approx(lowest)
        assert each.decode_tokens_per_s == 0.0


def test_bursts_that_do_not_come_again_are_forgotten() -> None:
    _, state = run(bursts(*[(2.0, 8.0)] * 2))
    length_s = SETTINGS.burst_memory_s + SETTINGS.scale_in_window_s
    decisions, state = run(steady(0.0, length_s, start=2 * BURSTS_S), state)
    assert decisions[-1].num_replicas == SETTINGS.min_replicas
    assert state.bursts == ()


def test_what_a_lower_threshold_carries_needs_fewer() -> None:
    prompts, _ = run(bursts(*[(0.0, 10.0)] * 2))
    decoding, _ = run(bursts(*[(10.0, 0.0)] * 2))
    assert decoding[-1].needed == pytest.approx(prompts[-1].needed / CAPACITY.gain(LADDER[2]))
    spent = OuterState(losses=((0.0, 3600 * SETTINGS.loss_budget),))
    pinned, _ = run(bursts(*[(10.0, 0.0)] * 2), spent)
    assert pinned[-1].is_overspent
    assert pinned[-1].needed == pytest.approx(prompts[-1].needed), "τ must not be lowered"


def test_a_load_that_lasts_leaves_nothing_behind() -> None:
    _, state = run([*steady(2, 300), *steady(10, 600, start=300)])
    assert len(state.bursts) == 1
    decisions, _ = run(steady(2, 400, start=900), state)
    assert decisions[-1].num_replicas == 3


def test_a_lasting_low_threshold_buys_a_replica() -> None:
    decisions, state = run(steady(5, 100, ready=7))
    after, _ = run(steady(5, 60, start=100, threshold=0.7, ready=7), state)
    numbers = [decision.num_replicas for decision in after]
    assert Reason.DEBT in {decision.reason for decision in after}
    assert numbers[-1] > decisions[-1].num_replicas
    assert all(after - before in (0, 1) for before, after in pairwise(numbers))


def test_what_is_stale_changes_nothing() -> None:
    decisions, state = run(steady(10, 300))
    old = replace(snapshot_of(300, 0), arrivals_observed_s=300 - 7 * PERIOD)
    unknown = replace(snapshot_of(302, 0), arrivals=None)
    broken = replace(snapshot_of(304, 0), arrivals=Arrivals(math.nan, 0, 100))
    after, _ = run([old, unknown, broken], state)
    for decision in after:
        assert decision.num_replicas == decisions[-1].num_replicas
        assert decision.reason is Reason.HELD
        assert (decision.floor_threshold, decision.feed_forward) == (1.0, 1.0)


def test_zero_load_is_zero() -> None:
    decisions, _ = run(steady(0, 400))
    assert decisions[-1].num_replicas == SETTINGS.min_replicas
    assert decisions[-1].needed == 0


def test_a_restart_with_its_state_goes_on() -> None:
    _, state = run(steady(10, 300))
    whole, _ = run(steady(4, 300, start=300), state)
    half, kept = run(steady(4, 100, start=300), state)
    rest, _ = run(steady(4, 300, start=300)[len(half) :], replace(kept))
    assert half + rest == whole


def test_a_target_below_one_spends_no_budget() -> None:
    """What is lost at the target was somebody's choice, and is not the load's."""
    capacity = replace(CAPACITY, rungs=LADDER[2:])
    seen = list[ReplicaLoad]()

    class Noting(StaticReplicas):
        def decide(self, snapshot: Snapshot, /) -> Target:
            seen.extend(snapshot.replicas)
            return super().decide(snapshot)

    trace = [TraceRequest(float(second), 10, 200) for second in range(60)]
    for rung, lost in zip(LADDER[2:4], (0.0, LADDER[3].loss - LADDER[2].loss), strict=True):
        seen.clear()
        Simulation(trace, capacity, ReplicaSettings(max=1), Noting(1, rung)).run()
        assert any(load.num_running for load in seen)
        assert {load.loss for load in seen} == {lost}
