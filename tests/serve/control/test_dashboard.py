from __future__ import annotations

import json
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import pytest

from ladders import CAPACITY
from mars_autoscale.policy.decision import OuterState
from mars_autoscale.policy.inner_loop import Cause, InnerLoopDecision
from mars_autoscale.policy.outer_loop import AutoscalingBasis, OuterLoop
from mars_autoscale.policy.reports import (
    EngineStatus,
    IngressReport,
    Phase,
    ReplicaReport,
    RequestCounts,
)
from mars_autoscale.policy.settings import OuterSettings
from mars_platform.method.mode import LiveDecoding
from mars_platform.tier import Tier
from mars_serve.config.served import PublishedThreshold
from mars_serve.control.dashboard import ModelDashboard
from mars_serve.control.history import COARSE_S, COLUMNS, HOUR_S, NUM_FINE, History
from mars_serve.observability.request_telemetry import FIRST_TOKEN_BOUNDS_S, TOKEN_GAP_BOUNDS_S
from replica_reports import report_of

START_S = 1_000_000
READY = ReplicaReport("app#model#r1", "10.0.0.1", engine=EngineStatus(num_pages=10))
BASIS = AutoscalingBasis(CAPACITY, OuterSettings(max_replicas=3, loss_budget=2.0))


def told(board: ModelDashboard, since_s: int | None = None, **governed: Any) -> dict[str, Any]:
    """Return what a dashboard gets, with rows as dictionaries."""
    loop, published = governed.get("loop"), governed.get("published")
    found = json.loads(board.picture(since_s, loop, published).text)
    found["rows"] = [dict(zip(COLUMNS, row, strict=True)) for row in found["rows"]]
    return found


def watched(*reports: list[ReplicaReport], **governed: Any) -> dict[str, Any]:
    """Return what a dashboard gets after some seconds, in each of which replicas report."""
    board = ModelDashboard()
    for each in reports[0]:
        board.members.hear(each, START_S)
    for second, told_now in enumerate([*reports, []]):
        loop, published = governed.get("loop"), governed.get("published")
        board.advance(START_S + second, loop, published)
        for each in told_now:
            board.members.hear(each, START_S + second + 0.5)
    return told(board, **governed)


def counted(counts: RequestCounts | None = None, **engine: int) -> ReplicaReport:
    status = replace(READY.engine, **{f"num_{name}": number for name, number in engine.items()})
    return replace(READY, engine=status, requests=counts or RequestCounts())


def decoding(report: ReplicaReport, live: LiveDecoding, **decided: Any) -> ReplicaReport:
    return replace(report, decoding=InnerLoopDecision(live, **decided))


def test_rates_are_what_replicas_have_counted_within_a_second():
    before = counted(generated_tokens=100, row_passes=50, prompt_tokens=9)
    after = counted(generated_tokens=160, row_passes=70, prompt_tokens=29, prefix_hit_tokens=5)
    other = replace(after, replica="app#model#r2")
    rows = watched([before, other], [after, other])["rows"]
    assert [row["time_s"] for row in rows] == [START_S, START_S + 1]
    assert rows[0]["generated_per_s"] == 0  # counted before this governor knew the replica
    assert rows[1]["generated_per_s"] == 60
    assert rows[1]["tokens_per_pass"] == 3
    assert rows[1]["prefix_hit_share"] == 0.25


def test_a_replica_that_counts_anew_is_not_counted_below_zero():
    rows = watched([counted(generated_tokens=900)], [counted(generated_tokens=7)])
    assert rows["rows"][1]["generated_per_s"] == 7


def test_a_missed_report_loses_nothing():
    first, last = counted(generated_tokens=10), counted(generated_tokens=90)
    rows = watched([first], [], [last])["rows"]
    assert [row["generated_per_s"] for row in rows] == [0, 0, 80]


def test_percentiles_are_those_of_all_replicas_values_to_within_five_percent():
    values = [0.11, 0.12, 0.13, 0.5, 2.0]
    counts = [0] * (len(FIRST_TOKEN_BOUNDS_S) + 1)
    for value in values:
        counts[next(i for i, bound in enumerate(FIRST_TOKEN_BOUNDS_S) if value <= bound)] += 1
    after = counted(counts=RequestCounts(first_token=tuple(counts)))
    found = watched([counted()], [after])
    assert found["rows"][1]["ttft_p50_s"] == pytest.approx(0.13, rel=0.05)
    assert found["rows"][1]["ttft_p99_s"] == pytest.approx(2.0, rel=0.05)
    assert found["state"]["minute"]["ttft"]["number"] == 5
    assert found["state"]["minute"]["gap"] == dict.fromkeys(("p50_s", "p95_s", "p99_s")) | {
        "number": 0
    }


@pytest.mark.parametrize("bounds", [FIRST_TOKEN_BOUNDS_S, TOKEN_GAP_BOUNDS_S])
def test_neighbouring_bounds_differ_by_five_percent_at_most(bounds):
    assert all(low < high <= low * 1.0501 for low, high in pairwise(bounds))


def test_states_of_replicas_are_counted_and_said():
    starting = ReplicaReport("app#model#r2", "10.0.0.2", Phase.STARTING)
    drains = replace(READY, replica="app#model#r3", phase=Phase.DRAINING)
    found = watched([READY, starting, drains])
    row, state = found["rows"][-1], found["state"]
    assert (row["num_ready"], row["num_starting"], row["num_draining"]) == (1, 1, 1)
    assert state["nodes"] == {"10.0.0.1": {"ready": 1, "draining": 1}, "10.0.0.2": {"starting": 1}}
    texts = [event["text"] for event in found["events"]]
    assert "Replica r2 on 10.0.0.2 starts." in texts
    assert "Replica r3 on 10.0.0.1 drains: it takes no more requests." in texts


def test_a_silent_replica_is_called_so_and_then_forgotten():
    board = ModelDashboard()
    board.members.hear(READY, START_S)
    board.advance(START_S, None, None)
    board.advance(START_S + 8, None, None)
    assert told(board)["state"]["replicas"][0]["state"] == "silent"
    board.advance(START_S + 20, None, None)
    found = told(board)
    assert found["state"]["replicas"] == []
    assert found["events"][-1]["text"] == "Replica r1 on 10.0.0.1 has gone."


def test_alike_changes_of_tau_are_one_sentence_with_the_reason():
    low = LiveDecoding(0.9, 0.7)
    twins = [replace(READY, replica=name) for name in ("a#b#x", "a#b#y")]
    lowered = [decoding(each, low, cause=Cause.LOAD) for each in twins]
    texts = [event["text"] for event in watched(twins, lowered)["events"]]
    reason = "more requests run and wait than are served fast enough."
    assert f"τ falls from 1 to 0.9 on 2 replicas: {reason}" in texts
    assert f"τ of tier flex falls from 1 to 0.7 on 2 replicas: {reason}" in texts
    assert f"Mode changes from ar to threshold on 2 replicas: {reason}" in texts


def test_a_change_by_hand_is_called_so():
    low = decoding(READY, LiveDecoding(0.8), cause=Cause.LOAD)
    found = watched([READY], [low], published=PublishedThreshold(3, 0.8, is_pinned=True))
    assert "τ falls from 1 to 0.8: it was set by hand." in [e["text"] for e in found["events"]]
    assert found["state"]["is_pinned"]


def test_ingress_replicas_are_summed_up():
    board = ModelDashboard()
    board.members.hear(READY, START_S)
    board.advance(START_S, None, None)
    for name in ("i1", "i2"):
        board.members.hear_ingress(IngressReport(name, 50, 500), START_S)
        waiting, ended = {Tier.FLEX: 2, Tier.DEFAULT: 1}, {"stop": 3, "error": 1, "rejected_503": 2}
        rejected, endpoints = {"503 queue_full": 2}, {"/v1/messages": 6}
        lines = {"completed": 4, "failed": 1}
        report = IngressReport(name, 57, 570, waiting, ended, rejected, endpoints, lines)
        board.members.hear_ingress(report, START_S + 0.5)
    board.advance(START_S + 1, None, None)
    found = told(board)
    row = found["rows"][-1]
    assert (row["waiting_flex"], row["waiting_default"], row["waiting_priority"]) == (4, 2, 0)
    assert row["arrived_per_s"] == 14
    assert (row["ended_per_s"], row["failed_per_s"], row["rejected_per_s"]) == (6, 2, 4)
    assert row["batch_lines_per_s"] == 10
    assert found["state"]["rejected"] == {"503 queue_full": 4}
    assert found["state"]["endpoints"] == {"/v1/messages": 12}


def decided() -> OuterLoop:
    """Return an outer loop that has lost quality and decided once."""
    loop = OuterLoop()
    counts, live = RequestCounts(prompt_tokens=40), LiveDecoding(0.9, 0.8)
    loop.hear(START_S, report_of("r1", 4, 2, live, counts, gain=1.4, loss=2.0), BASIS)
    loop.state = replace(loop.state, outer=OuterState(losses=((START_S - 60.0, 1800.0),)))
    question = loop.question(START_S + 0.2)
    loop.commit(question[0], *loop.answer(*question))
    return loop


def test_an_autoscaled_model_has_budget_frontier_and_decision():
    low = report_of("r1", 4, live=LiveDecoding(0.9), gain=1.4, loss=2.0)
    found = watched([low], [low], loop=decided())
    assert found["rows"][-1]["spent_share"] == pytest.approx(0.25, abs=0.01)
    assert found["rows"][-1]["loss"] == 2
    state = found["state"]
    assert state["budget"]["points"] == 2
    assert state["frontier"]["now"] == {"loss": 2.0, "gain": 1.4}
    assert len(state["frontier"]["points"]) == len(CAPACITY.rungs)
    assert state["decision"]["text"].startswith(("Keep ", "Go to "))
    assert [each["text"] for each in found["events"] if each["kind"] == "decision"]


def test_a_model_without_autoscaling_has_rows_and_no_budget():
    found = watched([READY])
    assert found["rows"][-1]["num_ready"] == 1
    assert found["rows"][-1]["spent_share"] is None
    assert [found["state"][name] for name in ("decision", "budget", "audit", "frontier")] == [
        None
    ] * 4


def test_nothing_is_shown_before_a_new_governor_knows_the_replicas():
    board = ModelDashboard()
    board.advance(START_S, None, None)
    board.advance(START_S + 1, None, None)
    assert told(board)["rows"] == []
    board.members.hear(READY, START_S + 1)
    board.advance(START_S + 2, None, None)
    board.advance(START_S + 3, None, None)
    found = told(board)
    assert [row["num_ready"] for row in found["rows"]] == [1]
    text = "Replica r1 on 10.0.0.1 ran before this governor started."
    assert [event["text"] for event in found["events"]] == [text]


def test_only_what_is_new_is_told_to_whom_knows_the_rest():
    board = ModelDashboard()
    board.members.hear(READY, START_S)
    for second in range(6):
        board.advance(START_S + second, None, None)
        if second == 4:
            board.members.hear(replace(READY, replica="r2"), START_S + second)
    everything = told(board)
    assert len(everything["rows"]) == 5
    news = told(board, since_s=START_S + 2)
    assert [row["time_s"] for row in news["rows"]] == [START_S + 3, START_S + 4]
    assert len(news["events"]) == 1
    assert told(board, since_s=START_S + 4)["events"] == []
    # a time to come is one of a clock that was put back
    assert told(board, since_s=START_S + 900)["rows"] == everything["rows"]


def test_a_clock_that_jumps_makes_up_no_hours():
    board = ModelDashboard()
    board.members.hear(READY, START_S)
    for now_s in (START_S, START_S + 1, START_S + 86_400, START_S + 86_401):
        board.advance(now_s, None, None)
    assert [row["time_s"] for row in told(board)["rows"]] == [START_S, START_S + 86_400]


def test_an_hour_is_kept_coarser_as_it_ages_and_no_more():
    history = History()
    ticks = count(START_S)
    for _ in range(2 * HOUR_S):
        history.add(next(ticks), {"num_ready": 1.25, "loss": 123456.789, "ttft_p50_s": 1 / 3})
    text = history.since(None)
    times = [row[0] for row in json.loads(text)]
    steps = {after - before for before, after in pairwise(times)}
    assert steps <= set(range(1, COARSE_S + 1))
    assert times[-1] - times[0] == pytest.approx(HOUR_S, abs=2 * COARSE_S)
    assert len(times) <= NUM_FINE + HOUR_S // COARSE_S
    assert len(text) < 300_000


def test_numbers_that_are_not_finite_are_unknown():
    history = History()
    history.add(START_S, {"loss": float("nan"), "num_ready": float("inf"), "num_running": 2})
    row = dict(zip(COLUMNS, json.loads(history.since(None))[0], strict=True))
    assert (row["loss"], row["num_ready"], row["num_running"]) == (None, None, 2)
