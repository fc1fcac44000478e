import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ladders import CAPACITY
from mars_autoscale.policy.decision import AT_TARGET, OuterState, Reason
from mars_autoscale.policy.inner_loop import InnerLoopDecision
from mars_autoscale.policy.lengths import NUM_SPANS, LengthCounts, counts_of
from mars_autoscale.policy.observe import RATE_WINDOW_S
from mars_autoscale.policy.outer_loop import (
    NUM_RECORDS,
    AutoscalingBasis,
    ClusterView,
    OuterLoop,
    SavedState,
)
from mars_autoscale.policy.reports import (
    EngineStatus,
    IngressReport,
    ReplicaReport,
    RequestCounts,
)
from mars_autoscale.policy.settings import OuterSettings
from mars_platform.method.mode import LiveDecoding
from replica_reports import report_of

SETTINGS = OuterSettings(min_replicas=2, max_replicas=8, period_s=2.0)
BASIS = AutoscalingBasis(CAPACITY, SETTINGS)
START_S = 1_000.0
REPORT_S = 0.5


@pytest.fixture
def loop():
    return OuterLoop()


def counts_at(seconds, rate):
    """Return the counts after some seconds of requests of 100 output tokens."""
    number = int(rate * seconds)
    return RequestCounts(lengths=counts_of([100] * number, num_begun=number))


def arrived_at(seconds, rate, ingress="i"):
    """Return the arrivals after some seconds of requests of 50 prompt tokens."""
    number = int(rate * seconds)
    return IngressReport(ingress, number, 50 * number)


def hear_for(loop, begin_s, end_s, rates, since_s=None):
    """Report steadily from replicas that have served so many requests a second since a time, and
    from the ingress at which these have arrived."""
    since_s = begin_s if since_s is None else since_s
    for i in range(int((end_s - begin_s) / REPORT_S) + 1):
        now_s = begin_s + i * REPORT_S
        for replica, rate in rates.items():
            loop.hear(now_s, report_of(replica, counts=counts_at(now_s - since_s, rate)), BASIS)
        loop.hear_ingress(now_s, arrived_at(now_s - since_s, sum(rates.values())))


def see(loop, names, num_target):
    loop.see(ClusterView(frozenset(names), num_target))


def snapshot_at(loop, now_s):
    return loop.question(now_s)[0]


def decide_at(loop, now_s):
    """Take a decision; returns its record."""
    question = loop.question(now_s)
    return loop.commit(question[0], *loop.answer(*question))


def decide_under_load(loop, begin_s, end_s, rates):
    """Take the decisions of some time of steady reports; returns the numbers of replicas."""
    numbers = []
    for i in range(int((end_s - begin_s) / SETTINGS.period_s)):
        at_s = begin_s + SETTINGS.period_s * i
        hear_for(loop, at_s, at_s + 1.5, rates, since_s=START_S)
        numbers.append(decide_at(loop, at_s + 1.5).num_replicas)
    return numbers


# Rates of arrival


@pytest.fixture
def reporting(loop):
    """A loop to which one replica has reported."""
    loop.hear(START_S, report_of("a"), BASIS)
    return loop


def hear_arrivals(loop, begin_s, end_s, rates, since_s=None):
    """Report steadily from ingress replicas that get so many requests a second since a time."""
    since_s = begin_s if since_s is None else since_s
    for i in range(int((end_s - begin_s) / REPORT_S) + 1):
        now_s = begin_s + i * REPORT_S
        for ingress, rate in rates.items():
            loop.hear_ingress(now_s, arrived_at(now_s - since_s, rate, ingress))


def rate_at(loop, now_s):
    return snapshot_at(loop, now_s).arrivals.requests_per_s


def test_rates_are_summed_over_ingress_replicas(reporting):
    hear_arrivals(reporting, START_S, START_S + 30, {"i1": 2.0, "i2": 4.0})
    arrivals = snapshot_at(reporting, START_S + 30).arrivals
    assert (arrivals.requests_per_s, arrivals.prompt_tokens_per_s) == (6.0, 300.0)


def test_there_is_no_rate_in_the_first_second(reporting):
    for seconds, arrived in ((0.0, 500), (0.5, 501), (1.0, 502)):
        reporting.hear_ingress(START_S + seconds, IngressReport("i", arrived))
        arrivals = snapshot_at(reporting, START_S + seconds).arrivals
        assert (arrivals is None) == (seconds < 1.0)
    assert arrivals.requests_per_s == 2.0


def test_replicas_alone_tell_no_rate(loop):
    for i in range(20):
        loop.hear(START_S + i, report_of("a", counts=counts_at(i, 2.0)), BASIS)
    assert snapshot_at(loop, START_S + 19).arrivals is None
    assert decide_at(loop, START_S + 19).reason is Reason.HELD


def test_an_ingress_that_joins_late_counts_from_then_on(reporting):
    hear_arrivals(reporting, START_S, START_S + 15, {"i": 2.0})
    hear_arrivals(reporting, START_S + 15, START_S + 20, {"late": 2.0})
    hear_arrivals(reporting, START_S + 15, START_S + 20, {"i": 2.0}, since_s=START_S)
    # 10 s of one and 5 s of the other, over 10 s
    assert rate_at(reporting, START_S + 20) == pytest.approx(3.0, rel=0.06)


def test_a_silent_ingress_gives_no_rate_after_the_window(reporting):
    hear_arrivals(reporting, START_S, START_S + 10, {"i": 2.0, "silent": 4.0})
    hear_arrivals(reporting, START_S + 10.5, START_S + 19, {"i": 2.0}, since_s=START_S)
    assert rate_at(reporting, START_S + 19) > 2.0
    hear_arrivals(reporting, START_S + 19.5, START_S + 22, {"i": 2.0}, since_s=START_S)
    assert START_S + 22 > START_S + 10 + RATE_WINDOW_S
    assert rate_at(reporting, START_S + 22) == 2.0


def test_arrivals_are_too_old_for_a_decision_once_no_ingress_reports(reporting):
    hear_arrivals(reporting, START_S, START_S + 10, {"i": 2.0})
    for seconds, is_known in ((10, True), (23, False)):
        now_s = START_S + seconds
        reporting.hear(now_s, report_of("a"), BASIS)
        assert (decide_at(reporting, now_s).reason is not Reason.HELD) == is_known


def test_prefix_hits_are_no_prompt_tokens_to_compute(reporting):
    hear_arrivals(reporting, START_S, START_S + 10, {"i": 2.0})
    for i in range(11):
        hits = RequestCounts(prefix_hit_tokens=30 * i)
        reporting.hear(START_S + i, report_of("a", counts=hits), BASIS)
    assert snapshot_at(reporting, START_S + 10).arrivals.prompt_tokens_per_s == 100.0 - 30.0


def test_the_rate_of_prompt_tokens_is_never_negative(reporting):
    """A prompt's hits are known after it has arrived."""
    for i in range(4):
        reporting.hear_ingress(START_S + i, IngressReport("i", 10, 500))
        hits = RequestCounts(prefix_hit_tokens=1_000 * i)
        reporting.hear(START_S + i, report_of("a", counts=hits), BASIS)
    assert snapshot_at(reporting, START_S + 3).arrivals.prompt_tokens_per_s == 0.0


@pytest.mark.parametrize("names", [(), ("a", "silent")], ids=["no cluster", "both serve"])
def test_a_clock_that_is_put_back_costs_a_few_seconds_of_rates(loop, names):
    if names:
        see(loop, names, 2)
    hear_for(loop, START_S, START_S + 20, {"a": 2.0, "silent": 4.0})
    back_s = START_S - 3_600
    if not names:
        assert snapshot_at(loop, back_s).replicas == []
    hear_for(loop, back_s, back_s + 4, {"a": 2.0})
    snapshot = snapshot_at(loop, back_s + 4)
    assert len(snapshot.known_replicas(12.0)) == 1
    assert snapshot.known_arrivals(12.0).requests_per_s == 2.0


def test_outputs_that_ended_before_the_first_report_do_not_count(loop):
    before = RequestCounts(lengths=counts_of([500] * 10))
    loop.hear(START_S, report_of("a", counts=before), BASIS)
    assert loop.state.lengths == LengthCounts()
    later = RequestCounts(lengths=counts_of([*[500] * 10, *[40] * 10]))
    loop.hear(START_S + 1, report_of("a", counts=later), BASIS)
    assert loop.state.lengths == counts_of([40] * 10)


def test_running_outputs_raise_the_mean_before_they_end(loop):
    hear_for(loop, START_S, START_S + 10, {"a": 2.0})
    longer = RequestCounts(lengths=counts_of([100] * 20, [2_000] * 20, num_begun=40))
    loop.hear(START_S + 20, report_of("a", counts=longer), BASIS)
    hear_arrivals(loop, START_S + 10.5, START_S + 20, {"i": 2.0}, since_s=START_S)
    assert snapshot_at(loop, START_S + 20).arrivals.mean_output_tokens > 1_000


# The cluster's view


def test_ordered_replicas_that_do_not_report_are_starting(loop):
    hear_for(loop, START_S, START_S + 2, {"a": 1.0, "b": 1.0})
    counts = []
    for view in (None, ({"a"}, 5), ({"a", "b", "c"}, 2)):
        if view is not None:
            see(loop, *view)
        snapshot = snapshot_at(loop, START_S + 2)
        counts.append((len(snapshot.replicas), snapshot.num_starting))
    assert counts == [(2, 0), (2, 3), (2, 0)]


def test_a_silent_replica_that_no_longer_serves_is_forgotten(loop):
    hear_for(loop, START_S, START_S + 2, {"gone": 1.0})
    see(loop, {"a"}, 1)
    hear_for(loop, START_S, START_S + 8, {"a": 1.0})
    assert len(snapshot_at(loop, START_S + 5).replicas) == 2
    assert len(snapshot_at(loop, START_S + 7).replicas) == 1


def test_with_a_stale_view_replicas_come_and_go_by_their_reports(loop):
    """The cluster's controller is dead: its view has a dead replica, and lacks a new one."""
    see(loop, {"a", "dead"}, 2)
    hear_for(loop, START_S, START_S + 2, {"dead": 1.0})
    hear_for(loop, START_S, START_S + 30, {"a": 1.0, "new": 1.0})
    snapshot = snapshot_at(loop, START_S + 30)
    ages = sorted(START_S + 30 - load.observed_s for load in snapshot.replicas)
    assert ages == [0.0, 0.0, 28.0]
    assert len(snapshot.known_replicas(6 * SETTINGS.period_s)) == 2


def test_no_replica_is_stopped_while_a_serving_one_is_silent(loop):
    see(loop, {"a", "silent"}, 4)
    hear_for(loop, START_S, START_S + 2, {"silent": 1.0})
    assert set(decide_under_load(loop, START_S, START_S + 300, {"a": 1.0})) == {4}
    assert loop.records[-1].reason is Reason.WAITING
    see(loop, {"a"}, 4)
    numbers = decide_under_load(loop, START_S + 300, START_S + 310, {"a": 1.0})
    assert numbers[-1] == SETTINGS.min_replicas


def test_a_replica_that_is_being_stopped_does_not_count_though_it_reports(loop):
    see(loop, {"a", "old"}, 2)
    hear_for(loop, START_S, START_S + 10, {"a": 2.0, "old": 2.0})
    see(loop, {"a"}, 3)
    last = report_of("old", 1, live=LiveDecoding(0.8), counts=counts_at(10, 2.0))
    loop.hear(START_S + 10, last, BASIS)
    record = decide_at(loop, START_S + 10)
    assert (record.num_ready, record.num_starting) == (1, 2)
    assert (record.num_running, record.threshold) == (4.0, 1.0)
    assert record.requests_per_s == 4.0, "its share of the arrivals goes to the others"
    see(loop, {"a", "old"}, 3)
    assert len(snapshot_at(loop, START_S + 10).replicas) == 2


def test_a_starting_replica_may_report_before_it_is_ready(loop):
    see(loop, {"a"}, 2)
    hear_for(loop, START_S, START_S + 30, {"a": 2.0, "new": 0.0})
    see(loop, {"a"}, 2)
    snapshot = snapshot_at(loop, START_S + 30)
    assert (len(snapshot.replicas), snapshot.num_starting) == (2, 0)


def test_a_cluster_that_has_restarted_and_knows_no_replica_stops_none(loop):
    see(loop, {"a", "b"}, 2)
    hear_for(loop, START_S, START_S + 2, {"a": 1.0, "b": 1.0})
    see(loop, (), 2)
    assert len(snapshot_at(loop, START_S + 2).replicas) == 2


# Updates

BEFORE = replace(
    BASIS, settings=SETTINGS.model_copy(update={"max_replicas": 4}), made_s=START_S - 900
)
AFTER = replace(BASIS, made_s=START_S - 30)


def test_an_updates_basis_holds_though_old_replicas_go_on_reporting(loop):
    see(loop, {"old"}, 4)
    numbers = []
    for i in range(20):
        at_s = START_S + i * SETTINGS.period_s
        for second in range(2):
            old = report_of("old", 16, counts=counts_at(at_s + second - START_S, 30.0))
            if i >= 10:
                loop.hear(at_s + second, report_of("new", 16), AFTER)
            loop.hear(at_s + second, old, BEFORE)
            loop.hear_ingress(at_s + second, arrived_at(at_s + second - START_S, 30.0))
        numbers.append(decide_at(loop, at_s + 1).num_replicas)
    assert numbers[9] == 4
    assert numbers[10:] == [8] * 10


def test_the_basis_of_a_withdrawn_update_goes_with_its_replicas(loop):
    see(loop, {"old"}, 2)
    loop.hear(START_S, report_of("old"), BEFORE)
    loop.hear(START_S, report_of("new"), AFTER)
    assert loop.question(START_S)[2] == AFTER
    loop.hear(START_S + 10, report_of("old"), BEFORE)
    assert loop.question(START_S + 10)[2] == BEFORE


# Reports


def load_at(loop, now_s):
    (load,) = snapshot_at(loop, now_s).replicas
    return load


def test_an_engine_without_progress_is_as_old_as_its_last_sign_of_life(loop):
    loop.hear(START_S, replace(report_of("a"), age_s=7.0), BASIS)
    assert load_at(loop, START_S).observed_s == START_S - 7.0


def test_replicas_do_not_pay_for_a_threshold_that_was_set_by_hand(loop):
    lowered = report_of("a", gain=1.4, loss=2.0)
    for is_pinned, expected in ((False, (1.4, 2.0)), (True, (1.0, 0.0))):
        loop.hear(START_S, replace(lowered, is_pinned=is_pinned), BASIS)
        load = load_at(loop, START_S)
        assert (load.gain, load.loss) == expected


# Decisions


def as_json(record):
    return json.loads(json.dumps(record.model_dump(), allow_nan=False))


def test_a_decision_is_recorded_with_the_numbers_behind_it(loop):
    see(loop, {"a", "b"}, 3)
    hear_for(loop, START_S, START_S + 10, {"a": 2.0, "b": 2.0})
    lowered = report_of("b", 4, 3, LiveDecoding(0.9, 0.7), counts_at(10, 2.0))
    loop.hear(START_S + 10, lowered, BASIS)
    record = decide_at(loop, START_S + 10)
    assert record is loop.records[-1]
    content = as_json(record)
    assert not any(isinstance(value, dict | list) for value in content.values()), "it is flat"
    expected = {
        "num_replicas": 3,
        "reason": record.reason,
        "feed_forward": 1.0,
        "replicas_before": 3,
        "num_ready": 2,
        "num_starting": 1,
        "num_running": 8,
        "num_waiting": 3,
        "threshold": pytest.approx(0.95),
        "flex_threshold": pytest.approx(0.85),
        "requests_per_s": 4.0,
        "prompt_tokens_per_s": 200.0,
        "mean_output_tokens": pytest.approx(100.0, rel=0.03),
        "problem": None,
    }
    assert {key: content[key] for key in expected} == expected


def test_holding_keeps_the_number_and_says_why(loop):
    see(loop, {"a"}, 5)
    hear_for(loop, START_S, START_S + 10, {"a": 2.0})
    first = decide_at(loop, START_S + 10)
    history = loop.state.outer
    record = loop.hold(snapshot_at(loop, START_S + 12), "it is broken")
    assert (record.problem, record.reason) == ("it is broken", Reason.HELD)
    assert record.num_replicas == first.num_replicas == 5
    assert record.floor_threshold == record.flex_floor_threshold == 1.0
    assert loop.range == AT_TARGET
    assert loop.state.outer == history


def test_the_latest_hundred_decisions_are_kept_and_all_are_counted(loop):
    loop.hear(START_S, report_of("a"), BASIS)
    for i in range(NUM_RECORDS + 20):
        decide_at(loop, START_S + i)
    loop.hold(snapshot_at(loop, START_S), "why")
    assert len(loop.records) == NUM_RECORDS == 100
    assert loop.records[0].time_s == START_S + 21
    assert sum(loop.counts.values()) == NUM_RECORDS + 21


# Restarts


def test_a_restarted_loop_decides_the_same_on_the_same_reports(loop):
    new = OuterLoop()
    see(loop, {"a"}, 4)
    hear_for(loop, START_S, START_S + 10, {"a": 2.0})
    decide_at(loop, START_S + 10)
    new.restore(loop.state)
    see(new, {"a"}, 4)
    hear_for(loop, START_S + 10.5, START_S + 16, {"a": 2.0}, since_s=START_S)
    hear_for(new, START_S + 11, START_S + 16, {"a": 2.0}, since_s=START_S)
    found, expected = decide_at(new, START_S + 16), decide_at(loop, START_S + 16)
    # the new loop has missed half a second of the first one's reports
    close = {
        name: pytest.approx(getattr(expected, name), rel=0.01)
        for name in ("mean_output_tokens", "decode_tokens_per_s", "needed")
    }
    assert found == expected.model_copy(update=close)


def test_a_decision_before_the_first_view_of_the_cluster_is_dropped(loop):
    """A restarted loop may hear one replica at first, and must not stop the others."""
    known = SavedState(OuterState(num_replicas=5, debt=3.0), counts_of([80] * 9))
    loop.hear(START_S, report_of("a"), BASIS)
    assert decide_at(loop, START_S).num_replicas == SETTINGS.min_replicas
    loop.restore(known)
    see(loop, {"a"}, 5)
    assert loop.state == known
    assert decide_at(loop, START_S + 0.5).num_replicas == 5


def test_without_a_saved_state_the_ordered_replicas_are_the_first_number(loop):
    loop.hear(START_S, report_of("a"), BASIS)
    decide_at(loop, START_S)
    see(loop, {"a"}, 6)
    assert decide_at(loop, START_S + 0.5).num_replicas == 6


def test_a_later_view_of_the_cluster_changes_no_decision(loop):
    see(loop, {"a"}, 5)
    loop.hear(START_S, report_of("a"), BASIS)
    decide_at(loop, START_S)
    before = loop.state
    loop.restore(SavedState(OuterState(num_replicas=2)))
    see(loop, {"a"}, 3)
    assert loop.state == before
    assert before.outer.num_replicas == 5


# Properties

ODD = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 1e300]) | st.floats(0, 1e6)
ODD_SPANS = st.lists(ODD, min_size=NUM_SPANS, max_size=NUM_SPANS).map(tuple)
NUMBER = st.integers(-1, 10**9)
ODD_REPORTS = st.builds(
    ReplicaReport,
    st.sampled_from(["a", "b"]),
    age_s=ODD,
    engine=st.builds(EngineStatus, NUMBER, NUMBER, NUMBER),
    requests=st.builds(
        RequestCounts,
        NUMBER,
        NUMBER,
        st.builds(LengthCounts, ODD, ODD, ODD_SPANS, ODD_SPANS, ODD_SPANS),
    ),
    decoding=st.builds(
        InnerLoopDecision,
        st.builds(LiveDecoding, st.floats(0.01, 1)),
        gain=ODD,
        loss=ODD,
        is_lowest=st.booleans(),
    ),
)


@given(st.lists(ODD_REPORTS, min_size=1, max_size=12))
def test_any_reports_give_bounded_decisions_and_do_no_lasting_harm(reports):
    loop = OuterLoop()
    see(loop, {"a", "b"}, 4)
    for i, report in enumerate(reports):
        now_s = START_S + i
        loop.hear(now_s, report, BASIS)
        record = decide_at(loop, now_s)
        assert SETTINGS.min_replicas <= record.num_replicas <= SETTINGS.max_replicas
        assert record.floor_threshold in (SETTINGS.floor_threshold, 1.0)
        as_json(record)
        as_json(loop.hold(snapshot_at(loop, now_s), "why"))
    end_s = START_S + 50
    hear_for(loop, START_S + 12, end_s, {"a": 2.0, "b": 2.0})
    record = decide_at(loop, end_s)
    assert record.reason is not Reason.HELD
    assert record.requests_per_s == 4.0
    assert math.isfinite(record.mean_output_tokens)
