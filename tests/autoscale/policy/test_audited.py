"""Audits of what was served, on their way from the replicas' reports to the decisions."""

from dataclasses import replace

import pytest

from ladders import CAPACITY
from mars_autoscale.audit.counts import AuditCounts, AuditKey
from mars_autoscale.model.expectations import Expectation
from mars_autoscale.policy.decide import decide
from mars_autoscale.policy.decision import OuterState
from mars_autoscale.policy.observe import Arrivals, ReplicaLoad, Snapshot
from mars_autoscale.policy.outer_loop import AutoscalingBasis, OuterLoop
from mars_autoscale.policy.reports import RequestCounts
from mars_autoscale.policy.settings import OuterSettings
from mars_platform.tier import Tier
from replica_reports import report_of

START_S = 1_000.0
SETTINGS = OuterSettings(min_replicas=2, max_replicas=8)
EXPECTED = (Expectation(0.9, 0.001),)
AUDITED = AutoscalingBasis(CAPACITY, SETTINGS, expectations=EXPECTED)
KEY = AuditKey(Tier.DEFAULT, 0.9, True)


def hear_audits(loop, now_s, counts, replica="a", basis=AUDITED, loss=0.0):
    audits = RequestCounts(audits={KEY: counts})
    loop.hear(now_s, report_of(replica, counts=audits, loss=loss), basis)


def decide_at(loop, now_s):
    """Take a decision; returns its record."""
    question = loop.question(now_s)
    return loop.commit(question[0], *loop.answer(*question))


@pytest.fixture
def audited():
    """An outer loop that has decided once, and heard of no audit."""
    loop = OuterLoop()
    loop.hear(START_S, report_of("a"), AUDITED)
    decide_at(loop, START_S + 1)
    return loop


def test_audits_of_all_replicas_add_up(audited):
    hear_audits(audited, START_S + 2, AuditCounts(10, 500, 1))
    audited.hear(START_S + 2, report_of("b"), AUDITED)
    hear_audits(audited, START_S + 3, AuditCounts(4, 100, 0), "b")
    hear_audits(audited, START_S + 21, AuditCounts(12, 600, 1))
    assert audited.state.drift.tally == {KEY: AuditCounts(16, 700, 1)}


def test_audits_that_contradict_the_frontier_close_the_floors_until_it_is_trusted_again(audited):
    hear_audits(audited, START_S + 2, AuditCounts(300, 10_000, 60))
    first = decide_at(audited, START_S + 3)
    assert first.is_refuted
    assert first.floor_threshold == first.flex_floor_threshold == 1.0
    assert decide_at(audited, START_S + 5).is_refuted
    successor = OuterLoop()
    successor.restore(audited.state)
    hear_audits(successor, START_S + 6, AuditCounts(300, 10_000, 60))
    assert decide_at(successor, START_S + 7).is_refuted, "a new governor knows it, too"
    audited.trust_frontier()
    assert not decide_at(audited, START_S + 7).is_refuted
    assert audited.state.drift.tally == {}


def test_another_frontier_starts_anew_and_old_replicas_say_nothing_of_it(audited):
    hear_audits(audited, START_S + 2, AuditCounts(300, 10_000, 60))
    newer = replace(AUDITED, expectations=(Expectation(0.9, 0.006),), made_s=5.0)
    hear_audits(audited, START_S + 3, AuditCounts(), "b", newer)
    assert not decide_at(audited, START_S + 3).is_refuted
    hear_audits(audited, START_S + 4, AuditCounts(600, 20_000, 120))
    hear_audits(audited, START_S + 4, AuditCounts(5, 100, 1), "b", newer)
    assert audited.state.drift.tally == {KEY: AuditCounts(5, 100, 1)}


def test_what_audits_find_raises_the_loss_that_the_budget_counts(audited):
    hear_audits(audited, START_S + 2, AuditCounts(300, 10_000, 20), loss=3.0)
    snapshot = audited.question(START_S + 3)[0]
    factor = (20 + 10) / (10 + 10)
    assert [each.loss for each in snapshot.replicas] == [pytest.approx(3.0 * factor)]


def test_a_refuted_frontier_closes_the_floors_of_all_tiers_and_buys_as_before():
    low = ReplicaLoad(10.0, 8.0, 0.0, gain=1.2, loss=2.0)
    usual = Snapshot(10.0, [low] * 4, 0, Arrivals(10.0, 0.0, 100.0), 10.0)
    state = OuterState(num_replicas=4, decided_s=8.0)
    (before, _), (after, _) = (
        decide(each, state, CAPACITY, SETTINGS) for each in (usual, replace(usual, is_refuted=True))
    )
    assert after.is_refuted
    assert (after.range.floor_threshold, after.range.flex_floor_threshold) == (1.0, 1.0)
    assert (before.range.floor_threshold, before.range.flex_floor_threshold) == (0.9, 0.7)
    assert after.debt == before.debt > 0, "what was lost before counts for no more"
    assert after.num_replicas == before.num_replicas


def test_a_refuted_frontier_is_held_to_without_reports():
    blind = Snapshot(10.0, [], 2, None, is_refuted=True)
    assert decide(blind, OuterState(), CAPACITY, SETTINGS)[0].is_refuted
