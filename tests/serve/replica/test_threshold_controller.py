"""A replica's part in autoscaling, on an engine whose status the test sets."""

import asyncio
import socket
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ladders import exact_rung, threshold_rung
from mars_autoscale.model.capacity import AR, Capacity
from mars_autoscale.model.step_times import linear_step_time
from mars_autoscale.policy.decision import ThresholdRange
from mars_autoscale.policy.outer_loop import AutoscalingBasis
from mars_autoscale.policy.reports import EngineStatus, Phase
from mars_autoscale.policy.settings import OuterSettings
from mars_autoscale.queueing.estimate import LateRule
from mars_platform.method.mode import LiveDecoding
from mars_platform.tier import Tier
from mars_serve.config.served import PublishedThreshold
from mars_serve.config.settings import AutoscalingSettings
from mars_serve.control.governor import Governor
from mars_serve.engine.decoding_options import DecodingOptions, FinishReason
from mars_serve.engine.ipc import client as engine_client
from mars_serve.engine.ipc.channel import Channel
from mars_serve.engine.ipc.client import EngineClient, EngineDied
from mars_serve.engine.ipc.messages import LoadUpdate, Ready, SetLateRule, StepReport
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.observability.replica_telemetry import ReplicaTelemetry
from mars_serve.observability.request_telemetry import RequestTelemetry
from mars_serve.replica.governor_link import GovernorLink
from mars_serve.replica.threshold_controller import InnerLoopController, ThresholdController
from waiting import soon

LADDER = (
    AR,
    threshold_rung(0.95, 1.7, 1.7, 3),
    threshold_rung(0.9, 1.85, 3.0, 3),
    threshold_rung(0.7, 2.25, 12.0, 3),
)
NUM_ROWS = 4
NUM_ENDED = 100
CAPACITY = Capacity(linear_step_time(0.1, 1000), LADDER, NUM_ROWS, 1_000)
BASIS = AutoscalingBasis(CAPACITY, OuterSettings(max_replicas=4, period_s=2.0))
WIDE = ThresholdRange(0.9, 0.7)
SATURATED = replace(WIDE, is_saturated=True)
IDLE = EngineStatus(num_pages=8, num_free_pages=8)
FLEX = DecodingOptions(20, threshold=None, tier=Tier.FLEX)
DEFAULT = replace(FLEX, max_tokens=100, tier=Tier.DEFAULT)


def status_of(num_running, num_waiting=0, **more):
    number = num_running + num_waiting
    return replace(
        IDLE, num_requests=number, num_running=num_running, num_waiting=num_waiting, **more
    )


FULL = status_of(NUM_ROWS, 2 * NUM_ROWS)


class Alive:
    """An engine process that runs."""

    def is_alive(self):
        return True

    def join(self, timeout):
        pass


class Engine:
    """The other end of an engine loop, which shows the status that the test sets."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        self.channel = Channel(theirs)
        self.channel.send(Ready(1_000, LiveDecoding(1.0), IDLE, BASIS, None))
        self.loop = EngineClient(Channel(ours), Alive())
        self._late_rule = None

    async def begin(self):
        """Run a first request, from which on the loop reads reports."""
        running = asyncio.create_task(anext(self.loop.stream(Request("first", [5], DEFAULT))))
        await asyncio.sleep(0)
        ended = StepOutput("first", [7], FinishReason.LENGTH)
        self.channel.send(StepReport([ended]))
        await running

    def late_rule(self):
        """Return the rule by which the engine was told last to refuse late requests."""
        for order in self.channel.receive_available():
            if isinstance(order, SetLateRule):
                self._late_rule = order.rule
        return self._late_rule

    async def show(self, status):
        self.channel.send(LoadUpdate(status, None))
        while self.loop.status() != status:
            await asyncio.sleep(0)


@pytest.fixture
async def engine():
    made = Engine()
    await made.begin()
    yield made
    made.loop.stop()
    made.channel.close()


def controller_of(engine, load=None, basis=BASIS, **settings):
    wanted = AutoscalingSettings(max_replicas=4, **settings)
    load = load or RequestTelemetry()
    initial = PublishedThreshold(0, 1.0)
    return InnerLoopController(engine.loop, initial, basis, wanted, lambda: load)


def published(allowed, version=1):
    return PublishedThreshold(version, 1.0, allowed)


def pinned_at(threshold, version=2):
    return PublishedThreshold(version, threshold, None, is_pinned=True)


# Ranges


@pytest.mark.parametrize(
    ("floors", "expected"),
    [((0.9, 0.7), (0.9, 0.7)), ((0.95, 0.9), (0.95, 0.9)), ((1.0, 0.7), (1.0, 1.0))],
)
async def test_a_full_replica_lowers_the_threshold_to_the_floors(engine, floors, expected):
    controller = controller_of(engine)
    controller.take(published(ThresholdRange(*floors)), 100.0)
    controller.step(100.0)
    assert engine.loop.live == LiveDecoding(1.0, 1.0)
    await engine.show(FULL)
    controller.step(100.5)
    assert engine.loop.live == LiveDecoding(*expected)


async def test_the_floors_of_the_settings_hold_before_the_first_range(engine):
    outer = OuterSettings(max_replicas=4, floor_threshold=0.95, flex_floor_threshold=0.9)
    controller = controller_of(engine, basis=AutoscalingBasis(CAPACITY, outer))
    await engine.show(FULL)
    controller.step(100.0)
    assert engine.loop.live == LiveDecoding(0.95, 0.9)


async def test_no_quality_is_paid_if_prompts_are_the_load(engine):
    controller = controller_of(engine)
    controller.take(published(WIDE), 100.0)
    for i in range(6):  # half of the tokens that it can compute, not counting prefix hits
        more = {"num_prompt_tokens": 1_500 * i, "num_prefix_hit_tokens": 1_000 * i}
        await engine.show(replace(FULL, **more))
        controller.step(100.0 + i)
    assert engine.loop.live.threshold == 1.0
    for i in range(6, 14):
        await engine.show(replace(FULL, num_prompt_tokens=7_500 + i, num_prefix_hit_tokens=5_000))
        controller.step(100.0 + i)
    assert engine.loop.live.threshold == 0.9


# A τ set by hand


async def test_a_pinned_threshold_holds_at_once_and_under_any_load(engine):
    controller = controller_of(engine)
    controller.take(published(WIDE), 100.0)
    controller.take(pinned_at(0.97), 100.1)
    assert engine.loop.live == LiveDecoding(0.97)
    await engine.show(FULL)
    controller.step(100.5)
    assert engine.loop.live == LiveDecoding(0.97)


async def test_a_pinned_threshold_keeps_mode_exact_where_it_is_the_fastest(engine):
    capacity = replace(CAPACITY, rungs=(AR, exact_rung(2.2, 5), *LADDER[1:]))
    controller = controller_of(engine, basis=AutoscalingBasis(capacity, BASIS.settings))
    controller.take(pinned_at(1.0), 100.0)
    await engine.show(FULL)
    controller.step(100.5)
    assert engine.loop.live == LiveDecoding(1.0, is_exact=True)


async def test_a_threshold_that_is_given_back_follows_the_load_again(engine):
    controller = controller_of(engine)
    controller.take(published(WIDE), 100.0)
    controller.take(pinned_at(0.97), 100.1)
    await engine.show(FULL)
    controller.step(100.5)
    controller.take(PublishedThreshold(3, 0.97), 100.6)
    controller.step(101.0)
    assert engine.loop.live == LiveDecoding(0.9, 0.7)


# Late requests


def full_load():
    """Return counts with two waiting requests of tier flex, after many of 80 tokens have ended."""
    requests = RequestTelemetry()
    for _ in range(NUM_ENDED):
        ended = Request("e", [5], DEFAULT, arrived_at=1.0)
        requests.come(ended)
        requests.stepped(ended, StepOutput("e", [7] * 80, FinishReason.LENGTH), 2.0)
        requests.gone(ended, 2.0)
    for name in "vw":
        requests.come(Request(name, [5], FLEX, arrived_at=1.0))
    return requests


def is_refused(engine, num_ahead):
    """Return whether a new request is refused by the rule that the engine has been given."""
    rule = engine.late_rule()
    return rule is not None and rule.late_s(num_ahead) > 0


async def test_late_requests_are_refused_once_nothing_is_left_to_give(engine):
    controller = controller_of(engine, full_load(), objective_ttft_s=3.0)
    controller.take(published(WIDE), 100.0)
    assert not is_refused(engine, 1_000)
    controller.take(published(SATURATED, 2), 100.1)
    # at 40 tokens per second, each waiting request takes 2 s
    assert engine.late_rule() == LateRule(pytest.approx(2.0, rel=0.02), 3.0)
    assert not is_refused(engine, 1)
    assert is_refused(engine, 2)


async def test_a_replica_that_is_faster_now_refuses_less(engine):
    load = full_load()
    controller = controller_of(engine, load, objective_ttft_s=3.0)
    controller.take(published(SATURATED), 100.0)
    assert is_refused(engine, 2)
    await engine.show(FULL)
    controller.step(100.5)
    assert controller.decision.gain > 4 / 3
    assert not is_refused(engine, 2)


async def work(engine, controller, *, tokens_per_s, seconds=range(31)):
    """Have a replica decode with a full batch while requests wait."""
    for i in seconds:
        counts = {
            "num_generated_tokens": tokens_per_s * i,
            "num_row_passes": tokens_per_s * i,
            "num_forward_passes": tokens_per_s * i // NUM_ROWS,
            "busy_s": float(i),
        }
        await engine.show(replace(FULL, **counts))
        controller.step(100.0 + i)


async def test_a_replica_that_is_slower_than_its_frontier_says_so_and_refuses_more(engine):
    plain = replace(CAPACITY, rungs=(AR,))
    basis = AutoscalingBasis(plain, BASIS.settings)
    controller = controller_of(engine, full_load(), basis, objective_ttft_s=3.0)
    controller.take(published(SATURATED), 100.0)
    assert (controller.pace, is_refused(engine, 1)) == (0.0, False)
    await work(engine, controller, tokens_per_s=20)
    assert controller.pace == pytest.approx(0.5, rel=0.02), "the frontier says 40"
    controller.take(published(SATURATED, 2), 130.0)
    # each waiting request takes 4 s
    assert engine.late_rule() == LateRule(pytest.approx(4.0, rel=0.05), 3.0)
    assert is_refused(engine, 1)


async def test_a_pinned_threshold_has_the_pace_of_its_speed_over_the_base(engine):
    controller = controller_of(engine)
    controller.take(published(WIDE), 100.0)
    await work(engine, controller, tokens_per_s=40)
    assert controller.decision.gain > 1.5
    assert controller.pace == pytest.approx(1 / controller.decision.gain, rel=0.1)
    controller.take(pinned_at(0.97), 131.0)
    await work(engine, controller, tokens_per_s=40, seconds=range(31, 91))
    assert controller.pace == pytest.approx(1.0, rel=0.1), (
        "replicas are counted at the base's speed"
    )


async def test_nothing_is_refused_while_the_threshold_is_pinned(engine):
    load = full_load()
    controller = controller_of(engine, load, objective_ttft_s=0.1)
    controller.take(published(SATURATED), 100.0)
    assert is_refused(engine, 2)
    controller.take(pinned_at(0.97), 100.1)
    assert not is_refused(engine, 2)


# A silent governor


async def test_only_the_floors_of_an_old_range_hold(engine):
    load = full_load()
    controller = controller_of(engine, load, objective_ttft_s=0.1)
    controller.take(published(ThresholdRange(0.9, 0.9, 1.8, True)), 100.0)
    await engine.show(status_of(NUM_ROWS))
    controller.step(111.0)
    controller.step(112.0)
    assert engine.loop.live.threshold_of(Tier.FLEX) == 0.9  # gives the gain of 1.8
    assert is_refused(engine, 2)
    for i in range(1, 8):
        controller.step(112.0 + i)
    assert engine.loop.live.threshold_of(Tier.FLEX) == 0.95  # is fast enough for its load
    assert not is_refused(engine, 2)
    await engine.show(FULL)
    controller.step(130.0)
    assert engine.loop.live.threshold_of(Tier.FLEX) == 0.9


# Reports


def stop_clock(monkeypatch):
    monkeypatch.setattr(engine_client, "time", SimpleNamespace(monotonic=lambda: 7.0))


async def test_a_report_has_the_load_and_the_thresholds(engine, monkeypatch):
    stop_clock(monkeypatch)
    controller = controller_of(engine, full_load())
    controller.take(published(WIDE), 100.0)
    await engine.show(FULL)
    controller.step(100.0)
    report = ReplicaTelemetry("mars", "r1", engine.loop, "10.0.0.1").report(
        controller.decision, live_version=1, pace=0.5
    )
    assert (report.pace, report.load(100.0).pace) == (0.5, 0.5)
    assert (report.replica, report.node, report.phase) == ("r1", "10.0.0.1", Phase.READY)
    assert report.engine == FULL
    assert report.decoding.live == LiveDecoding(1.0, 0.7)  # all present requests are of tier flex
    assert report.decoding.gain == pytest.approx(CAPACITY.gain(LADDER[-1]))
    assert (report.decoding.loss, report.decoding.is_lowest) == (0.0, True)
    assert (report.live_version, report.age_s) == (1, 0.0)


@asynccontextmanager
async def asking(engine, name):
    """Have a request wait at the engine during the block."""
    running = asyncio.create_task(anext(engine.loop.stream(Request(name, [5], DEFAULT))))
    await asyncio.sleep(0.01)
    yield
    running.cancel()
    await asyncio.wait([running])


def move_clock(monkeypatch, seconds):
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + seconds)
    monkeypatch.setattr(engine_client, "time", later)


@pytest.fixture
def telemetry(engine):
    return ReplicaTelemetry("mars", "r1", engine.loop)


async def test_the_report_of_an_engine_that_hangs_with_work_grows_old(engine, telemetry):
    assert telemetry.report().age_s == 0.0
    async with asking(engine, "hangs"):
        assert telemetry.report().age_s > 0.0


async def test_idle_time_does_not_make_a_report_old(engine, telemetry, monkeypatch):
    move_clock(monkeypatch, 600)
    async with asking(engine, "first after ten minutes"):
        assert telemetry.report().age_s < 300


async def test_the_report_of_a_hanging_engine_stays_old_if_a_client_gives_up(
    engine, telemetry, monkeypatch
):
    async with asking(engine, "gives up"):
        await engine.show(status_of(1))
        move_clock(monkeypatch, 600)
    async with asking(engine, "next"):
        assert telemetry.report().age_s >= 600


async def test_a_dead_engine_ends_the_steering_and_its_report_grows_old(
    engine, telemetry, monkeypatch
):
    controller = controller_of(engine)
    await engine.show(FULL)
    before = telemetry.report()
    engine.loop.stop()
    with pytest.raises(EngineDied):
        controller.step(100.0)
    move_clock(monkeypatch, 600)
    after = telemetry.report()
    assert after == replace(before, phase=Phase.OVERDUE, age_s=after.age_s)
    assert after.age_s >= 600


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_engine_whose_reports_cannot_be_read_counts_as_dead():
    made = Engine()
    made.loop.read_in_thread()
    (reader,) = (each for each in threading.enumerate() if each.name == "engine-reports")
    made.channel.send("no message")
    await soon(lambda: not made.loop.is_alive)
    # its warning is this test's, which alone ignores it
    await asyncio.to_thread(reader.join, 20)
    made.channel.close()


class Handle:
    """The handle of a governor that raises some errors first, as Ray and its transport may."""

    def __init__(self, governor, errors):
        self._governor, self._errors = governor, errors

    def __getattr__(self, method):
        async def remote(*arguments):
            if self._errors:
                raise self._errors.pop()
            return await getattr(self._governor, method)(*arguments)

        return SimpleNamespace(remote=remote)


async def test_no_error_but_a_dead_engine_ends_the_exchange_with_the_governor(engine, telemetry):
    governor, problems = Governor(), [ZeroDivisionError("odd"), KeyError("odd")]

    def load():
        if problems:
            raise problems.pop()
        return full_load()

    link = GovernorLink("app", "mars", "r1", "10.0.0.1")
    link._client._actor = Handle(governor, [TypeError("odd"), KeyError("odd"), ValueError("odd")])
    controller = controller_of(engine)
    controller._requests = load
    running = asyncio.create_task(link._run())
    try:
        await asyncio.to_thread(link.follow, telemetry, controller)
        await governor.set("mars", 0.97)
        async with asyncio.timeout(20):
            while engine.loop.live.threshold != 0.97 or problems:
                await asyncio.sleep(0.01)
        assert not running.done()
    finally:
        running.cancel()


async def test_without_an_inner_loop_the_published_threshold_holds(engine):
    controller = ThresholdController(engine.loop, PublishedThreshold(0, 0.8))
    assert engine.loop.live == LiveDecoding(0.8)
    controller.take(PublishedThreshold(1, 0.7), 100.0)
    await engine.show(FULL)
    controller.step(100.5)
    assert engine.loop.live == LiveDecoding(0.7)
