from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frontiers import AR, frontier_of, point
from mars_autoscale.model.frontier import FRONTIER_FILE, Frontier, write_frontier
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.config import build_settings
from mars_platform.errors import UserError
from mars_serve.config.served import LiveThreshold, ThresholdRange
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.adaptive.window import StepTimes
from mars_serve.engine.ipc.loop import EngineLoop
from mars_serve.engine.request import DecodingOptions, LiveDecoding, Request, StepOutput
from mars_serve.engine.settings import EngineSettings
from mars_serve.observability.request_load import RequestLoad
from mars_serve.replica.engine_process import start_engine
from mars_serve.replica.loading import load_engine
from mars_serve.replica.planning import plan_of
from mars_serve.replica.steering import Steering

TIMES = StepTimes((1, 4, 16), (0, 512), ((0.01, 0.02), (0.02, 0.03), (0.05, 0.06)))


def some_frontier(path: Path) -> Frontier:
    """Steps of 20 ms, whatever they hold, and one rung below plain AR decoding."""
    lower = point("threshold", 0.9, 77.0, 2.0, 4.0)
    return frontier_of(AR, lower, weights=weights_fingerprint(path), seconds=0.02)


@pytest.fixture
def model_dir(mars_dir: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint, with a frontier."""
    path = Path(shutil.copytree(mars_dir, tmp_path / "model"))
    write_frontier(path, some_frontier(path))
    return path


def settings_of(
    path: Path, tiers: dict[str, float] | None = None, **autoscaling: Any
) -> ModelSettings:
    return ModelSettings(
        name="mars",
        path=str(path),
        tiers=tiers or {},
        engine=EngineSettings(page_size=8, num_pages=64, max_num_seqs=4),
        autoscaling={"max_replicas": 3, **autoscaling},
    )


def test_the_plan_is_that_of_the_frontier_and_the_settings(model_dir: Path) -> None:
    settings = settings_of(model_dir, cold_start_s=30)
    plan = plan_of(settings, load_engine(settings), TIMES)
    assert plan is not None
    assert plan.refused is None
    assert [rung.threshold for rung in plan.capacity.rungs] == [1.0, 0.9]
    assert plan.capacity.max_num_seqs == 4
    assert plan.capacity.tokens_per_s(plan.capacity.rungs[0]) == pytest.approx(4 / 0.02)
    assert plan.capacity.prefill_tokens_per_s == 10_000
    assert (plan.settings.max_replicas, plan.settings.cold_start_s) == (3, 30)


@pytest.mark.parametrize("autoscaling", [None, {"policy": "ongoing_requests", "max_replicas": 2}])
def test_there_is_none_where_the_threshold_is_not_autoscaled(
    model_dir: Path, autoscaling: dict[str, Any] | None
) -> None:
    settings = ModelSettings(
        name="mars",
        path=str(model_dir),
        engine=EngineSettings(page_size=8, num_pages=64, max_num_seqs=4),
        autoscaling=autoscaling,
    )
    assert plan_of(settings, load_engine(settings), TIMES) is None


def corrupted(path: Path) -> None:
    file = path / FRONTIER_FILE
    file.write_text(file.read_text()[:-40])


def changed(path: Path) -> None:
    file = path / FRONTIER_FILE
    content = json.loads(file.read_text())
    content["points"][1]["tokens_per_forward"] = 3.0
    file.write_text(json.dumps(content))


def of_another_model(path: Path) -> None:
    frontier = some_frontier(path)
    write_frontier(path, frontier.model_copy(update={"weights": "0" * 64}))


def missing(path: Path) -> None:
    (path / FRONTIER_FILE).unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (corrupted, "cannot be read as JSON"),
        (changed, "checksum: it is not that of the other fields"),
        (of_another_model, "weights: it was measured on another model's"),
        (missing, "cannot be read (No such file or directory)"),
    ],
)
def test_a_frontier_that_is_refused_leaves_plain_decoding_alone(
    model_dir: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    damage(model_dir)
    settings = settings_of(model_dir)
    plan = plan_of(settings, load_engine(settings), TIMES)
    assert plan is not None
    assert plan.refused is not None
    assert reason in plan.refused
    assert str(model_dir / FRONTIER_FILE) in plan.refused
    assert plan.refused.endswith("run marsray calibrate again")
    assert [rung.threshold for rung in plan.capacity.rungs] == [1.0]
    assert plan.capacity.exact is None
    # by the engine's own times: four rows that read half of their context, 512 tokens together
    assert plan.capacity.tokens_per_s(plan.capacity.rungs[0]) == pytest.approx(4 / 0.03)
    assert plan.capacity.prefill_tokens_per_s == pytest.approx(16 / 0.05)
    (record,) = (each for each in caplog.records if each.levelno == logging.ERROR)
    assert "goes by τ = 1 alone" in record.message


def test_a_later_plan_is_told_from_an_earlier_one(model_dir: Path) -> None:
    settings = settings_of(model_dir)
    engine = load_engine(settings)
    began_s = time.time()
    first, second = plan_of(settings, engine, TIMES), plan_of(settings, engine, TIMES)
    missing(model_dir)
    refused = plan_of(settings, engine, TIMES)
    assert first is not None
    assert second is not None
    assert refused is not None
    assert began_s <= first.made_s <= second.made_s <= refused.made_s <= time.time()


def test_an_engine_that_has_timed_one_size_only_has_a_plan_too(model_dir: Path) -> None:
    missing(model_dir)
    settings = settings_of(model_dir)
    plan = plan_of(settings, load_engine(settings), StepTimes((4,), (0,), ((0.02,),)))
    assert plan is not None
    assert plan.capacity.tokens_per_s(plan.capacity.rungs[0]) == pytest.approx(4 / 0.02)


def test_a_target_that_was_not_measured_is_refused(model_dir: Path) -> None:
    settings = settings_of(model_dir, target_threshold=0.95)
    plan = plan_of(settings, load_engine(settings), TIMES)
    assert plan is not None
    assert plan.refused is not None
    assert plan.refused.startswith("target_threshold: 0.95 is not among the measured ones (1, 0.9)")
    assert [rung.threshold for rung in plan.capacity.rungs] == [1.0]
    known = settings_of(model_dir, target_threshold=0.9)
    plan = plan_of(known, load_engine(known), TIMES)
    assert plan is not None
    assert (plan.refused, plan.capacity.rungs[0].threshold) == (None, 0.9)


@pytest.mark.parametrize(
    ("tiers", "autoscaling", "floors"),
    [
        ({}, {}, (0.9, 0.7)),
        ({"default_min_threshold": 0.95, "flex_min_threshold": 0.8}, {}, (0.95, 0.8)),
        ({"default_min_threshold": 0.5, "flex_min_threshold": 0.5}, {}, (0.9, 0.7)),
        (
            {"default_min_threshold": 0.5, "flex_min_threshold": 0.6},
            {"floor_threshold": 0.8, "flex_floor_threshold": 0.5},
            (0.8, 0.6),
        ),
    ],
)
def test_the_higher_floor_of_tiers_and_autoscaling_holds(
    model_dir: Path,
    tiers: dict[str, float],
    autoscaling: dict[str, float],
    floors: tuple[float, float],
) -> None:
    settings = settings_of(model_dir, tiers, **autoscaling)
    plan = plan_of(settings, load_engine(settings), TIMES)
    assert plan is not None
    assert (plan.settings.floor_threshold, plan.settings.flex_floor_threshold) == floors


async def outputs_of(loop: EngineLoop, request: Request) -> list[StepOutput]:
    return [output async for output in loop.stream(request)]


async def test_a_replica_without_a_usable_frontier_serves_with_plain_decoding(
    model_dir: Path,
) -> None:
    corrupted(model_dir)
    settings = settings_of(model_dir)
    loop = start_engine(settings, num_threads=1)
    try:
        assert loop.plan is not None
        assert "cannot be read as JSON" in (loop.plan.refused or "")
        assert settings.autoscaling is not None
        steering = Steering("r1", loop.plan, settings.autoscaling, loop, RequestLoad())
        steering.take(LiveThreshold(1, 0.9, ThresholdRange(0.9, 0.7, 9.0, False)), 100.0)
        options = DecodingOptions(30, threshold=None)
        running = asyncio.gather(
            *(outputs_of(loop, Request(str(i), [5, 9, 12], options)) for i in range(16))
        )
        now_s = 100.0
        while not running.done():
            await asyncio.sleep(0.005)
            now_s += 0.5
            steering.step(now_s)
        outputs = [output for each in await running for output in each]
        assert {output.threshold for output in outputs} == {1.0}
        assert {len(output.tokens) for output in outputs} == {1}
        assert loop.live == LiveDecoding(1.0, 1.0)
    finally:
        loop.stop()


def test_numbers_of_replicas_that_contradict_each_other_are_refused() -> None:
    autoscaling = {"min_replicas": 3, "max_replicas": 2}
    content = {"name": "m", "path": "p", "autoscaling": autoscaling}
    with pytest.raises(
        UserError, match=r"autoscaling: .*min_replicas is above max_replicas; lower one or raise"
    ):
        build_settings(content, ModelSettings, source="serve.yaml")
    both = {"name": "m", "path": "p", "num_replicas": 2, "autoscaling": {"max_replicas": 2}}
    with pytest.raises(UserError, match=r"num_replicas: autoscaling chooses it; leave it out"):
        build_settings(both, ModelSettings, source="serve.yaml")
    with pytest.raises(UserError, match=r"autoscaling\.max_replicas: "):
        build_settings({**both, "autoscaling": {}}, ModelSettings, source="serve.yaml")


def governed(confidence_threshold: float | None = None, **content: Any) -> ModelSettings:
    given = {} if confidence_threshold is None else {"confidence_threshold": confidence_threshold}
    autoscaling = {"max_replicas": 2, **content.pop("autoscaling", {})}
    content = {"name": "m", "path": "p", "autoscaling": autoscaling, **given, **content}
    return build_settings(content, ModelSettings, source="serve.yaml")


def test_a_threshold_beside_the_target_is_refused() -> None:
    """It would have no effect."""
    with pytest.raises(
        UserError,
        match=r"confidence_threshold: 0\.95 has no effect where autoscaling moves τ, down from its "
        r"target, 1\.0; leave it out, and if 0\.95 is to be that target, give "
        r"autoscaling\.target_threshold: 0\.95",
    ):
        governed(0.95)
    both = governed(0.95, autoscaling={"target_threshold": 0.95})
    assert (governed().initial_threshold, both.initial_threshold) == (1.0, 0.95)
    by_serve = governed(0.97, autoscaling={"policy": "ongoing_requests"})
    assert by_serve.initial_threshold == 0.97


def test_a_high_floor_needs_no_other_threshold_where_the_target_is_above_it() -> None:
    assert governed(tiers={"default_min_threshold": 0.97}).initial_threshold == 1.0


@pytest.mark.parametrize(
    ("tiers", "floor", "named"),
    [
        ({}, 0.8, r"tiers\.default_min_threshold, 0\.9"),
        ({"default_min_threshold": 0.8}, 0.9, r"autoscaling\.floor_threshold, 0\.9"),
    ],
)
def test_a_target_below_a_floor_is_refused(
    tiers: dict[str, float], floor: float, named: str
) -> None:
    """Requests would be slower than what replicas are sized by."""
    autoscaling = {"target_threshold": 0.85, "floor_threshold": floor}
    with pytest.raises(
        UserError,
        match=rf"autoscaling\.target_threshold: 0\.85 is below {named}; raise the target or lower",
    ):
        governed(tiers=tiers, autoscaling=autoscaling)
    lowered = {"target_threshold": 0.85, "floor_threshold": 0.8}
    governed(tiers={"default_min_threshold": 0.85}, autoscaling=lowered)
