"""A frontier of another machine: used, with a warning."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from frontiers import AR, frontier_of, point
from mars_autoscale.model.frontier import write_frontier
from mars_autoscale.policy.control import Plan
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_serve.config.hardware import cpu_name, hardware_name
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.adaptive.window import StepTimes
from mars_serve.engine.settings import EngineSettings
from mars_serve.replica.loading import load_engine
from mars_serve.replica.planning import plan_of

TIMES = StepTimes((1, 4, 16), (0, 512), ((0.01, 0.02), (0.02, 0.03), (0.05, 0.06)))


@pytest.fixture(name="model_dir")
def _model_dir(mars_dir: Path, tmp_path: Path) -> Path:
    """A checkpoint of its own, for its frontier."""
    return Path(shutil.copytree(mars_dir, tmp_path / "model"))


def plan_with(path: Path, hardware: str, measured_dtype: str, **settings: Any) -> Plan:
    lower = point("threshold", 0.9, 77.0, 2.0, 4.0)
    measured = {"hardware": hardware, "dtype": measured_dtype}
    weights = weights_fingerprint(path)
    write_frontier(path, frontier_of(AR, lower, weights=weights, seconds=0.02, **measured))
    model = ModelSettings(
        name="mars",
        path=str(path),
        engine=EngineSettings(page_size=8, num_pages=64, max_num_seqs=4),
        autoscaling={"max_replicas": 3},
        **settings,
    )
    plan = plan_of(model, load_engine(model), TIMES)
    assert plan is not None
    assert plan.refused is None
    return plan


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.name == "mars_serve.replica.planning"]


@pytest.mark.parametrize(
    ("device", "dtype", "named"), [("one H200", "float32", "float32"), ("cpu", "bf16", "bfloat16")]
)
def test_a_frontier_of_another_machine_is_told_of(
    model_dir: Path, caplog: pytest.LogCaptureFixture, device: str, dtype: str, named: str
) -> None:
    hardware = hardware_name("cpu") if device == "cpu" else device
    plan = plan_with(model_dir, hardware, dtype)
    here = f"{hardware_name('cpu')} in float32"
    assert plan.mismatch == f"measured on {hardware} in {named}; the replica runs on {here}"
    (warning,) = warnings_of(caplog)
    assert plan.mismatch in warning
    assert warning.endswith("run marsray calibrate here")
    assert [rung.threshold for rung in plan.capacity.rungs] == [1.0, 0.9], "it is used"


@pytest.mark.parametrize(("dtype", "served"), [("float32", "float32"), ("bf16", "bfloat16")])
def test_nothing_is_said_of_one_of_this_machine(
    model_dir: Path, caplog: pytest.LogCaptureFixture, dtype: str, served: str
) -> None:
    plan = plan_with(model_dir, hardware_name("cpu"), dtype, dtype=served)
    assert plan.mismatch is None
    assert warnings_of(caplog) == []


def test_a_rehearsal_goes_by_another_machine_on_purpose(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_with(model_dir, "one H200", "bf16", rehearsal={"cold_start_s": 1})
    assert plan.mismatch is None
    assert warnings_of(caplog) == []


def test_the_name_of_a_processor_has_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert hardware_name("cpu") == f"{cpu_name()}, 7 threads"
