from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_autoscale.model.capacity import Capacity, Rung, linear_step_time
from mars_autoscale.policy.control import (
    NUM_RECORDS,
    RATE_WINDOW_S,
    Cluster,
    Control,
    ControlState,
    LoadReport,
    Plan,
    Record,
    Totals,
)
from mars_autoscale.policy.decide import Decision, OuterSettings, OuterState, Reason
from mars_autoscale.policy.observe import Arrivals, Snapshot

LADDER = (Rung(1.0, 1.0, 0.0), Rung(0.95, 1.7, 1.7, 3), Rung(0.9, 1.85, 3.0, 3))
CAPACITY = Capacity(linear_step_time(0.032, 128), LADDER, 16, 20_000)
SETTINGS = OuterSettings(min_replicas=2, max_replicas=8, period_s=2.0)
PLAN = Plan(CAPACITY, SETTINGS)
START_S = 1_000.0
REPORT_S = 0.5


def report_of(replica: str, totals: Totals | None = None, **changes: Any) -> LoadReport:
    figures = {"age_s": 0.0, "num_running": 4.0, "num_waiting": 0.0, "threshold": 1.0}
    figures |= {"flex_threshold": 1.0, "gain": 1.0, "loss": 0.0, "is_lowest": False}
    return LoadReport(replica, **{**figures, **changes}, totals=totals or Totals())


def totals_at(seconds: float, rate: float, *, prompt: int = 50, output: int = 100) -> Totals:
    """After so many seconds of so many requests each, whose numbers of tokens are given."""
    number = int(rate * seconds)
    return Totals(number, prompt * number, number, output * number)


def hear_for(
    control: Control,
    begin_s: float,
    end_s: float,
    rates: dict[str, float],
    since_s: float | None = None,
) -> None:
    """Steady reports of replicas that serve so many requests a second, since ``since_s``."""
    since_s = begin_s if since_s is None else since_s
    for i in range(int((end_s - begin_s) / REPORT_S) + 1):
        now_s = begin_s + i * REPORT_S
        for replica, rate in rates.items():
            control.hear(now_s, report_of(replica, totals_at(now_s - since_s, rate)), PLAN)


def arrivals_of(control: Control, now_s: float) -> Arrivals:
    snapshot, _, _ = control.question(now_s)
    assert snapshot.arrivals is not None
    return snapshot.arrivals


def take_decision(control: Control, now_s: float) -> Record:
    snapshot, state, plan = control.question(now_s)
    return control.commit(snapshot, *control.answer(snapshot, state, plan))


# Rates


def test_rates_are_those_of_all_replicas_together() -> None:
    control = Control()
    hear_for(control, START_S, START_S + 30, {"a": 2.0, "b": 4.0})
    arrivals = arrivals_of(control, START_S + 30)
    assert arrivals == Arrivals(6.0, 300.0, 100.0)


def test_rates_are_those_of_the_window() -> None:
    control = Control()
    hear_for(control, START_S, START_S + 30, {"a": 2.0})
    before = totals_at(30, 2.0)
    for i in range(1, 41):
        totals = replace(before, arrived=before.arrived + 3 * i)
        control.hear(START_S + 30 + i * REPORT_S, report_of("a", totals), PLAN)
    assert arrivals_of(control, START_S + 50).requests_per_s == pytest.approx(6.0)


def test_there_is_no_rate_in_the_first_second() -> None:
    control = Control()
    control.hear(START_S, report_of("a", Totals(arrived=500)), PLAN)
    assert control.question(START_S)[0].arrivals is None
    control.hear(START_S + 0.5, report_of("a", Totals(arrived=501)), PLAN)
    assert control.question(START_S + 0.5)[0].arrivals is None
    control.hear(START_S + 1.0, report_of("a", Totals(arrived=502)), PLAN)
    assert arrivals_of(control, START_S + 1.0).requests_per_s == 2.0


def test_a_replica_that_comes_late_counts_from_then_on() -> None:
    control = Control()
    hear_for(control, START_S, START_S + 15, {"a": 2.0})
    hear_for(control, START_S + 15, START_S + 20, {"late": 2.0})
    hear_for(control, START_S + 15, START_S + 20, {"a": 2.0}, since_s=START_S)
    # 10 s of one and 5 s of the other, over 10 s
    assert arrivals_of(control, START_S + 20).requests_per_s == pytest.approx(3.0, rel=0.06)


def test_a_replica_that_counts_from_its_start_again_is_no_negative_rate() -> None:
    control = Control()
    hear_for(control, START_S, START_S + 30, {"a": 8.0})
    hear_for(control, START_S + 31, START_S + 35, {"a": 2.0})
    arrivals = arrivals_of(control, START_S + 35)
    assert arrivals == Arrivals(2.0, 100.0, 100.0)


def test_a_silent_replica_gives_no_rate_after_the_window() -> None:
    control = Control()
    hear_for(control, START_S, START_S + 10, {"a": 2.0, "silent": 4.0})
    hear_for(control, START_S + 10.5, START_S + 19, {"a": 2.0}, since_s=START_S)
    assert arrivals_of(control, START_S + 19).requests_per_s > 2.0
    hear_for(control, START_S + 19.5, START_S + 22, {"a": 2.0}, since_s=START_S)
    assert START_S + 22 > START_S + 10 + RATE_WINDOW_S
    assert arrivals_of(control, START_S + 22).requests_per_s == 2.0


def test_prompt_tokens_are_never_negative() -> None:
    """What is found stored is subtracted later than it was added."""
    control = Control()
    for i, prompts in enumerate((5_000, 5_000, 5_000, 1_000)):
        control.hear(START_S + i, report_of("a", Totals(10, prompts)), PLAN)
    assert arrivals_of(control, START_S + 3).prompt_tokens_per_s == 0.0


def test_a_clock_that_is_put_back_costs_a_few_seconds_of_rates() -> None:
    control = Control()
    hear_for(control, START_S, START_S + 20, {"a": 2.0, "silent": 0.0})
    back_s = START_S - 3_600
    snapshot, _, _ = control.question(back_s)
    assert snapshot.replicas == []
    hear_for(control, back_s, back_s + 4, {"a": 2.0})
    snapshot, _, _ = control.question(back_s + 4)
    assert snapshot.arrivals is not None
    assert snapshot.arrivals.requests_per_s == 2.0
    assert len(snapshot.replicas) == 1


# The mean output


def test_the_mean_output_moves_slowly() -> None:
    control = Control()
    for i, (ended, tokens) in enumerate(((0, 0), (2, 200), (12, 2_200))):
        totals = Totals(arrived=20, ended=ended, output_tokens=tokens)
        control.hear(START_S + i, report_of("a", totals), PLAN)
    # at first 100 of each, then 200 of ten more, each of which weighs a hundredth
    assert control.state.mean_output_tokens == pytest.approx(100 + (1 - 0.99**10) * 100)


def test_requests_that_ended_before_the_first_report_do_not_count() -> None:
    control = Control()
    control.hear(START_S, report_of("a", Totals(10, 0, 10, 5_000)), PLAN)
    assert control.state.mean_output_tokens == 0.0
    control.hear(START_S + 1, report_of("a", Totals(11, 0, 11, 5_040)), PLAN)
    assert control.state.mean_output_tokens == 40.0


# What the cluster says


def test_replicas_that_were_asked_for_and_do_not_report_are_starting() -> None:
    control = Control()
    hear_for(control, START_S, START_S + 2, {"a": 1.0, "b": 1.0})
    assert control.question(START_S + 2)[0].num_starting == 0
    control.see(Cluster(frozenset({"a"}), 5))
    snapshot, _, _ = control.question(START_S + 2)
    assert (len(snapshot.replicas), snapshot.num_starting) == (2, 3)
    control.see(Cluster(frozenset({"a", "b", "c"}), 2))
    assert control.question(START_S + 2)[0].num_starting == 0


def test_a_silent_replica_that_does_not_serve_any_more_is_forgotten() -> None:
    control = Control()
    hear_for(control, START_S, START_S + 2, {"gone": 1.0})
    control.see(Cluster(frozenset({"a"}), 1))
    hear_for(control, START_S, START_S + 8, {"a": 1.0})
    assert len(control.question(START_S + 5)[0].replicas) == 2
    assert len(control.question(START_S + 7)[0].replicas) == 1


def test_where_the_clusters_view_is_old_replicas_come_and_go_by_their_reports() -> None:
    """Its controller is dead: it calls a dead replica ready, and does not know a new one."""
    control = Control()
    control.see(Cluster(frozenset({"a", "dead"}), 2))
    hear_for(control, START_S, START_S + 2, {"dead": 1.0})
    hear_for(control, START_S, START_S + 30, {"a": 1.0, "new": 1.0})
    snapshot, _, _ = control.question(START_S + 30)
    ages = sorted(START_S + 30 - load.observed_s for load in snapshot.replicas)
    assert ages == [0.0, 0.0, 28.0]
    assert len(snapshot.known_loads(6 * SETTINGS.period_s)) == 2


def numbers_of(control: Control, begin_s: float, end_s: float) -> list[int]:
    """What is decided on while a replica serves a request a second and others are silent."""
    numbers = []
    for i in range(int((end_s - begin_s) / SETTINGS.period_s)):
        at_s = begin_s + SETTINGS.period_s * i
        hear_for(control, at_s, at_s + 1.5, {"a": 1.0}, since_s=START_S)
        numbers.append(take_decision(control, at_s + 1.5).decision.num_replicas)
    return numbers


def test_while_a_replica_that_serves_says_nothing_none_is_ended() -> None:
    control = Control()
    control.see(Cluster(frozenset({"a", "silent"}), 4))
    hear_for(control, START_S, START_S + 2, {"silent": 1.0})
    assert set(numbers_of(control, START_S, START_S + 300)) == {4}
    assert control.records[-1].decision.reason is Reason.WAITING
    control.see(Cluster(frozenset({"a"}), 4))
    assert numbers_of(control, START_S + 300, START_S + 310)[-1] == SETTINGS.min_replicas


def test_of_a_silent_replica_nothing_counts_where_the_clock_was_put_back() -> None:
    control = Control()
    control.see(Cluster(frozenset({"a", "silent"}), 2))
    hear_for(control, START_S, START_S + 20, {"a": 2.0, "silent": 4.0})
    back_s = START_S - 3_600
    hear_for(control, back_s, back_s + 4, {"a": 2.0})
    snapshot, _, _ = control.question(back_s + 4)
    assert (len(snapshot.replicas), len(snapshot.known_loads(12.0))) == (2, 1)
    arrivals = snapshot.known_arrivals(12.0)
    assert arrivals is not None
    assert arrivals.requests_per_s == 2.0


# Replicas that are taken down


def test_a_replica_that_is_taken_down_does_not_count_though_it_reports() -> None:
    control = Control()
    control.see(Cluster(frozenset({"a", "old"}), 2))
    hear_for(control, START_S, START_S + 10, {"a": 2.0, "old": 2.0})
    control.see(Cluster(frozenset({"a"}), 3))
    last = report_of("old", totals_at(10, 2.0), num_running=1.0, threshold=0.8)
    control.hear(START_S + 10, last, PLAN)
    snapshot, _, _ = control.question(START_S + 10)
    assert (len(snapshot.replicas), snapshot.num_starting) == (1, 2)
    record = take_decision(control, START_S + 10)
    assert (record.num_ready, record.num_running, record.threshold) == (1, 4.0, 1.0)
    assert record.requests_per_s == 4.0, "what came to it comes to the others from now on"
    control.see(Cluster(frozenset({"a", "old"}), 3))
    assert len(control.question(START_S + 10)[0].replicas) == 2


def test_replicas_that_start_report_before_they_are_ready() -> None:
    control = Control()
    control.see(Cluster(frozenset({"a"}), 2))
    hear_for(control, START_S, START_S + 30, {"a": 2.0, "new": 0.0})
    control.see(Cluster(frozenset({"a"}), 2))
    snapshot, _, _ = control.question(START_S + 30)
    assert (len(snapshot.replicas), snapshot.num_starting) == (2, 0)


def test_a_cluster_that_knows_no_replica_any_more_has_only_begun_again() -> None:
    control = Control()
    control.see(Cluster(frozenset({"a", "b"}), 2))
    hear_for(control, START_S, START_S + 2, {"a": 1.0, "b": 1.0})
    control.see(Cluster(frozenset(), 2))
    assert len(control.question(START_S + 2)[0].replicas) == 2


# Updates

BEFORE = Plan(CAPACITY, SETTINGS.model_copy(update={"max_replicas": 4}), made_s=START_S - 900)
AFTER = Plan(CAPACITY, SETTINGS, made_s=START_S - 30)


def test_an_updates_plan_holds_though_old_replicas_go_on_reporting() -> None:
    control = Control()
    control.see(Cluster(frozenset({"old"}), 4))
    numbers = []
    for i in range(20):
        at_s = START_S + i * SETTINGS.period_s
        for second in range(2):
            totals = totals_at(at_s + second - START_S, 25.0)
            control.hear(at_s + second, report_of("old", totals, num_running=16), BEFORE)
            if i >= 10:
                control.hear(at_s + second, report_of("new", num_running=16), AFTER)
                # the old one's report comes last
                control.hear(at_s + second, report_of("old", totals, num_running=16), BEFORE)
        numbers.append(take_decision(control, at_s + 1).decision.num_replicas)
    assert numbers[9] == 4
    assert numbers[10:] == [8] * 10


def test_the_plan_of_an_update_that_was_taken_back_goes_with_its_replicas() -> None:
    control = Control()
    control.see(Cluster(frozenset({"old"}), 2))
    control.hear(START_S, report_of("old"), BEFORE)
    control.hear(START_S, report_of("new"), AFTER)
    assert control.question(START_S)[2] == AFTER
    control.hear(START_S + 10, report_of("old"), BEFORE)
    assert control.question(START_S + 10)[2] == BEFORE


# What replicas told somebody else


def stats_of(observed_s: float, num_running: float = 9.0) -> dict[str, float]:
    return report_of("a", Totals(7, 70, 6, 60), num_running=num_running).stats(observed_s)


def load_of(control: Control, now_s: float) -> tuple[float, float]:
    (load,) = control.question(now_s)[0].replicas
    return load.observed_s, load.num_running


def test_a_silent_replica_is_overheard() -> None:
    control = Control()
    control.hear(START_S, report_of("a"), PLAN)
    control.overhear(START_S + 5, "a", stats_of(START_S + 4.5))
    assert load_of(control, START_S + 5) == (START_S + 4.5, 9.0)


@pytest.mark.parametrize(
    ("now_s", "observed_s"), [(3.9, 3.8), (5.0, -0.5), (5.0, 0.0)], ids=["heard", "older", "same"]
)
def test_nothing_is_overheard_that_is_known(now_s: float, observed_s: float) -> None:
    control = Control()
    control.hear(START_S, report_of("a"), PLAN)
    control.overhear(START_S + now_s, "a", stats_of(START_S + observed_s))
    assert load_of(control, START_S + now_s) == (START_S, 4.0)


def test_the_same_is_not_overheard_again() -> None:
    control = Control()
    control.hear(START_S, report_of("a"), PLAN)
    stats = stats_of(START_S + 4.5)
    for seconds in (5, 10, 15):
        control.overhear(START_S + seconds, "a", stats)
    assert load_of(control, START_S + 15) == (START_S + 4.5, 9.0)


def test_of_a_stranger_nothing_is_overheard() -> None:
    control = Control()
    control.overhear(START_S, "b", stats_of(START_S))
    control.hear(START_S, report_of("a"), PLAN)
    control.overhear(START_S + 5, "b", stats_of(START_S + 5))
    assert len(control.question(START_S + 5)[0].replicas) == 1


@pytest.mark.parametrize(
    "change",
    [{"observed_s": math.nan}, {"arrived": math.nan}, {"ended": math.inf}, {"gain": None}, None],
)
def test_what_is_not_whole_is_not_overheard(change: dict[str, float | None] | None) -> None:
    control = Control()
    control.hear(START_S, report_of("a"), PLAN)
    stats: dict[str, Any] = {} if change is None else {**stats_of(START_S + 5), **change}
    whole = {name: value for name, value in stats.items() if value is not None}
    control.overhear(START_S + 5, "a", whole)
    assert load_of(control, START_S + 5) == (START_S, 4.0)


# Decisions


def test_a_decision_is_written_down_with_what_it_was_taken_on() -> None:
    control = Control()
    control.see(Cluster(frozenset({"a", "b"}), 3))
    hear_for(control, START_S, START_S + 10, {"a": 2.0, "b": 2.0})
    lowered = {"num_waiting": 3.0, "threshold": 0.9, "flex_threshold": 0.7}
    control.hear(START_S + 10, report_of("b", totals_at(10, 2.0), **lowered), PLAN)
    record = take_decision(control, START_S + 10)
    assert record is control.records[-1]
    assert record.decision == control.decision
    assert (record.replicas_before, record.num_ready, record.num_starting) == (3, 2, 1)
    assert (record.num_running, record.num_waiting) == (8, 3)
    assert (record.threshold, record.flex_threshold) == pytest.approx((0.95, 0.85))
    assert (record.requests_per_s, record.prompt_tokens_per_s) == (4.0, 200.0)
    assert record.mean_output_tokens == 100.0
    assert record.problem is None


def test_holding_keeps_the_number_and_says_why() -> None:
    control = Control()
    control.see(Cluster(frozenset({"a"}), 5))
    hear_for(control, START_S, START_S + 10, {"a": 2.0})
    first = take_decision(control, START_S + 10)
    history = control.state.outer
    snapshot, _, _ = control.question(START_S + 12)
    record = control.hold(snapshot, "it is broken")
    assert record.problem == "it is broken"
    assert record.decision.reason is Reason.HELD
    assert record.decision.num_replicas == first.decision.num_replicas == 5
    assert (record.decision.floor_threshold, record.decision.flex_floor_threshold) == (1.0, 1.0)
    assert control.state.outer == history


def test_holding_stays_within_the_bounds_where_nobody_is_there() -> None:
    control = Control()
    control.hear(START_S, report_of("a"), PLAN)
    snapshot, _, _ = control.question(START_S + 100)
    assert snapshot.replicas == []
    assert control.hold(snapshot, "why").decision.num_replicas == SETTINGS.min_replicas


def test_the_latest_hundred_are_kept_and_all_are_counted() -> None:
    control = Control()
    control.hear(START_S, report_of("a"), PLAN)
    for i in range(NUM_RECORDS + 20):
        take_decision(control, START_S + i)
    snapshot, _, _ = control.question(START_S)
    control.hold(snapshot, "why")
    assert len(control.records) == NUM_RECORDS == 100
    assert control.records[0].time_s == START_S + 21
    assert sum(control.counts.values()) == NUM_RECORDS + 21


def test_how_it_decides_can_be_chosen() -> None:
    decision = Decision(7, 0.8, 0.6, 1.5, Reason.LOAD, 1.0, 6.5, 2.0)

    def always(*_: object) -> tuple[Decision, OuterState]:
        return decision, OuterState(7)

    control = Control(always)
    control.hear(START_S, report_of("a"), PLAN)
    assert take_decision(control, START_S).decision == decision
    assert control.state.outer.num_replicas == 7


# Whoever comes after


def test_a_burst_is_remembered() -> None:
    old, new, blank = Control(), Control(), Control()
    old.see(Cluster(frozenset({"a", "b"}), 2))
    for i in range(10):
        at_s = START_S + i * SETTINGS.period_s
        hear_for(old, at_s, at_s + 1.5, {"a": 8.0, "b": 8.0}, since_s=START_S)
        take_decision(old, at_s + 1.5)
    number = old.state.outer.num_replicas
    assert number > 2
    new.restore(old.state)
    for control in (new, blank):
        control.see(Cluster(frozenset({"a", "b"}), number))
        hear_for(control, START_S + 20, START_S + 24, {"a": 1.0, "b": 1.0})
    after, without = (take_decision(each, START_S + 24).decision for each in (new, blank))
    assert after.num_replicas == number
    assert after.needed > 2 * without.needed


def test_with_the_same_reports_it_decides_just_the_same() -> None:
    old, new = Control(), Control()
    old.see(Cluster(frozenset({"a"}), 4))
    hear_for(old, START_S, START_S + 10, {"a": 2.0})
    take_decision(old, START_S + 10)
    new.restore(old.state)
    new.see(Cluster(frozenset({"a"}), 4))
    hear_for(old, START_S + 10.5, START_S + 16, {"a": 2.0}, since_s=START_S)
    hear_for(new, START_S + 11, START_S + 16, {"a": 2.0}, since_s=START_S)
    assert take_decision(new, START_S + 16) == take_decision(old, START_S + 16)
    assert new.state == old.state


def test_what_was_decided_before_the_cluster_is_seen_is_not_kept() -> None:
    """A new one may hear of one replica at first, and must not end the others."""
    known = ControlState(OuterState(num_replicas=5, debt=3.0), 80.0)
    control = Control()
    control.hear(START_S, report_of("a"), PLAN)
    assert take_decision(control, START_S).decision.num_replicas == SETTINGS.min_replicas
    control.restore(known)
    control.see(Cluster(frozenset({"a"}), 5))
    assert control.state == known
    assert take_decision(control, START_S + 0.5).decision.num_replicas == 5


def test_where_nobody_remembers_it_begins_with_what_was_asked_for() -> None:
    control = Control()
    control.hear(START_S, report_of("a"), PLAN)
    take_decision(control, START_S)
    control.see(Cluster(frozenset({"a"}), 6))
    assert take_decision(control, START_S + 0.5).decision.num_replicas == 6


def test_what_the_cluster_says_later_changes_no_decision() -> None:
    control = Control()
    control.see(Cluster(frozenset({"a"}), 5))
    control.hear(START_S, report_of("a"), PLAN)
    take_decision(control, START_S)
    before = control.state
    control.restore(ControlState(OuterState(num_replicas=2)))
    control.see(Cluster(frozenset({"a"}), 3))
    assert control.state == before
    assert before.outer.num_replicas == 5


# Whatever comes

ODD = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 1e300]) | st.floats(0, 1e6)
ODD_TOTALS = st.builds(Totals, ODD, ODD, ODD, ODD)  # type: ignore[arg-type]
ODD_REPORTS = st.builds(
    LoadReport,
    st.sampled_from(["a", "b"]),
    *(ODD for _ in range(7)),
    st.booleans(),
    ODD_TOTALS,
)


def as_json(record: Record) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps(record.as_dict(), allow_nan=False))
    return content


def test_a_record_is_one_flat_object() -> None:
    control = Control()
    hear_for(control, START_S, START_S + 4, {"a": 1.0})
    take_decision(control, START_S + 4)
    content = as_json(control.records[-1])
    assert content["reason"] == control.records[-1].decision.reason
    assert content["num_replicas"] == 2
    assert not any(isinstance(value, dict | list) for value in content.values())


@settings(max_examples=50, deadline=None)
@given(st.lists(ODD_REPORTS, min_size=1, max_size=12))
def test_any_reports_give_bounded_decisions_and_are_got_over(reports: list[LoadReport]) -> None:
    control = Control()
    control.see(Cluster(frozenset({"a", "b"}), 4))
    for i, report in enumerate(reports):
        now_s = START_S + i
        control.hear(now_s, report, PLAN)
        record = take_decision(control, now_s)
        assert SETTINGS.min_replicas <= record.decision.num_replicas <= SETTINGS.max_replicas
        assert record.decision.floor_threshold in (SETTINGS.floor_threshold, 1.0)
        as_json(record)
        as_json(control.hold(control.question(now_s)[0], "why"))
    end_s = START_S + 50
    hear_for(control, START_S + 12, end_s, {"a": 2.0, "b": 2.0})
    record = take_decision(control, end_s)
    assert record.decision.reason is not Reason.HELD
    assert record.requests_per_s == 4.0
    assert math.isfinite(record.mean_output_tokens or 0.0)


def test_a_rate_that_is_no_number_is_told_as_unknown() -> None:
    control = Control()
    control.hear(START_S, report_of("a"), PLAN)
    snapshot = Snapshot(START_S, [], 0, Arrivals(math.nan, 1.0, 1.0), START_S)
    record = control.hold(snapshot, "why")
    assert (record.requests_per_s, record.prompt_tokens_per_s) == (None, None)
