from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decoding.local_engine_client import LOOPBACK, LocalEngineClient, linked
from mars_platform.checkpoint.directory import SpecialTokens
from mars_serve.engine.ipc.messages import Condition
from mars_serve.engine.ipc.pulse import Pulse
from mars_serve.replica import watchdog
from mars_serve.replica.watchdog import PulseReader, watch
from waiting import soon


@pytest.fixture
def pulse() -> Pulse:
    descriptor = Pulse.create()
    try:
        return Pulse(descriptor)
    finally:
        os.close(descriptor)


def test_a_pulse_needs_no_room_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    descriptor = Pulse.create()
    one, other = Pulse(descriptor), Pulse(descriptor)
    os.close(descriptor)
    one.begin(3, 5)
    assert other.step == (3, 5)


def reader_of(pulse: Pulse, expected_s: float = 0.01, step_timeout_s: float = 30) -> PulseReader:
    return PulseReader(pulse, lambda positions, cached: expected_s, step_timeout_s)


def look_for(reader: PulseReader, start_s: float, seconds: float, period_s: float = 0.5) -> None:
    for number in range(round(seconds / period_s) + 1):
        reader.look(start_s + number * period_s)


def test_both_sides_see_the_same_pulse() -> None:
    descriptor = Pulse.create()
    ours, theirs = Pulse(descriptor), Pulse(descriptor)
    os.close(descriptor)
    assert theirs.beat_s == 0
    ours.begin(64, 1000)
    assert theirs.step == (64, 1000)
    assert theirs.beat_s == ours.beat_s > 0
    ours.beat()
    assert theirs.step[0] == 0


@pytest.mark.parametrize("runs_step", [True, False])
def test_a_silent_engine_is_overdue_after_5_s_and_hung_after_its_timeout(
    pulse: Pulse, runs_step: bool
) -> None:
    if runs_step:
        pulse.begin(8, 100)
    else:
        pulse.beat()
    reader = reader_of(pulse)
    for seconds, is_overdue, is_hung in [
        (4.5, False, False),
        (5, True, False),
        (29.5, True, False),
    ]:
        look_for(reader := reader_of(pulse), 50, seconds)
        assert (reader.is_overdue, reader.is_hung) == (is_overdue, is_hung), seconds
    look_for(reader, 50 + 29.5, 0.5)
    assert reader.is_hung
    pulse.beat()
    reader.look(90)
    assert not reader.is_overdue
    assert not reader.is_hung


def test_a_step_that_takes_long_is_given_its_time(pulse: Pulse) -> None:
    pulse.begin(4096, 0)
    reader = reader_of(pulse, expected_s=6)
    look_for(reader, 0, 11.5)
    assert not reader.is_overdue
    look_for(reader, 12, 47)
    assert reader.is_overdue
    assert not reader.is_hung
    look_for(reader, 59.5, 1)
    assert reader.is_hung


def test_time_in_which_nobody_looked_does_not_count(pulse: Pulse) -> None:
    """The whole machine may have stood still."""
    pulse.begin(8, 100)
    reader = reader_of(pulse)
    look_for(reader, 0, 2)
    reader.look(600)
    assert reader.silent_s == 3
    assert not reader.is_overdue


@pytest.fixture
def loop(tiny_model: Any, make_engine: Any) -> Iterator[LocalEngineClient]:
    special = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 3}))
    loop = LocalEngineClient(make_engine(tiny_model("qwen2"), special), LOOPBACK)
    yield loop
    loop.stop()


async def test_all_who_send_requests_are_told_of_an_overdue_engine(
    pulse: Pulse, loop: LocalEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that drains still counts as draining once it is overdue."""
    monkeypatch.setattr(watchdog, "_OVERDUE_S", 0.2)
    monkeypatch.setattr(watchdog, "_LOOK_S", 0.01)
    ended = threading.Event()
    link = await linked(loop.address)
    link.attach()
    loop.tell(Condition(is_draining=True))
    watch(reader_of(pulse), loop, ended.set)
    await soon(lambda: link.condition == Condition(is_overdue=True, is_draining=True))
    assert link.is_overdue
    assert loop.is_overdue

    def beats() -> bool:
        pulse.beat()
        return link.condition == Condition(is_draining=True)

    await soon(beats)
    assert not link.is_overdue
    assert not ended.is_set()
    link.stop()


def test_a_hung_engine_is_ended(
    pulse: Pulse, loop: LocalEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_LOOK_S", 0.01)
    ended, problems = threading.Event(), [OSError("odd"), ZeroDivisionError("odd")]

    def expected_s(positions: int, cached: int) -> float:
        if problems:
            raise problems.pop()
        return 0.01

    pulse.begin(8, 100)
    watch(PulseReader(pulse, expected_s, step_timeout_s=0.2), loop, ended.set)
    assert ended.wait(20)
