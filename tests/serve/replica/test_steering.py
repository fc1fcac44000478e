"""A replica's part in autoscaling, over an engine whose reports the test writes."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mars_autoscale.model.capacity import Capacity, Rung, linear_step_time
from mars_autoscale.policy.control import LoadReport, Plan, Totals
from mars_autoscale.policy.decide import OuterSettings
from mars_platform.tier import Tier
from mars_serve.config.served import LiveThreshold, ThresholdRange
from mars_serve.config.settings import AutoscalingSettings
from mars_serve.engine.ipc import loop as engine_loop
from mars_serve.engine.ipc.channel import Channel
from mars_serve.engine.ipc.loop import EngineDied, EngineLoop, QueueFull
from mars_serve.engine.ipc.messages import Ready, StepReport
from mars_serve.engine.request import (
    DecodingOptions,
    EngineStatus,
    FinishReason,
    LiveDecoding,
    Request,
    StepOutput,
)
from mars_serve.observability.request_load import RequestLoad
from mars_serve.replica.steering import Steering

LADDER = (
    Rung(1.0, 1.0, 0.0),
    Rung(0.95, 1.7, 1.7, 3),
    Rung(0.9, 1.85, 3.0, 3),
    Rung(0.7, 2.25, 12.0, 3),
)
SLOTS = 4
CAPACITY = Capacity(linear_step_time(0.1, 1000), LADDER, SLOTS, 1_000)
PLAN = Plan(CAPACITY, OuterSettings(max_replicas=4, period_s=2.0))
WIDE = ThresholdRange(0.9, 0.7, 1.0, False)
IDLE = EngineStatus(0, 0, 0, 8, 8, 0, 0)
FLEX = DecodingOptions(20, threshold=None, tier=Tier.FLEX)
DEFAULT = replace(FLEX, tier=Tier.DEFAULT)


def status_of(num_running: int, num_waiting: int = 0, **more: int) -> EngineStatus:
    number = num_running + num_waiting
    return replace(
        IDLE, num_requests=number, num_running=num_running, num_waiting=num_waiting, **more
    )


FULL = status_of(SLOTS, 2 * SLOTS)


class Alive:
    """An engine's process that runs."""

    def is_alive(self) -> bool:
        return True

    def join(self, timeout: float) -> None:
        pass


class Engine:
    """The other end of a loop: its status is what the test says."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(theirs)
        self.channel.send(Ready(1_000, LiveDecoding(1.0), IDLE, PLAN))
        self.loop = EngineLoop(Channel(ours), Alive())

    async def begin(self) -> None:
        """Have the loop read reports from now on, as it does with the first request."""
        running = asyncio.create_task(anext(self.loop.stream(Request("first", [5], DEFAULT))))
        await asyncio.sleep(0)
        ended = StepOutput("first", [7], FinishReason.LENGTH)
        self.channel.send(StepReport([ended], IDLE))
        await running

    async def show(self, status: EngineStatus) -> None:
        self.channel.send(StepReport([], status))
        while self.loop.status() != status:
            await asyncio.sleep(0)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    await made.begin()
    yield made
    made.loop.stop()
    made.channel.close()


def steering_of(
    engine: Engine, load: RequestLoad | None = None, plan: Plan = PLAN, **settings: Any
) -> Steering:
    wanted = AutoscalingSettings(max_replicas=4, **settings)
    return Steering("r1", plan, wanted, engine.loop, load or RequestLoad())


def live_with(allowed: ThresholdRange | None, version: int = 1) -> LiveThreshold:
    return LiveThreshold(version, 1.0, allowed)


def pinned_at(threshold: float, version: int = 2) -> LiveThreshold:
    return LiveThreshold(version, threshold, None, is_pinned=True)


# The range


@pytest.mark.parametrize(
    ("floors", "expected"),
    [((0.9, 0.7), (0.9, 0.7)), ((0.95, 0.9), (0.95, 0.9)), ((1.0, 0.7), (1.0, 1.0)),
     ((1.0, 1.0), (1.0, 1.0))],
)  # fmt: skip
async def test_a_full_replica_goes_as_low_as_it_may(
    engine: Engine, floors: tuple[float, float], expected: tuple[float, float]
) -> None:
    steering = steering_of(engine)
    steering.take(live_with(ThresholdRange(*floors, 1.0, False)), 100.0)
    steering.step(100.0)
    assert engine.loop.live == LiveDecoding(1.0, 1.0)
    await engine.show(FULL)
    steering.step(100.5)
    assert engine.loop.live == LiveDecoding(*expected)


async def test_before_the_governor_has_said_anything_the_plans_floors_hold(engine: Engine) -> None:
    outer = OuterSettings(max_replicas=4, floor_threshold=0.95, flex_floor_threshold=0.9)
    steering = steering_of(engine, plan=Plan(CAPACITY, outer))
    await engine.show(FULL)
    steering.step(100.0)
    assert engine.loop.live == LiveDecoding(0.95, 0.9)


async def test_a_range_that_narrows_is_obeyed_in_the_next_step(engine: Engine) -> None:
    steering = steering_of(engine)
    steering.take(live_with(WIDE), 100.0)
    await engine.show(FULL)
    steering.step(100.0)
    assert engine.loop.live.threshold == 0.9
    steering.take(live_with(ThresholdRange(1.0, 1.0, 1.0, False), 2), 100.4)
    steering.step(100.5)
    assert engine.loop.live == LiveDecoding(1.0, 1.0)


async def test_class_flex_pays_first(engine: Engine) -> None:
    load = RequestLoad()
    for options in (DEFAULT, FLEX, FLEX, FLEX):
        load.come(Request("r", [5], options))
    steering = steering_of(engine, load)
    steering.take(live_with(WIDE), 100.0)
    await engine.show(status_of(SLOTS))
    steering.step(100.0)
    steering.step(101.0)  # a batch that is full for a moment is waited out
    assert engine.loop.live.threshold == 1.0
    assert engine.loop.live.threshold_of(Tier.FLEX) < 1.0


async def test_quiet_brings_the_target_back(engine: Engine) -> None:
    steering = steering_of(engine)
    steering.take(live_with(WIDE), 100.0)
    await engine.show(FULL)
    steering.step(100.0)
    await engine.show(IDLE)
    for i in range(1, 20):
        report = steering.step(100.0 + i / 2)
    assert engine.loop.live == LiveDecoding(1.0, 1.0)
    assert (report.gain, report.loss) == (1.0, 0.0)


async def test_where_prompts_are_the_load_quality_is_not_spent(engine: Engine) -> None:
    steering = steering_of(engine)
    steering.take(live_with(WIDE), 100.0)
    for i in range(6):  # half of what it can compute, those found stored left out
        more = {"num_prompt_tokens": 1_500 * i, "num_prefix_hit_tokens": 1_000 * i}
        await engine.show(replace(FULL, **more))
        steering.step(100.0 + i)
    assert engine.loop.live.threshold == 1.0
    for i in range(6, 14):
        await engine.show(replace(FULL, num_prompt_tokens=7_500 + i, num_prefix_hit_tokens=5_000))
        steering.step(100.0 + i)
    assert engine.loop.live.threshold == 0.9


@pytest.mark.parametrize("positions", [2.0, 300.0], ids=["free", "costly"])
async def test_exact_stands_in_for_the_target_where_it_is_free(
    engine: Engine, positions: float
) -> None:
    exact = Rung(1.0, 1.5, 0.0, positions_per_row=positions)
    steering = steering_of(engine, plan=Plan(replace(CAPACITY, exact=exact), PLAN.settings))
    steering.take(live_with(WIDE), 100.0)
    steering.step(100.0)
    assert engine.loop.live == LiveDecoding(1.0, 1.0, True)
    await engine.show(status_of(SLOTS - 1))
    steering.step(101.0)
    assert engine.loop.live == LiveDecoding(1.0, 1.0, positions == 2.0)


# What is set by hand


async def test_a_pinned_threshold_holds_at_once_and_whatever_comes(engine: Engine) -> None:
    steering = steering_of(engine)
    steering.take(live_with(WIDE), 100.0)
    steering.take(pinned_at(0.97), 100.1)
    assert engine.loop.live == LiveDecoding(0.97)
    await engine.show(FULL)
    report = steering.step(100.5)
    assert engine.loop.live == LiveDecoding(0.97)
    assert (report.threshold, report.flex_threshold) == (0.97, 0.97)
    assert (report.gain, report.loss) == (1.0, 0.0)


async def test_one_that_is_given_back_is_steered_again(engine: Engine) -> None:
    steering = steering_of(engine)
    steering.take(live_with(WIDE), 100.0)
    steering.take(pinned_at(0.97), 100.1)
    await engine.show(FULL)
    steering.step(100.5)
    steering.take(LiveThreshold(3, 0.97), 100.6)
    steering.step(101.0)
    assert engine.loop.live == LiveDecoding(0.9, 0.7)


# What comes too late


def full_load() -> RequestLoad:
    """Two requests of class flex that wait, after one of 80 tokens has ended."""
    load = RequestLoad()
    ended = Request("e", [5], DEFAULT)
    load.come(ended)
    load.begun(ended, 0)
    load.gone(ended, has_begun=True, num_tokens=80)
    for _ in range(2):
        load.come(Request("w", [5], FLEX))
    return load


SATURATED = replace(WIDE, is_saturated=True)


def is_refused(steering: Steering, options: DecodingOptions) -> bool:
    try:
        steering.refuse_late(Request("new", [5], options))
    except QueueFull:
        return True
    return False


async def test_class_flex_is_refused_first(engine: Engine) -> None:
    load = full_load()
    steering = steering_of(engine, load, objective_ttft_s=3.0)
    steering.take(live_with(WIDE), 100.0)
    assert not is_refused(steering, FLEX)
    steering.take(live_with(SATURATED, 2), 100.1)
    # 40 tokens a second: each that waits costs 2 s
    assert is_refused(steering, FLEX)
    assert not is_refused(steering, DEFAULT)
    for _ in range(2):
        load.come(Request("w", [5], DEFAULT))
    assert is_refused(steering, DEFAULT)


async def test_what_is_refused_counts_as_arrived(engine: Engine) -> None:
    load = full_load()
    steering = steering_of(engine, load, objective_ttft_s=3.0)
    steering.take(live_with(SATURATED), 100.0)
    before, num_ahead = load.totals, load.num_ahead(Tier.FLEX)
    assert is_refused(steering, FLEX)
    assert load.totals == replace(before, arrived=4, prompt_tokens=4)
    assert load.num_ahead(Tier.FLEX) == num_ahead
    assert not is_refused(steering, DEFAULT)
    assert load.totals.arrived == 4, "it is counted once it runs"


async def test_what_is_faster_now_comes_in_time(engine: Engine) -> None:
    steering = steering_of(engine, full_load(), objective_ttft_s=3.0)
    steering.take(live_with(SATURATED), 100.0)
    assert is_refused(steering, FLEX)
    await engine.show(FULL)
    assert steering.step(100.5).gain > 4 / 3
    assert not is_refused(steering, FLEX)


async def test_with_a_pinned_threshold_nothing_is_refused(engine: Engine) -> None:
    steering = steering_of(engine, full_load(), objective_ttft_s=0.1)
    steering.take(live_with(SATURATED), 100.0)
    assert is_refused(steering, FLEX)
    steering.take(pinned_at(0.97), 100.1)
    assert not is_refused(steering, FLEX)


# A governor that is silent


async def test_of_an_old_range_only_the_floors_hold(engine: Engine) -> None:
    steering = steering_of(engine, full_load(), objective_ttft_s=0.1)
    steering.take(live_with(ThresholdRange(0.9, 0.9, 1.8, True)), 100.0)
    await engine.show(status_of(SLOTS))
    steering.step(111.0)
    steering.step(112.0)
    assert engine.loop.live.threshold_of(Tier.FLEX) == 0.9  # what it takes for a gain of 1.8
    assert is_refused(steering, FLEX)
    for i in range(1, 8):
        steering.step(112.0 + i)
    assert engine.loop.live.threshold_of(Tier.FLEX) == 0.95  # its own load asks for no more
    assert not is_refused(steering, FLEX)
    await engine.show(FULL)
    steering.step(130.0)
    assert engine.loop.live.threshold_of(Tier.FLEX) == 0.9


# What it reports


async def test_a_report_says_what_it_sees_and_does(engine: Engine) -> None:
    steering = steering_of(engine, full_load())
    steering.take(live_with(WIDE), 100.0)
    await engine.show(FULL)
    report = steering.step(100.0)
    assert report == LoadReport(
        replica="r1",
        age_s=0.0,
        num_running=4,
        num_waiting=8,
        threshold=1.0,  # those that are there are all of class flex
        flex_threshold=0.7,
        gain=pytest.approx(CAPACITY.gain(LADDER[-1])),
        loss=0.0,
        is_lowest=True,
        totals=Totals(3, 3, 1, 80),
    )


async def test_a_loss_is_what_is_lost_beyond_the_target(engine: Engine) -> None:
    ladder = replace(CAPACITY, rungs=LADDER[1:])
    steering = steering_of(engine, plan=Plan(ladder, PLAN.settings), target_threshold=0.95)
    steering.take(live_with(WIDE), 100.0)
    calm = steering.step(100.0)
    assert (calm.threshold, calm.loss) == (0.95, 0.0)
    await engine.show(FULL)
    low = steering.step(100.5)
    assert low.threshold == 0.9
    assert low.loss == pytest.approx(3.0 - 1.7)


async def test_a_report_survives_as_numbers(engine: Engine) -> None:
    steering = steering_of(engine, full_load())
    await engine.show(FULL)
    report = steering.step(100.0)
    stats = steering.stats(5_000.0)
    assert {type(value) for value in stats.values()} == {float}
    assert all(math.isfinite(value) for value in stats.values())
    assert LoadReport.of_stats("r1", stats, 5_000.0) == report
    assert LoadReport.of_stats("r1", stats, 5_003.0) == replace(report, age_s=3.0)
    assert LoadReport.of_stats("r1", stats, 4_990.0) == report  # clocks differ
    for name in stats:
        with pytest.raises(KeyError):
            LoadReport.of_stats("r1", {**{key: 0.0 for key in stats if key != name}}, 5_000.0)


async def test_an_engine_that_hangs_with_work_grows_old(engine: Engine) -> None:
    steering = steering_of(engine)
    assert steering.step(100.0).age_s == 0.0
    stream = engine.loop.stream(Request("hangs", [5], DEFAULT))
    running = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.01)
    assert steering.step(100.5).age_s > 0.0
    assert steering.stats(5_000.0)["observed_s"] < 5_000.0
    running.cancel()


async def test_an_engine_that_was_idle_is_not_old_by_that(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten minutes later somebody comes, and it has not reported a step yet."""
    steering = steering_of(engine)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 600)
    monkeypatch.setattr(engine_loop, "time", later)
    running = asyncio.create_task(anext(engine.loop.stream(Request("next", [5], DEFAULT))))
    await asyncio.sleep(0)
    assert steering.step(100.0).age_s < 300
    running.cancel()


async def test_an_engine_that_hangs_is_old_whoever_gives_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steering = steering_of(engine)
    given_up = asyncio.create_task(anext(engine.loop.stream(Request("one", [5], DEFAULT))))
    await asyncio.sleep(0)
    await engine.show(status_of(1))
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 600)
    monkeypatch.setattr(engine_loop, "time", later)
    given_up.cancel()
    await asyncio.wait([given_up])
    running = asyncio.create_task(anext(engine.loop.stream(Request("two", [5], DEFAULT))))
    await asyncio.sleep(0)
    assert steering.step(100.0).age_s >= 600
    running.cancel()


async def test_an_engine_that_has_died_is_told_of(engine: Engine) -> None:
    steering = steering_of(engine)
    engine.loop.stop()
    assert steering.stats(5_000.0) == {}
    with pytest.raises(EngineDied):
        steering.step(100.0)
