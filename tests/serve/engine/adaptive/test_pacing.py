"""Tests of the paced engine: its steps take a frontier's times, whatever they compute here."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from decoding.engine_requests import PROMPT, make_request, make_row
from decoding.engines import run
from decoding.local_loop import LocalLoop
from frontiers import AR, Corners, frontier_of
from mars_autoscale.model.frontier import Frontier, StepTable, write_frontier
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.config.settings import ModelSettings, RehearsalSettings
from mars_serve.engine.adaptive.pacing import Pacer, StepLoad, step_times
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Draft
from mars_serve.engine.scheduled_row import ScheduledRow
from mars_serve.engine.settings import EngineSettings
from mars_serve.observability.replica_telemetry import ReplicaTelemetry
from mars_serve.replica.engine_process import start_engine, wait_out
from mars_serve.replica.loading import load_engine

SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 3}))
WINDOW = 4
PREFILL = 10_000.0  # tokens a second
SLOPED = ((0.01, 0.02), (0.02, 0.03))  # over (0, 100) positions and (0, 1000) cached tokens


def paced_by(seconds: float | Corners, *, weights: str = "any") -> Frontier:
    """Build a frontier of plain AR decoding alone, with these step times."""
    return frontier_of(
        AR, weights=weights, seconds=seconds, window=WINDOW, prefill_tokens_per_s=PREFILL
    )


class FakeTime:
    """A clock that only sleeping and tests move; each sleep lasts ``late_s`` too long."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now = 50.0
        self.sleeps: list[float] = []
        self._late_s = late_s

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds + self._late_s

    def pacer(self, frontier: Frontier) -> Pacer:
        return Pacer(frontier, WINDOW, clock=self.clock, sleep=self.sleep)


def decoding_row(num_cached: int = 97, num_uncached: int = 3, masks: int = WINDOW) -> ScheduledRow:
    tokens = [1] * (num_cached + num_uncached)
    return make_row(make_request("row", tokens, num_cached=num_cached), masks=(masks,))


def prompt_chunk(num_prompt: int, num_cached: int, num_tokens: int, masks: int = 0) -> ScheduledRow:
    chunk = make_request("prompt", [1] * num_prompt, num_cached=num_cached)
    ends = num_cached + num_tokens == num_prompt
    return make_row(chunk, num_tokens, (masks,), reads_logits=ends)


def checking_row() -> ScheduledRow:
    checking = make_request("exact", [1] * 50, mode=Mode.EXACT, num_cached=49)
    checking.drafts = [Draft(7, 0.9), Draft(8, 0.8)]
    return make_row(checking, masks=(1, 2, 4))


def cut_row() -> ScheduledRow:
    """Build a decoding row of which a full step feeds only some tokens and no masks."""
    return make_row(make_request(prompt=[1] * 15, num_cached=10), 2, reads_logits=False)


@pytest.fixture
def engine_of(
    tiny_model: Callable[[str], PreTrainedModel], make_engine: Callable[..., Engine]
) -> Callable[..., Engine]:
    def make(pacer: Pacer | None = None) -> Engine:
        engine_class = partial(Engine, pacer=pacer)
        return make_engine(tiny_model("qwen2"), SPECIAL, engine_class=engine_class)

    return make


# Step times


def load_of(decodes: bool, positions: int, cached_tokens: int, prompt_tokens: int) -> StepLoad:
    return StepLoad(
        decodes=decodes,
        positions=positions,
        cached_tokens=cached_tokens,
        prompt_tokens=prompt_tokens,
    )


@pytest.mark.parametrize(
    ("rows", "load", "seconds"),
    [
        ([decoding_row()], load_of(True, 7, 97, 0), 0.01 + 0.0007 + 0.00097),
        ([decoding_row(), decoding_row(10, 1, 0)], load_of(True, 8, 107, 0), 0.01187),
        ([checking_row()], load_of(True, 10, 49, 0), 0.01 + 0.0010 + 0.00049),
        ([cut_row()], load_of(True, 2, 10, 0), 0.01 + 0.0002 + 0.0001),
        ([prompt_chunk(300, 64, 100)], load_of(False, 0, 0, 100), 0.01),
        ([prompt_chunk(40, 0, 40, 4)], load_of(True, 4, 0, 40), 0.01 + 0.0004 + 0.004),
        (
            [decoding_row(), prompt_chunk(300, 64, 100)],
            load_of(True, 7, 97, 100),
            0.01 + 0.0007 + 0.00097 + 0.01,
        ),
    ],
)
def test_a_step_is_charged_for_its_load(
    rows: list[ScheduledRow], load: StepLoad, seconds: float
) -> None:
    pacer = FakeTime().pacer(paced_by(SLOPED))
    assert pacer.load(rows) == load
    assert pacer.seconds(load) == pytest.approx(seconds, rel=1e-12)


@given(st.floats(0, 2000), st.floats(0, 9000))
def test_step_times_equal_the_tables_past_its_ends_too(
    positions: float, cached_tokens: float
) -> None:
    table = StepTable(
        positions=(1.0, 8.0, 64.0, 512.0),
        stored=(0.0, 64.0, 4096.0),
        seconds=((0.01, 0.011, 0.02), (0.009, 0.012, 0.03), (0.02, 0.025, 0.04), (0.1, 0.1, 0.2)),
    )
    if positions > 512 and cached_tokens > 4096:
        positions = 512.0
    expected = table.at_cached(cached_tokens).at(positions)
    assert step_times(table).at(positions, cached_tokens) == pytest.approx(expected, rel=1e-9)


# Waiting


def test_steps_that_follow_each_other_are_not_slowed_by_late_wake_ups() -> None:
    fake = FakeTime(late_s=0.004)
    pacer, begin = fake.pacer(paced_by(0.02)), fake.now
    for i in range(10):
        pacer.begin(follows=i > 0)
        pacer.finish([decoding_row()])
        assert fake.now - begin >= 0.02 * (i + 1) - 1e-9
    assert fake.now - begin == pytest.approx(0.2 + 0.004)
    assert len(fake.sleeps) == 10
    assert pacer.compute_share == pytest.approx(9 * 0.004 / 0.2)  # late wake-ups count as computing


def test_a_step_that_computes_too_long_delays_the_next() -> None:
    fake = FakeTime()
    pacer, begin = fake.pacer(paced_by(0.02)), fake.now
    pacer.begin(follows=False)
    fake.now += 0.05
    pacer.finish([decoding_row()])
    assert fake.sleeps == []
    pacer.begin(follows=True)
    fake.now += 0.005
    pacer.finish([decoding_row()])
    assert fake.sleeps == pytest.approx([0.015])
    assert fake.now - begin == pytest.approx(0.07)


def test_an_engine_waits_in_each_step_but_not_for_idle_time(
    engine_of: Callable[..., Engine],
) -> None:
    fake = FakeTime()
    engine = engine_of(fake.pacer(paced_by(0.02)))
    for name in ("a", "b"):
        begin = fake.now
        run(engine, [make_request(name, max_tokens=6, mode=Mode.AR)])
        # The second request finds its first page in the cache; the rest is not prefill.
        prompt_s = len(PROMPT) / PREFILL if name == "a" else 0.0
        assert fake.now - begin == pytest.approx(6 * 0.02 + prompt_s)
        fake.now += 1000
    assert len(fake.sleeps) == 12
    assert engine.status().compute_share == 0.0


# Output


@pytest.mark.parametrize(
    "options",
    [
        {"mode": Mode.AR},
        {"mode": Mode.EXACT},
        {"mode": Mode.THRESHOLD, "threshold": 0.05, "window": 3},
    ],
    ids=["ar", "exact", "threshold"],
)
def test_a_paced_engine_gives_the_same_tokens(
    engine_of: Callable[..., Engine], options: dict[str, object]
) -> None:
    expected = run(engine_of(), [make_request("a", max_tokens=6, **options)])
    paced = engine_of(Pacer(paced_by(0.02), WINDOW))
    begin = time.perf_counter()
    outputs = run(paced, [make_request("a", max_tokens=6, **options)])
    assert time.perf_counter() - begin >= 0.02 * len(outputs["a"])
    assert outputs == expected
    assert sum(len(output.tokens) for output in outputs["a"]) == 6
    share = paced.status().compute_share
    assert share is not None
    assert share > 0


@pytest.mark.parametrize(
    ("seconds", "num_masks"),
    [(((0.02, 0.02), (0.02, 0.02)), WINDOW), (((1e-5, 1e-5), (0.1, 0.1)), 0)],
    ids=["flat", "steep"],
)
def test_windows_follow_the_paced_times(
    engine_of: Callable[..., Engine], seconds: tuple[tuple[float, float], ...], num_masks: int
) -> None:
    engine = engine_of(FakeTime().pacer(paced_by(seconds)))
    engine.warm_up()
    (first, *_) = run(engine, [make_request("a", max_tokens=20, threshold=0.9)])["a"]
    assert first.num_masks == num_masks


# The share of computing


def take_steps(fake: FakeTime, pacer: Pacer, real_s: float, number: int) -> None:
    for _ in range(number):
        pacer.begin(follows=False)
        fake.now += real_s
        pacer.finish([decoding_row()])


def test_the_compute_share_covers_the_last_minute() -> None:
    fake = FakeTime()
    pacer = fake.pacer(paced_by(1.0))
    assert pacer.compute_share is None
    take_steps(fake, pacer, 0.25, 4)
    assert pacer.compute_share == pytest.approx(0.25)
    take_steps(fake, pacer, 0.75, 4)
    assert pacer.compute_share == pytest.approx(0.5)
    take_steps(fake, pacer, 0.125, 61)
    assert pacer.compute_share == pytest.approx(0.125)


def test_a_too_slow_machine_is_reported_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeTime()
    pacer = fake.pacer(paced_by(1.0))
    take_steps(fake, pacer, 0.5, 100)
    assert not caplog.records
    take_steps(fake, pacer, 0.75, 1)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "not valid on this machine: computing takes 50% of the paced time" in record.message
    take_steps(fake, pacer, 0.75, 59)
    assert len(caplog.records) == 1
    take_steps(fake, pacer, 0.75, 1)
    assert len(caplog.records) == 2
    assert "takes 75% of the paced time (59% since the start)" in caplog.records[-1].message


def test_the_first_seconds_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeTime()
    pacer = fake.pacer(paced_by(1.0))
    take_steps(fake, pacer, 0.9, 4)
    assert not caplog.records
    take_steps(fake, pacer, 0.9, 1)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("is_paced", [True, False])
async def test_only_paced_replicas_export_the_compute_share(
    engine_of: Callable[..., Engine], is_paced: bool
) -> None:
    loop = LocalLoop(engine_of(FakeTime().pacer(paced_by(0.02)) if is_paced else None))
    try:
        _ = [output async for output in loop.stream(make_request("a", mode=Mode.AR))]
        await loop.told(1)
        text = ReplicaTelemetry("mars", "r1", loop).exposition()
    finally:
        loop.stop()
    sample = 'marsray_rehearsal_compute_ratio{model="mars",replica="r1"} 0.0'
    assert (sample in text.splitlines()) is is_paced
    assert ("marsray_rehearsal" in text) is is_paced


# Loading a paced engine


def settings_of(path: Path, cold_start_s: float = 0.0) -> ModelSettings:
    return ModelSettings(
        name="mars",
        path=str(path),
        engine=EngineSettings(page_size=8, num_pages=64, max_num_seqs=4),
        rehearsal=RehearsalSettings(cold_start_s=cold_start_s),
    )


@pytest.fixture
def model_dir(mars_dir: Path, tmp_path: Path) -> Path:
    """Copy a checkpoint for the test to add a frontier to."""
    return Path(shutil.copytree(mars_dir, tmp_path / "model"))


def test_pacing_needs_a_frontier_of_the_same_weights(model_dir: Path) -> None:
    with pytest.raises(UserError, match=r"^rehearsal: .*frontier\.json: cannot be .*calibrate"):
        load_engine(settings_of(model_dir))
    write_frontier(model_dir, paced_by(0.02, weights="0" * 64))
    with pytest.raises(UserError, match=r"^rehearsal: .*: weights: it was measured on another"):
        load_engine(settings_of(model_dir))


def test_a_loaded_engine_is_paced_and_logs_a_warning(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_frontier(model_dir, paced_by(0.02, weights=weights_fingerprint(model_dir)))
    engine = load_engine(settings_of(model_dir))
    (record,) = (record for record in caplog.records if "rehearsal" in record.message)
    assert record.levelno == logging.WARNING
    assert f"slowed down to the times in {model_dir / 'frontier.json'}" in record.message
    begin = time.perf_counter()
    outputs = run(engine, [make_request("a", max_tokens=4, mode=Mode.AR)])
    assert time.perf_counter() - begin >= 0.02 * len(outputs["a"])
    assert engine.status().compute_share is not None
    plain = settings_of(model_dir).model_copy(update={"rehearsal": None})
    assert load_engine(plain).status().compute_share is None


def test_a_cold_start_waits_for_the_rest_of_its_duration(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeTime()
    started_s = fake.now
    fake.now += 20
    wait_out(60, started_s, clock=fake.clock, sleep=fake.sleep)
    assert fake.sleeps == [40]
    assert "held back for 40.0 s" in caplog.text
    wait_out(60, started_s, clock=fake.clock, sleep=fake.sleep)
    assert fake.sleeps == [40]


async def test_a_replicas_engine_is_not_ready_before_its_cold_start_ends(model_dir: Path) -> None:
    write_frontier(model_dir, paced_by(0.02, weights=weights_fingerprint(model_dir)))
    begin = time.monotonic()
    loop = start_engine(settings_of(model_dir, cold_start_s=8), 1)
    try:
        assert time.monotonic() - begin >= 8
        outputs = [
            output async for output in loop.stream(make_request("a", max_tokens=4, mode=Mode.AR))
        ]
        assert sum(len(output.tokens) for output in outputs) == 4
        assert loop.status().compute_share is not None
    finally:
        loop.stop()
