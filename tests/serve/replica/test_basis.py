import logging
import shutil
import time
from pathlib import Path

import pytest
import torch

from frontiers import AR, frontier_of, point
from mars_autoscale.model.frontier import FRONTIER_FILE, write_frontier
from mars_autoscale.model.step_times import StepTimes
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.config import build_settings
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.config.hardware import cpu_name, hardware_name
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.settings import EngineSettings
from mars_serve.replica.basis import autoscaling_basis
from mars_serve.replica.engine_process import start_engine
from mars_serve.replica.loading import load_engine

TIMES = StepTimes((1, 4, 16), (0, 512), ((0.01, 0.02), (0.02, 0.03), (0.05, 0.06)))


def some_frontier(path, **more):
    """Return a frontier of steps of 20 ms with one rung below plain AR decoding."""
    lower = point("threshold", 0.9, 77.0, 2.0, 4.0)
    return frontier_of(AR, lower, weights=weights_fingerprint(path), seconds=0.02, **more)


@pytest.fixture
def model_dir(mars_dir, tmp_path):
    """Return a copy of a checkpoint, with a frontier."""
    path = Path(shutil.copytree(mars_dir, tmp_path / "model"))
    write_frontier(path, some_frontier(path))
    return path


def settings_of(path, tiers=None, more=None, **autoscaling):
    return ModelSettings(
        name="mars",
        path=str(path),
        tiers=tiers or {},
        engine=EngineSettings(page_size=8, num_pages=64, max_num_seqs=4),
        autoscaling={"max_replicas": 3, **autoscaling},
        **(more or {}),
    )


def basis_of(settings, times=TIMES):
    return autoscaling_basis(settings, load_engine(settings), times)


def test_the_basis_is_made_of_the_frontier_and_the_settings(model_dir):
    basis = basis_of(settings_of(model_dir, cold_start_s=30))
    assert basis.refused is None
    capacity = basis.capacity
    assert [rung.threshold for rung in capacity.rungs] == [1.0, 0.9]
    assert capacity.max_num_seqs == 4
    assert capacity.tokens_per_s(capacity.rungs[0]) == pytest.approx(4 / 0.02)
    assert capacity.prefill_tokens_per_s == 10_000
    assert (basis.settings.max_replicas, basis.settings.cold_start_s) == (3, 30)


def test_a_threshold_that_is_not_autoscaled_has_no_basis(model_dir):
    settings = settings_of(model_dir).model_dump(exclude_unset=True, exclude={"autoscaling"})
    assert basis_of(ModelSettings(**settings)) is None


def corrupted(path):
    file = path / FRONTIER_FILE
    file.write_text(file.read_text()[:-40])


def missing(path):
    (path / FRONTIER_FILE).unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (corrupted, "cannot be read as JSON"),
        (missing, "cannot be read (No such file or directory)"),
    ],
)
def test_a_refused_frontier_leaves_only_plain_decoding(model_dir, caplog, damage, reason):
    damage(model_dir)
    basis = basis_of(settings_of(model_dir))
    assert reason in basis.refused
    assert basis.refused.startswith(f"{FRONTIER_FILE}: ")  # clients see it, so without a path
    assert basis.refused.endswith("run marsray calibrate again")
    capacity = basis.capacity
    assert [rung.mode for rung in capacity.rungs] == [Mode.AR]
    # by the engine's own times: four rows that read half of their context, 512 tokens together
    assert capacity.tokens_per_s(capacity.rungs[0]) == pytest.approx(4 / 0.03)
    assert capacity.prefill_tokens_per_s == pytest.approx(16 / 0.05)
    (record,) = (each for each in caplog.records if each.levelno == logging.ERROR)
    assert "τ = 1 alone" in record.message
    assert str(model_dir / FRONTIER_FILE) in record.message


def test_a_later_basis_has_a_later_time(model_dir):
    settings = settings_of(model_dir)
    engine, began_s = load_engine(settings), time.time()
    first = autoscaling_basis(settings, engine, TIMES)
    missing(model_dir)
    refused = autoscaling_basis(settings, engine, TIMES)
    assert began_s <= first.made_s <= refused.made_s <= time.time()


def test_an_engine_that_has_timed_one_step_size_has_a_basis(model_dir):
    missing(model_dir)
    capacity = basis_of(settings_of(model_dir), StepTimes((4,), (0,), ((0.02,),))).capacity
    assert capacity.tokens_per_s(capacity.rungs[0]) == pytest.approx(4 / 0.02)


def test_a_target_that_was_not_measured_is_refused(model_dir):
    basis = basis_of(settings_of(model_dir, target_threshold=0.95))
    unknown = "target_threshold: 0.95 is not among the measured ones (1, 0.9)"
    assert basis.refused.startswith(unknown)
    assert [rung.threshold for rung in basis.capacity.rungs] == [1.0]
    basis = basis_of(settings_of(model_dir, target_threshold=0.9))
    assert (basis.refused, basis.capacity.target.threshold) == (None, 0.9)


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
def test_the_higher_floor_of_tiers_and_autoscaling_holds(model_dir, tiers, autoscaling, floors):
    outer = basis_of(settings_of(model_dir, tiers, **autoscaling)).settings
    assert (outer.floor_threshold, outer.flex_floor_threshold) == floors


# Hardware and number type


@pytest.mark.parametrize(("device", "dtype"), [("one H200", "float32"), ("cpu", "bfloat16")])
def test_a_frontier_of_another_machine_is_used_with_a_warning(model_dir, caplog, device, dtype):
    hardware = hardware_name("cpu") if device == "cpu" else device
    write_frontier(model_dir, some_frontier(model_dir, hardware=hardware, dtype=dtype))
    caplog.clear()
    basis = basis_of(settings_of(model_dir))
    here = f"{hardware_name('cpu')} in float32"
    assert basis.mismatch == f"measured on {hardware} in {dtype}; the replica runs on {here}"
    (warning,) = (each.message for each in caplog.records if basis.mismatch in each.message)
    assert warning.endswith("run marsray calibrate here")
    assert basis.refused is None
    assert [rung.threshold for rung in basis.capacity.rungs] == [1.0, 0.9]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_warning_for_the_same_machine(model_dir, caplog, dtype):
    write_frontier(model_dir, some_frontier(model_dir, hardware=hardware_name("cpu"), dtype=dtype))
    assert basis_of(settings_of(model_dir, more={"dtype": dtype})).mismatch is None
    assert "calibrate here" not in caplog.text


def test_the_name_of_a_processor_has_its_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert hardware_name("cpu") == f"{cpu_name()}, 7 threads"


def test_the_engine_process_hands_over_its_basis(model_dir):
    corrupted(model_dir)
    loop = start_engine(settings_of(model_dir), 1)
    try:
        assert "cannot be read as JSON" in loop.basis.refused
    finally:
        loop.stop()


# Settings that contradict each other


def governed(**content):
    autoscaling = {"max_replicas": 2, **content.pop("autoscaling", {})}
    content = {"name": "m", "path": "p", "autoscaling": autoscaling, **content}
    return build_settings(content, ModelSettings, source="serve.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"autoscaling": {"min_replicas": 3}},
            r"autoscaling: .*min_replicas is above max_replicas; lower one or raise",
        ),
        ({"num_replicas": 2}, r"num_replicas: autoscaling chooses it; leave it out"),
        ({"autoscaling": {"max_replicas": None}}, r"autoscaling\.max_replicas: "),
        (
            {"confidence_threshold": 0.95},
            r"confidence_threshold: 0\.95 has no effect where autoscaling moves τ, down from its "
            r"target, 1\.0; leave it out, and if 0\.95 is to be that target, give "
            r"autoscaling\.target_threshold: 0\.95",
        ),
        (
            {"autoscaling": {"target_threshold": 0.85, "floor_threshold": 0.8}},
            r"autoscaling\.target_threshold: 0\.85 is below tiers\.default_min_threshold, 0\.9; "
            r"raise the target or lower",
        ),
        (
            {
                "tiers": {"default_min_threshold": 0.8},
                "autoscaling": {"target_threshold": 0.85, "floor_threshold": 0.9},
            },
            r"autoscaling\.target_threshold: 0\.85 is below autoscaling\.floor_threshold, 0\.9; "
            r"raise the target or lower",
        ),
    ],
)
def test_contradicting_settings_are_refused(content, message):
    with pytest.raises(UserError, match=message):
        governed(**content)


@pytest.mark.parametrize(
    ("content", "initial"),
    [
        ({}, 1.0),
        ({"confidence_threshold": 0.95, "autoscaling": {"target_threshold": 0.95}}, 0.95),
        ({"tiers": {"default_min_threshold": 0.97}}, 1.0),
        (
            {
                "tiers": {"default_min_threshold": 0.85},
                "autoscaling": {"target_threshold": 0.85, "floor_threshold": 0.8},
            },
            0.85,
        ),
    ],
)
def test_the_initial_threshold_follows_from_the_settings(content, initial):
    assert governed(**content).initial_threshold == initial
