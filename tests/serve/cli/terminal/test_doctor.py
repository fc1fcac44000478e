"""Checks of ``marsray doctor`` on whole and broken installations, machines and checkpoints."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from mars_platform.cli.main import run
from mars_serve.cli.doctor import import_checks, machine, packages
from mars_serve.cli.doctor.checkpoint_checks import check_checkpoint
from mars_serve.cli.doctor.children import Child
from mars_serve.cli.doctor.finding import Finding, State, guarded


def by_check(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {each.check: each for each in findings}


def failures(findings: Iterable[Finding]) -> dict[str, str]:
    return {
        each.check: f"{each.found}; {each.remedy}"
        for each in findings
        if each.state is State.FAILED
    }


@pytest.fixture
def copied(mars_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(mars_dir, tmp_path / "model")


def test_a_whole_checkpoint_has_no_failure(mars_dir: Path) -> None:
    files = by_check(check_checkpoint(mars_dir))
    assert {each.state for each in files.values()} == {State.OK}
    assert "block size 4" in files["mars.json"].found
    engine = by_check(import_checks.torch_findings(mars_dir))
    assert failures(engine.values()) == {}
    assert engine["attention"].found == "pages are gathered: the device is cpu, not a GPU"
    assert "can be served" in engine["model"].found
    assert "marsray calibrate" in engine["frontier"].remedy


def test_every_broken_file_is_named_with_its_remedy(copied: Path) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    content = json.loads((copied / "mars.json").read_text())
    (copied / "mars.json").write_text(json.dumps({**content, "mask_token_id": 7}))
    (copied / "chat_template.jinja").unlink()
    found = by_check(check_checkpoint(copied))
    wrong = failures(found.values())
    assert set(wrong) == {"weights", "mars.json"}
    assert "model.safetensors" in wrong["weights"]
    assert wrong["weights"].endswith("copy all of its safetensors files")
    assert "mask_token_id is 7" in wrong["mars.json"]
    assert found["chat template"].state is State.WARNING


def test_tensors_that_a_shard_lacks_are_missed(copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"lost.weight": "model-00001-of-00001.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lost.weight" in failures(check_checkpoint(copied))["weights"]


def test_a_missing_config_and_directory_are_failures(copied: Path) -> None:
    (copied / "config.json").unlink()
    assert "config.json" in failures(check_checkpoint(copied))["config"]
    assert set(failures(check_checkpoint(copied / "none"))) == {"checkpoint"}


def test_a_frontier_of_before_is_refused(copied: Path) -> None:
    (copied / "frontier.json").write_text('{"format_version": 1}')
    wrong = failures(import_checks.torch_findings(copied))
    assert set(wrong) == {"frontier"}
    assert "format_version" in wrong["frontier"]
    assert "marsray calibrate" in wrong["frontier"]


def test_a_taken_port_fails_if_it_was_named(free_tcp_port: int) -> None:
    assert failures(machine.check_port(free_tcp_port)) == {}
    with socket.create_server(("127.0.0.1", free_tcp_port)):
        [wrong] = machine.check_port(free_tcp_port)
    assert wrong.state is State.FAILED
    assert f"{free_tcp_port} is taken by process" in wrong.found
    assert "--port" in wrong.remedy


@pytest.fixture
def free_tcp_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_a_temporary_directory_too_long_for_sockets_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("x" * 80)))
    assert "RAY_TMPDIR" in failures(machine.check_temporary_directory())["temporary directory"]
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")  # noqa: S108
    assert failures(machine.check_temporary_directory()) == {}


def test_memory_is_compared_with_the_weights() -> None:
    [much] = machine.check_memory(2**60)
    assert much.state is State.WARNING


def installed(directory: Path, name: str, version: str) -> None:
    """Make a package's metadata, as an installer does."""
    info = directory / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(text)


def test_a_package_outside_its_range_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failures([*packages.check_python(), *packages.check_packages()]) == {}
    installed(tmp_path, "torch", "1.13.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    wrong = failures(packages.check_packages())
    assert set(wrong) == {"package torch"}
    assert "version 1.13.0 is installed, but marsray needs" in wrong["package torch"]
    assert "pip install 'torch" in wrong["package torch"]


def broken(directory: Path, name: str, line: str) -> None:
    """Make a package that does something bad when it is imported."""
    (directory / name).mkdir()
    (directory / name / "__init__.py").write_text(line)


@pytest.fixture
def nothing_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch ends the process that imports it, and Ray is not there."""
    broken(tmp_path, "torch", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    broken(tmp_path, "ray", "raise ModuleNotFoundError('No module named ray')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("nothing_works")
def test_libraries_that_cannot_be_loaded_do_not_keep_the_other_checks_from_running(
    copied: Path, free_tcp_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", str(copied), "--port", str(free_tcp_port), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    checks = {each["check"]: each for each in found["checks"]}
    wrong = {name: each["found"] for name, each in checks.items() if each["state"] == "failed"}
    assert set(wrong) == {"torch", "Ray"}
    assert "SIGILL" in wrong["torch"]
    assert "No module named ray" in wrong["Ray"]
    assert checks["weights"]["state"] == checks["port"]["state"] == "ok"
    assert found["counts"]["failed"] == 2


def test_a_torch_that_raises_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(tmp_path, "torch", "raise OSError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = Child("torch", None)
    try:
        wrong = failures(child.findings())
    finally:
        child.close()
    assert set(wrong) == {"torch"}
    assert "libcudart.so.12" in wrong["torch"]


def test_a_check_that_fails_is_a_finding() -> None:
    def check() -> Iterable[Finding]:
        raise ValueError("no such thing")

    [wrong] = guarded("thing", check)
    assert wrong.state is State.FAILED
    assert "ValueError: no such thing" in wrong.found


def test_an_unreachable_cluster_that_is_named_fails(
    free_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "ray" in sys.modules or __import__("ray")
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_tcp_port}")
    wrong = failures(import_checks.ray_findings(None))
    assert set(wrong) == {"Ray cluster"}
    assert "RAY_ADDRESS" in wrong["Ray cluster"]
