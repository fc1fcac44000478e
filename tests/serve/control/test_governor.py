from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from mars_autoscale.model.capacity import Capacity, Rung, linear_step_time
from mars_autoscale.policy.control import ControlState, LoadReport, Plan, Record, Totals
from mars_autoscale.policy.decide import Decision, OuterSettings, OuterState, Reason
from mars_serve.config.served import LiveThreshold, ThresholdRange
from mars_serve.control.governor import Governor

Found = TypeVar("Found")

START = LiveThreshold(0, 0.95)
LADDER = (Rung(1.0, 1.0, 0.0), Rung(0.9, 1.85, 3.0, 3))
PLAN = Plan(
    Capacity(linear_step_time(0.032, 128), LADDER, 16, 20_000),
    OuterSettings(period_s=0.02, max_replicas=8),
)
FINE = Decision(3, 0.9, 0.7, 1.5, Reason.LOAD, 100.0, 2.5, 1.0, is_saturated=True)
KNOWN = ControlState(OuterState(num_replicas=5, debt=3.0), 80.0)


async def test_a_waiting_replica_hears_at_once() -> None:
    governor = Governor()
    waiting = [asyncio.create_task(governor.wait("m", START)) for _ in range(3)]
    await asyncio.sleep(0)
    changed = await governor.set("m", 0.8)
    assert await asyncio.gather(*waiting) == [changed] * 3
    assert changed.threshold == 0.8
    assert await governor.value("m", START) == changed


async def test_a_replica_that_missed_a_change_gets_it_without_waiting() -> None:
    governor = Governor()
    await governor.set("m", 0.8)
    last = await governor.set("m", 0.7)
    assert await governor.wait("m", START) == last


async def test_waiting_ends_with_what_was_known() -> None:
    assert await Governor().wait("m", START, timeout_s=0) == START


async def test_models_are_kept_apart() -> None:
    governor = Governor()
    waiting = asyncio.create_task(governor.wait("other", START, timeout_s=0.05))
    await governor.set("m", 0.8)
    assert await waiting == START


async def test_versions_grow_with_each_change() -> None:
    governor = Governor()
    versions = [(await governor.set("m", 0.5)).version for _ in range(50)]
    assert versions == sorted(set(versions))


async def test_a_new_governor_learns_from_its_replicas_and_tells_the_others() -> None:
    known = await Governor().set("m", 0.6)
    successor = Governor()
    late = asyncio.create_task(successor.wait("m", START))
    await asyncio.sleep(0)
    assert await successor.wait("m", known, timeout_s=0) == known
    assert await late == known


async def test_a_change_at_a_new_governor_wins_over_what_replicas_remember() -> None:
    known = await Governor().set("m", 0.6)
    successor = Governor()
    await asyncio.sleep(0.002)  # versions are milliseconds
    changed = await successor.set("m", 0.7)
    assert await successor.wait("m", known) == changed


# Decisions


def fine(*_: object) -> tuple[Decision, OuterState]:
    return FINE, OuterState(FINE.num_replicas)


def raises(*_: object) -> tuple[Decision, OuterState]:
    raise ZeroDivisionError("no tokens")


def report_of(replica: str = "r1", threshold: float = 0.92) -> LoadReport:
    return LoadReport(replica, 0.0, 4, 2, threshold, 0.8, 1.4, 2.0, False, Totals(10, 500, 8, 800))


@asynccontextmanager
async def deciding(decide: Callable[..., Any], plan: Plan = PLAN) -> AsyncIterator[Governor]:
    """A governor that has heard of a replica; its decisions end with the block."""
    governor = Governor(decide)
    before = asyncio.all_tasks()
    await governor.report("m", report_of(), plan)
    try:
        yield governor
    finally:
        for task in asyncio.all_tasks() - before:
            task.cancel()


async def until(find: Callable[[], Awaitable[Found]]) -> Found:
    async with asyncio.timeout(20):
        while not (found := await find()):
            await asyncio.sleep(0.005)
    return found


async def records_of(governor: Governor, number: int = 1) -> list[Record]:
    """At least so many, as soon as there are."""

    async def enough() -> list[Record]:
        explanation = await governor.explain("m")
        records = explanation.records if explanation else []
        return records if len(records) >= number else []

    return await until(enough)


async def tick(
    governor: Governor, num_target: int = 3, known: ControlState | None = None
) -> tuple[ControlState, int | None, float]:
    return await governor.tick("m", ["r1"], num_target, {}, known)


async def test_a_report_begins_decisions_that_replicas_follow() -> None:
    async with deciding(fine) as governor:
        live = await governor.wait("m", START)
        if live.range is None:  # it was told what the replica knew
            live = await governor.wait("m", live)
        assert live.range == ThresholdRange(0.9, 0.7, 1.5, True)
        assert live.threshold == 0.92  # the replicas' mean
        assert not live.is_pinned
        later = await governor.wait("m", live)
        assert later.version > live.version
        state, number, age_s = await tick(governor)
        assert number == 3
        assert state.outer.num_replicas == 3
        assert 0 <= age_s < 20


async def test_before_the_first_decision_there_is_no_number() -> None:
    governor = Governor(fine)
    state, number, age_s = await tick(governor)
    assert (state.outer.num_replicas, number, age_s) == (3, None, math.inf)
    explanation = await governor.explain("m")
    assert explanation is not None
    assert (explanation.plan, explanation.records) == (None, [])
    assert await governor.explain("other") is None


async def test_an_error_holds_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async with deciding(raises) as governor:
        await tick(governor, num_target=4)

        async def failed() -> list[Record]:
            problem = "ZeroDivisionError: no tokens"
            found = [each for each in await records_of(governor) if each.problem == problem]
            return found if len(found) > 1 else []

        for record in await until(failed):
            assert record.decision.reason is Reason.HELD
            assert record.decision.num_replicas == 4
            assert record.decision.floor_threshold == 1.0
        assert (await tick(governor))[1] == 4
        assert (await governor.set("m", 0.8)).threshold == 0.8
    assert any(record.levelno == logging.ERROR and record.exc_info for record in caplog.records)


class Hanging:
    """Decisions that hang until they are let go."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.go = threading.Event()

    def __call__(self, *_: object) -> tuple[Decision, OuterState]:
        self.num_begun += 1
        self.go.wait()
        return fine()


async def test_a_decision_that_hangs_holds_up_nothing() -> None:
    hanging = Hanging()
    try:
        async with deciding(hanging) as governor:
            await tick(governor, num_target=4)
            records = await records_of(governor, 3)
            assert {record.problem for record in records} == {
                "the decision takes longer than its period"
            }
            assert {record.decision.num_replicas for record in records} == {4}
            assert hanging.num_begun == 1  # no thread more for each period
            changed = await governor.set("m", 0.8)
            assert await governor.wait("m", START) == changed
            assert await governor.value("m", START) == changed
            assert (await tick(governor))[1] == 4
            await governor.report("m", report_of(), PLAN)
            assert "marsray_autoscaler_replicas" in await governor.metrics("m")

            hanging.go.set()

            async def decided() -> list[Record]:
                last = await records_of(governor)
                return last if last[-1].problem is None else []

            records = await until(decided)
            # what came too late was not used: this one was begun after it
            assert hanging.num_begun > 1
            assert records[-1].decision == FINE
    finally:
        hanging.go.set()


async def test_one_models_trouble_is_not_anothers() -> None:
    def unlucky(snapshot: Any, *_: object) -> tuple[Decision, OuterState]:
        return raises() if snapshot.replicas[0].num_running == 4 else fine()

    async with deciding(unlucky) as governor:
        other = LoadReport("r2", 0.0, 5, 2, 1.0, 1.0, 1.0, 0.0, False, Totals())
        await governor.report("other", other, PLAN)
        await records_of(governor, 2)

        async def decided() -> bool:
            explanation = await governor.explain("other")
            return explanation is not None and bool(explanation.records)

        await until(decided)
        explanation = await governor.explain("other")
        assert explanation is not None
        assert {record.problem for record in explanation.records} == {None}


# A τ that is set by hand


async def test_decisions_leave_a_pinned_threshold_alone_until_it_is_given_back() -> None:
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
        assert newer.range == ThresholdRange(0.9, 0.7, 1.5, True)
        assert newer.version > given_back.version > pinned.version


async def test_nothing_that_was_set_can_be_given_back() -> None:
    live = await Governor().set("m", None)
    assert (live.threshold, live.is_pinned) == (1.0, False)


async def test_a_pinned_threshold_survives_the_governor() -> None:
    pinned = await Governor().set("m", 0.97)
    async with deciding(fine) as successor:  # which hears a report before the τ
        assert await successor.wait("m", pinned, timeout_s=0) == pinned
        await records_of(successor, 3)
        assert await successor.value("m", START) == pinned


# The log


async def test_the_log_has_each_decision_that_says_something_new(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calm = Decision(1, 0.9, 0.7, 1.0, Reason.STEADY, 1.0, 1.0, 0.0)
    bursts = replace(calm, reason=Reason.BURSTS)
    full = replace(bursts, is_saturated=True)
    spent = replace(full, is_overspent=True)
    script = iter([calm, calm, bursts, full, full, spent])

    def scripted(*_: object) -> tuple[Decision, OuterState]:
        return next(script, spent), OuterState(1)

    caplog.set_level(logging.INFO, logger="mars_serve.control.governor")
    # none must be late, which would be told, too
    slow = replace(PLAN, settings=PLAN.settings.model_copy(update={"period_s": 0.25}))
    async with deciding(scripted, slow) as governor:
        await records_of(governor, 7)
    lines = [each.message for each in caplog.records if each.name == "mars_serve.control.governor"]
    told = [json.loads(line.partition(": ")[2]) for line in lines]
    assert [(each["reason"], each["is_saturated"], each["is_overspent"]) for each in told] == [
        ("steady", False, False),
        ("bursts", False, False),
        ("bursts", True, False),
        ("bursts", True, True),
    ]


# Models that come and go


class Clock:
    """Stands until it is moved."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_model_that_was_taken_away_is_forgotten() -> None:
    clock, before = Clock(), asyncio.all_tasks()
    governor = Governor(fine, clock)
    await governor.report("m", report_of(), PLAN)
    (loop,) = asyncio.all_tasks() - before
    pinned = await governor.set("m", 0.8)
    await records_of(governor)
    clock.now_s = 50.0
    await governor.tick("kept", ["r1"], 2, {}, None)
    clock.now_s = 59.0
    await governor.wait("other", START, timeout_s=0)
    assert await governor.explain("m") is not None
    assert await governor.value("m", START) == pinned

    clock.now_s = 61.0
    await governor.wait("other", START, timeout_s=0)
    assert await governor.explain("m") is None
    assert await governor.explain("kept") is not None
    assert 'model="m"' not in await governor.metrics("m")
    assert await governor.value("m", START) == START
    await asyncio.wait([loop])
    assert loop.cancelled()

    state, number, _ = await tick(governor, num_target=1)
    assert (state.outer.num_replicas, number) == (1, None), "it begins anew"


async def test_a_threshold_stays_while_the_only_replicas_start_again() -> None:
    """Of a model without autoscaling nobody but they would say that it is there."""
    clock = Clock()
    governor = Governor(fine, clock)
    changed = await governor.set("m", 0.8)
    clock.now_s = 600.0
    await governor.wait("other", START, timeout_s=0)
    assert await governor.wait("m", START, timeout_s=0) == changed


# A new governor


async def test_a_new_governor_decides_on_what_the_old_one_knew() -> None:
    asked: list[OuterState] = []

    def noting(_snapshot: object, state: OuterState, *_: object) -> tuple[Decision, OuterState]:
        asked.append(state)
        return fine()

    async with deciding(noting) as successor:
        state, number, _ = await tick(successor, num_target=5, known=KNOWN)
        assert (state, number) == (KNOWN, None)

        async def gone_on() -> bool:
            return OuterState(3) in asked

        await until(gone_on)
        assert asked[0] == KNOWN.outer
        assert (await records_of(successor))[0].replicas_before == 5
        # what is handed back from then on is its own
        state, number, _ = await tick(successor, num_target=5, known=KNOWN)
        assert (state.outer, number) == (OuterState(3), 3)


async def test_a_new_governor_that_is_told_late_ends_no_replica() -> None:
    """It has decided on one replica of five when the controller comes with what was known."""

    def keeps(snapshot: Any, state: OuterState, *_: object) -> tuple[Decision, OuterState]:
        number = state.num_replicas or len(snapshot.replicas)
        decision = Decision(number, 0.9, 0.7, 1.0, Reason.STEADY, 1.0, 1.0, 0.0)
        return decision, OuterState(number)

    async with deciding(keeps) as successor:
        records = await records_of(successor)
        assert records[-1].decision.num_replicas == 1
        state, number, _ = await tick(successor, num_target=5, known=KNOWN)
        assert (state, number) == (KNOWN, 5)
        records = await records_of(successor, len(await records_of(successor)) + 2)
        assert records[-1].decision.num_replicas == 5


async def test_replicas_are_overheard_at_the_controller() -> None:
    async with deciding(fine) as governor:
        await records_of(governor)
        await asyncio.sleep(3 * PLAN.settings.period_s)  # without a report
        later = LoadReport("r1", 0.0, 11, 7, 1.0, 1.0, 1.0, 0.0, False, Totals(20, 900, 9, 900))
        stats = later.stats(time.time())
        await governor.tick("m", ["r1"], 1, {"r1": stats, "stranger": {}}, None)

        async def seen() -> bool:
            return (await records_of(governor))[-1].num_waiting == 7

        await until(seen)


async def test_metrics_are_those_of_the_model() -> None:
    async with deciding(fine) as governor:
        await governor.report("other", report_of(), PLAN)
        await records_of(governor)
        lines = (await governor.metrics("m")).splitlines()
    assert 'marsray_autoscaler_replicas{model="m"} 3.0' in lines
    assert 'marsray_autoscaler_saturated{model="m"} 1.0' in lines
    assert 'marsray_autoscaler_frontier_refused{model="m"} 0.0' in lines
    assert any(line.startswith("marsray_autoscaler_decisions_total{") for line in lines)
    assert not any("other" in line for line in lines)
