import asyncio
import json
import logging
import math
import threading
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from ladders import CAPACITY
from mars_autoscale.policy.decision import (
    Decision,
    OuterState,
    Reason,
    ThresholdRange,
)
from mars_autoscale.policy.lengths import counts_of
from mars_autoscale.policy.outer_loop import AutoscalingBasis, SavedState
from mars_autoscale.policy.reports import RequestCounts
from mars_autoscale.policy.settings import OuterSettings
from mars_platform.method.mode import LiveDecoding
from mars_serve.config.served import PublishedThreshold
from mars_serve.control.governor import Governor
from mars_serve.control.words import decision_words
from replica_reports import report_of

START = PublishedThreshold(0, 0.95)
BASIS = AutoscalingBasis(CAPACITY, OuterSettings(period_s=0.02, max_replicas=8))
CALM = Decision(
    num_replicas=1,
    range=ThresholdRange(0.9, 0.7),
    reason=Reason.STEADY,
    decode_tokens_per_s=1.0,
    needed=1.0,
    debt=0.0,
)
FULL_RANGE = ThresholdRange(0.9, 0.7, feed_forward=1.5, is_saturated=True)
FINE = replace(CALM, num_replicas=3, range=FULL_RANGE, reason=Reason.LOAD, pace=0.5)
KNOWN = SavedState(OuterState(num_replicas=5, debt=3.0), counts_of([80] * 9))


async def test_a_waiting_replica_gets_a_change_at_once():
    governor = Governor()
    waiting = [asyncio.create_task(governor.wait("m", START)) for _ in range(3)]
    await asyncio.sleep(0)
    changed = await governor.set("m", 0.8)
    assert await asyncio.gather(*waiting) == [changed] * 3
    assert changed.threshold == 0.8
    assert await governor.value("m", START) == changed


async def test_a_replica_that_missed_a_change_gets_it_without_waiting():
    governor = Governor()
    await governor.set("m", 0.8)
    last = await governor.set("m", 0.7)
    assert await governor.wait("m", START) == last


async def test_waiting_ends_with_the_known_value_if_nothing_changes():
    assert await Governor().wait("m", START, timeout_s=0) == START


async def test_models_are_kept_apart():
    governor = Governor()
    waiting = asyncio.create_task(governor.wait("other", START, timeout_s=0.05))
    await governor.set("m", 0.8)
    assert await waiting == START


async def test_a_new_governor_learns_the_value_from_a_replica_and_tells_the_others():
    known = await Governor().set("m", 0.6)
    successor = Governor()
    late = asyncio.create_task(successor.wait("m", START))
    await asyncio.sleep(0)
    assert await successor.wait("m", known, timeout_s=0) == known
    assert await late == known


async def test_a_change_at_a_new_governor_wins_over_the_replicas_value():
    known = await Governor().set("m", 0.6)
    successor = Governor()
    await asyncio.sleep(0.002)  # versions are milliseconds
    changed = await successor.set("m", 0.7)
    assert await successor.wait("m", known) == changed


# Decisions


def fine(*_):
    return FINE, OuterState(FINE.num_replicas)


def raises(*_):
    raise ZeroDivisionError("no tokens")


COUNTS = RequestCounts(500, 0, counts_of([100] * 8, num_begun=10))
REPORT = report_of("r1", 4, 2, LiveDecoding(0.92, 0.8), COUNTS, gain=1.4, loss=2.0)


@asynccontextmanager
async def deciding(decide, basis=BASIS):
    """Make a governor with one reporting replica; its decisions end with the block."""
    governor = Governor(decide)
    before = asyncio.all_tasks()
    await governor.report("m", REPORT, basis)
    try:
        yield governor
    finally:
        for task in asyncio.all_tasks() - before:
            task.cancel()


async def records_of(governor, number=1, model="m", are_enough=lambda _: True):
    """Wait for a number of decisions, and for a condition on them."""
    async with asyncio.timeout(20):
        while True:
            explanation = await governor.explain(model)
            records = explanation.records if explanation else []
            if len(records) >= number and are_enough(records):
                return records
            await asyncio.sleep(0.005)


async def samples_of(governor, model):
    """Return the name, the model and the value of each metric."""
    return [
        (each.name, each.labels["model"], each.value)
        for family in await governor.metrics(model)
        for each in family.samples
    ]


async def tick(governor, num_target=3, known=None):
    return await governor.tick("m", ["r1"], num_target, known)


async def test_a_report_starts_decisions_that_are_published():
    async with deciding(fine) as governor:
        live = await governor.wait("m", START)
        if live.range is None:  # the replica's own value came first
            live = await governor.wait("m", live)
        assert live.range == FULL_RANGE
        assert live.threshold == 0.92, "the replicas' mean"
        assert not live.is_pinned
        later = await governor.wait("m", live)
        assert later.version > live.version
        state, number, age_s = await tick(governor)
        assert number == 3
        assert state.outer.num_replicas == 3
        assert 0 <= age_s < 20


async def test_before_the_first_decision_there_is_no_number():
    governor = Governor(fine)
    state, number, age_s = await tick(governor)
    assert (state.outer.num_replicas, number, age_s) == (3, None, math.inf)
    explanation = await governor.explain("m")
    assert (explanation.basis, explanation.records) == (None, [])
    assert await governor.explain("other") is None


async def test_an_error_of_the_policy_holds_and_is_recorded(caplog):
    async with deciding(raises) as governor:
        await tick(governor, num_target=4)

        def failed(records):
            return [each for each in records if each.problem == "ZeroDivisionError: no tokens"]

        records = await records_of(governor, are_enough=lambda found: len(failed(found)) > 1)
        for record in failed(records):
            assert record.reason is Reason.HELD
            assert record.num_replicas == 4
            assert record.floor_threshold == record.flex_floor_threshold == 1.0
        assert (await tick(governor))[1] == 4
        assert (await governor.set("m", 0.8)).threshold == 0.8
    assert any(record.levelno == logging.ERROR and record.exc_info for record in caplog.records)


class Hanging:
    """A policy that hangs until it is released."""

    def __init__(self):
        self.num_begun = 0
        self.go = threading.Event()

    def __call__(self, *_):
        self.num_begun += 1
        self.go.wait()
        return fine()


async def test_a_policy_that_hangs_stops_nothing_else():
    hanging = Hanging()
    try:
        async with deciding(hanging) as governor:
            await tick(governor, num_target=4)
            records = await records_of(governor, 3)
            assert {record.problem for record in records} == {
                "the decision takes longer than its period"
            }
            assert {record.num_replicas for record in records} == {4}
            assert hanging.num_begun == 1, "no further thread for each period"
            changed = await governor.set("m", 0.8)
            assert await governor.wait("m", START) == changed
            assert await governor.value("m", START) == changed
            assert (await tick(governor))[1] == 4
            await governor.report("m", REPORT, BASIS)
            assert await samples_of(governor, "m")

            hanging.go.set()
            records = await records_of(
                governor, are_enough=lambda records: records[-1].problem is None
            )
            assert hanging.num_begun > 1, "the late answer was not used"
            assert records[-1].reason is FINE.reason
    finally:
        hanging.go.set()


async def test_an_error_in_one_models_decisions_leaves_others_alone():
    def unlucky(snapshot, *_):
        return raises() if snapshot.replicas[0].num_running == 4 else fine()

    async with deciding(unlucky) as governor:
        await governor.report("other", report_of("r2", 5, 2), BASIS)
        await records_of(governor, 2)
        assert {each.problem for each in await records_of(governor, model="other")} == {None}


async def test_a_decision_that_cannot_be_committed_does_not_end_deciding(caplog):
    script = iter([replace(FINE, range=None), FINE])
    async with deciding(lambda *_: (next(script, FINE), OuterState(3))) as governor:
        assert (await records_of(governor))[0].num_replicas == 3
    assert any(record.levelno == logging.ERROR and record.exc_info for record in caplog.records)


# A τ set by hand


async def test_decisions_leave_a_pinned_threshold_alone_until_it_is_given_back():
    async with deciding(fine) as governor:
        await records_of(governor)
        pinned = await governor.set("m", 0.97)
        assert pinned.is_pinned
        before = len(await records_of(governor))
        await records_of(governor, before + 3)
        assert await governor.value("m", START) == pinned
        given_back = await governor.set("m", None)
        assert (given_back.threshold, given_back.is_pinned) == (0.97, False)
        newer = await governor.wait("m", given_back)
        assert newer.range == FULL_RANGE
        assert newer.version > given_back.version > pinned.version


async def test_a_threshold_that_was_never_set_can_be_given_back():
    live = await Governor().set("m", None)
    assert (live.threshold, live.is_pinned) == (1.0, False)


async def test_a_pinned_threshold_survives_the_governor():
    pinned = await Governor().set("m", 0.97)
    async with deciding(fine) as successor:  # a report comes before the τ
        assert await successor.wait("m", pinned, timeout_s=0) == pinned
        await records_of(successor, 3)
        assert await successor.value("m", START) == pinned


async def test_a_threshold_set_at_a_successor_wins_though_its_clock_is_behind():
    before = PublishedThreshold(2**50, 0.9, FULL_RANGE)  # by a clock far ahead
    successor = Governor()
    pinned = await successor.set("m", 0.97)
    heard = await successor.wait("m", before, timeout_s=0)
    assert (heard.threshold, heard.is_pinned) == (0.97, True)
    assert heard.version > before.version, "the replica takes it"
    assert await successor.wait("m", pinned, timeout_s=0) == heard
    given_back = await successor.set("m", None)
    assert (await successor.wait("m", heard, timeout_s=0)) == given_back
    assert not (await successor.value("m", replace(before, is_pinned=True))).is_pinned


async def test_a_pinned_threshold_wins_over_decisions_made_before_it_was_told():
    pinned = await Governor().set("m", 0.97)
    async with deciding(fine) as successor:
        await records_of(successor, 2)
        decided = await successor.value("m", START)
        assert decided.version > pinned.version
        heard = await successor.wait("m", pinned, timeout_s=0)
        assert (heard.threshold, heard.is_pinned) == (0.97, True)
        assert heard.version > decided.version, "replicas that have the decision take it"
        given_back = await successor.set("m", None)
        assert not (await successor.wait("m", heard, timeout_s=0)).is_pinned
        assert await successor.wait("m", pinned, timeout_s=0) != pinned, "it is an old value now"
        assert given_back.version > heard.version


# The log


async def test_only_decisions_that_differ_in_kind_are_logged(caplog):
    bursts = replace(CALM, reason=Reason.BURSTS)
    full = replace(bursts, range=FULL_RANGE)
    spent = replace(full, is_overspent=True)
    script = iter([CALM, CALM, bursts, full, full, spent])

    def scripted(*_):
        return next(script, spent), OuterState(1)

    caplog.set_level(logging.INFO, logger="mars_serve.control.governor")
    # the period is long enough for no decision to be late, which would be logged
    slow = replace(BASIS, settings=BASIS.settings.model_copy(update={"period_s": 0.25}))
    async with deciding(scripted, slow) as governor:
        await records_of(governor, 7)
    lines = [each.message for each in caplog.records if each.name == "mars_serve.control.governor"]
    logged = [json.loads(line.partition(": ")[2]) for line in lines]
    assert [(each["reason"], each["is_saturated"], each["is_overspent"]) for each in logged] == [
        ("steady", False, False),
        ("bursts", False, False),
        ("bursts", True, False),
        ("bursts", True, True),
    ]


# Models that come and go


class Clock:
    """A clock that stands until the test moves it."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


async def test_a_model_that_is_no_longer_used_is_forgotten():
    clock, before = Clock(), asyncio.all_tasks()
    governor = Governor(fine, clock)
    await governor.report("m", REPORT, BASIS)
    (loop,) = asyncio.all_tasks() - before
    pinned = await governor.set("m", 0.8)
    await records_of(governor)
    clock.now_s = 50.0
    await governor.tick("kept", ["r1"], 2, None)
    clock.now_s = 59.0
    await governor.wait("other", START, timeout_s=0)
    assert await governor.explain("m") is not None
    assert await governor.value("m", START) == pinned

    clock.now_s = 61.0
    await governor.wait("other", START, timeout_s=0)
    assert await governor.explain("m") is None
    assert await governor.explain("kept") is not None
    assert not await samples_of(governor, "m")
    assert await governor.value("m", START) == START
    assert await governor.wait("m", pinned, timeout_s=0) == pinned, "a replica was only silent"
    await asyncio.wait([loop])
    assert loop.cancelled()

    state, number, _ = await tick(governor, num_target=1)
    assert (state.outer.num_replicas, number) == (1, None), "it starts afresh"


async def test_a_threshold_stays_while_all_replicas_restart():
    """Nothing else calls the governor for a model without autoscaling."""
    clock = Clock()
    governor = Governor(fine, clock)
    changed = await governor.set("m", 0.8)
    clock.now_s = 600.0
    await governor.wait("other", START, timeout_s=0)
    assert await governor.wait("m", START, timeout_s=0) == changed


# A new governor


async def test_a_new_governor_decides_on_the_old_ones_state():
    asked = []

    def noting(_snapshot, state, *_):
        asked.append(state)
        return fine()

    async with deciding(noting) as successor:
        state, number, _ = await tick(successor, num_target=5, known=KNOWN)
        assert (state, number) == (KNOWN, None)
        records = await records_of(successor, are_enough=lambda _: OuterState(3) in asked)
        assert asked[0] == KNOWN.outer
        assert records[0].replicas_before == 5
        # later ticks return its own state
        state, number, _ = await tick(successor, num_target=5, known=KNOWN)
        assert (state.outer, number) == (OuterState(3), 3)


async def test_a_replica_without_autoscaling_starts_no_decisions_and_is_shown():
    governor = Governor(fine)
    await governor.report("m", REPORT, None)
    assert await governor.explain("m") is None
    assert '"num_running":4' in (await governor.picture("m", None)).text


async def test_a_report_of_another_version_is_refused():
    with pytest.raises(ValueError, match="version"):
        await Governor(fine).report("m", replace(REPORT, version=0), BASIS)


async def test_a_models_metrics_leave_out_other_models():
    async with deciding(fine) as governor:
        await governor.report("other", REPORT, BASIS)
        records = await records_of(governor)
        found = await samples_of(governor, "m")
    assert "Replicas work at 50% of the calibrated speed." in decision_words(records[-1])
    steady = records[-1].model_copy(
        update={"reason": Reason.STEADY, "needed": 3.0, "replicas_before": 3}
    )
    assert "3 replicas: as many as the load needs." in decision_words(steady)
    capped = steady.model_copy(update={"needed": 3.1})
    assert "3 replicas: as many as are allowed." in decision_words(capped)
    values = {name: value for name, _, value in found}
    assert values["marsray_autoscaler_replicas"] == 3
    assert values["marsray_autoscaler_saturated"] == 1
    assert values["marsray_autoscaler_pace"] == 0.5
    assert values["marsray_autoscaler_frontier_refused"] == 0
    assert values["marsray_autoscaler_decisions_total"] > 0
    assert {model for _, model, _ in found} == {"m"}
