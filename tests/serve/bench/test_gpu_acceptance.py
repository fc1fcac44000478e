"""The acceptance run on a GPU works, in tiny sizes on a CPU, and survives tests that do not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench import gpu_acceptance
from bench.gpu_acceptance import Part, parts, run_part

ROOT = Path(__file__).parents[3]
ABSENT = ("ray", "fastapi", "starlette", "aiohttp", "uvicorn")
"""Packages that a machine without the server's dependencies lacks."""
_CHECKED_BY_TESTS = {"scan", "convolve"}
"""Operators that the acceptance run compares by a test of `tests/serve/engine/states`."""


@pytest.fixture(autouse=True, scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the packages that the program must not need fail where its processes import them."""
    folder = tmp_path_factory.mktemp("stubs")
    for name in ABSENT:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise ImportError('{name} is not there')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        yield


def run_acceptance(out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the program."""
    command = [sys.executable, str(ROOT / "bench/gpu_acceptance.py"), "--device", "cpu", "--tiny"]
    run = subprocess.run([*command, "--out", str(out), *options], timeout=900, check=False)
    return run.returncode, json.loads((out / "acceptance.json").read_text())["tests"]


def results_of(part: Part, directory: Path) -> dict[str, Any]:
    """Run a part, and return its results by the test's name."""
    results = directory / "acceptance.json"
    results.write_text('{"tests": {}}')
    run_part("part", part, time.time() + 900, results, "cpu", tiny=True)
    tests = json.loads(results.read_text())["tests"]
    assert {facts["state"] for facts in tests.values()} == {"passed", "skipped"}, tests
    return {name.partition("::")[2]: facts for name, facts in tests.items()}


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory, stubs: None) -> dict[str, Any]:
    """Results of the parts of `bench/gpu` that start no further processes.

    They share one process here, since most of a tiny part's time is its start.
    """
    own = [parts()[name] for name in ("checks", "decoding 0.5b", "training")]
    files = tuple(file for part in own for file in part.files)
    together = replace(own[0], files=files, share=1.0, chosen="not 7b")
    return results_of(together, tmp_path_factory.mktemp("acceptance"))


def test_kernels_and_engine_are_compared_with_their_oracles(tests: dict[str, Any]) -> None:
    kernels = (ROOT / "serve/mars_serve/engine/kernels").glob("*.py")
    define = re.compile(r'define\(\s*"marsray::(\w+)"')
    operators = {name for path in kernels for name in define.findall(path.read_text())}
    for dtype, limit in (("float32", 1e-4), ("bfloat16", 2e-2)):
        found = tests[f"test_operators_equal_their_twins[{dtype}]"]["figures"]["differences"]
        # a new operator needs its check
        assert {name.partition(":")[0] for name in found} == operators - _CHECKED_BY_TESTS
        assert all(0 <= value <= limit for value in found.values())
    greedy = tests["test_the_engine_chooses_as_transformers[float32]"]["figures"]
    for mode in ("ar", "exact"):
        assert greedy[mode]["tokens"] == 24
        assert greedy[mode]["equal_share"] == 1
        assert greedy[mode]["largest_logprob_difference"] < 1e-4


def test_decoding_is_measured_at_the_drawn_lengths(tests: dict[str, Any]) -> None:
    figures = tests["test_steps_are_timed[0.5b-32-512-0.0]"]["figures"]
    ways = {name: figures[name] for name in ("ar", "exact .9", "threshold 1.79", "exact .8")}
    assert ways["ar"]["tokens_per_pass"] == 1 == ways["ar"]["over_ar"]
    assert ways["ar"]["nodes_per_step"] > 20
    assert all(1 <= way["tokens_per_pass"] <= 5 for way in ways.values())
    assert all(0 < way["floor_share"] < 1 for way in ways.values())


def test_training_is_measured(tests: dict[str, Any]) -> None:
    figures = tests["test_training_steps_are_finite[plain]"]["figures"]
    assert figures["mars / ar"]["time"] > 0
    mars, ar = (figures["variants"][name]["slots_per_step"] for name in ("mars", "ar"))
    assert mars > ar


@pytest.mark.full
def test_the_tests_that_need_a_gpu_are_found(tmp_path: Path) -> None:
    tests = results_of(parts()["tests of serving"], tmp_path)
    skipped = [name for name, facts in tests.items() if facts["state"] == "skipped"]
    assert "test_replayed_graphs_equal_eager_steps_on_a_gpu" in skipped


@pytest.mark.full
def test_all_parts_run_without_ray(tmp_path: Path) -> None:
    status, tests = run_acceptance(tmp_path / "out", "--budget-s=900")
    assert status == 0
    (served,) = [facts for name, facts in tests.items() if "test_two_engines" in name]
    assert len(served["figures"]["engines"]) == 2
    assert {facts["state"] for facts in tests.values()} == {"passed", "skipped"}


BROKEN = """
import os, time

def test_first(record_property): record_property("figure", 1)
def test_fails(record_property):
    record_property("figure", 2)
    raise ValueError("this test is broken")
def test_breaks_the_process(): {end}
def test_last(): ...
"""


@pytest.mark.parametrize(
    ("end", "error"), [("os._exit(9)", "status 9"), ("time.sleep(100)", "time was over")]
)
def test_a_process_that_ends_or_hangs_loses_its_running_test_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, error: str
) -> None:
    monkeypatch.setattr("bench.gpu_acceptance._GRACE_S", 0.0)
    file, results = tmp_path / "test_broken.py", tmp_path / "acceptance.json"
    file.write_text(BROKEN.format(end=end))
    results.write_text('{"tests": {}}')
    part = Part(str(tmp_path), (file.name,), share=1.0)
    run_part("broken", part, time.time() + 6, results, "cpu", tiny=True)
    found = {
        name.partition("::")[2]: facts
        for name, facts in json.loads(results.read_text())["tests"].items()
    }
    states = {name: facts["state"] for name, facts in found.items() if name}
    assert states == {
        "test_first": "passed",
        "test_fails": "failed",
        "test_breaks_the_process": "failed",
        "test_last": "left out",
    }
    assert [found[name]["figures"] for name in ("test_first", "test_fails")] == [
        {"figure": 1},
        {"figure": 2},
    ]
    assert "this test is broken" in found["test_fails"]["error"]
    assert error in found["test_breaks_the_process"]["error"]


def test_a_part_without_time_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--device", "cpu", "--tiny", "--part=checks", "--budget-s=-1", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["gpu_acceptance.py", *options])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert gpu_acceptance.main() == 0
    tests = json.loads((tmp_path / "acceptance.json").read_text())["tests"]
    assert tests["checks"]["state"] == "left out"


def test_what_the_machine_lacks_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_acceptance.problem("cpu") is None
    monkeypatch.setattr(gpu_acceptance, "_CARRIED", ("no_such_module",))
    message = gpu_acceptance.problem("cpu")
    assert message is not None
    assert "missing packages: no_such_module." in message
    assert "sh bench/gpu_wheels.sh" in message
    assert (ROOT / "bench/gpu_wheels.sh").exists()
    assert all(
        (ROOT / part.folder / file).exists() for part in parts().values() for file in part.files
    )
