"""Checks of ``marsray doctor`` on whole and broken installations, machines and checkpoints."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from decoding.families import build_family
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.weights import save_checkpoint
from mars_platform.cli.main import run
from mars_serve.cli.doctor import libraries, machine
from mars_serve.cli.doctor.command import findings_of_child
from mars_serve.cli.doctor.finding import Finding, guarded
from mars_serve.engine.attention.interface import LayerGroup


def by_check(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {each.check: each for each in findings}


def failures(findings: Iterable[Finding]) -> dict[str, str]:
    return {
        each.check: f"{each.found}; {each.remedy}" for each in findings if each.state == "failed"
    }


@pytest.fixture
def copied(mars_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(mars_dir, tmp_path / "model")


def test_a_whole_checkpoint_can_be_served(mars_dir: Path) -> None:
    found = by_check(libraries.torch_findings(mars_dir))
    assert failures(found.values()) == {}
    assert "weights in float32, block size 4" in found["checkpoint"].found
    assert found["layers"].found == "2 full: 4 heads over 2 of 8 numbers"
    assert found["cache"].found == "0.2 KiB a token in float32"
    assert found["works"].found.startswith("served in modes ar, exact and threshold, ")
    assert found["works"].found.endswith(
        "by an adapter of down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )
    assert found["served"].found.endswith("; functions of C++ read the KV cache in place")
    assert "marsray calibrate" in found["frontier"].remedy
    assert "chat template" not in found


def test_a_compiler_that_fails_is_told_of_whatever_gathers_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "false")
    latents = LayerGroup(1, heads=8, kv_heads=1, key_dim=48, value_dim=32, value_in_key=True)
    served = libraries._path_served("float32", [latents])
    assert "values are parts of the keys" in served.found
    assert "could not be compiled: Command '['false'" in served.found
    assert "let CXX name one that works" in served.remedy


@pytest.mark.parametrize(
    ("family", "layers", "cache"),
    [
        (
            "gemma4_text",
            "2 with a window of 8: 4 heads over 2 of 8 numbers, the keys of others in 1; "
            "2 full: 4 heads over 2 of 16 numbers, the keys of others in 1",
            "0.4 KiB a token in float32 (0.1 with a window of 8, 0.2 full)",
        ),
        (
            "mimo_v2_flash",
            "1 full: 4 heads over 2 of 8 and 6 numbers; "
            "1 with a window of 8: 4 heads over 4 of 8 and 6 numbers, sinks",
            "0.4 KiB a token in float32 (0.1 full, 0.2 with a window of 8)",
        ),
        (
            "llama4_text",
            "1 within chunks of 8: 4 heads over 2 of 8 numbers; "
            "1 full: 4 heads over 2 of 8 numbers, queries scaled by their positions",
            "0.2 KiB a token in float32 (0.1 within chunks of 8, 0.1 full)",
        ),
    ],
)
def test_kinds_of_layers_and_their_cache_are_told(
    family: str, layers: str, cache: str, plain_dir: Path, tmp_path: Path
) -> None:
    tokenizer = read_checkpoint(plain_dir).tokenizer
    save_checkpoint(tmp_path, build_family(family, vocab_size=320), tokenizer, None)
    found = by_check(libraries.torch_findings(tmp_path))
    assert (found["layers"].found, found["cache"].found) == (layers, cache)
    assert found["works"].found.startswith("served in mode ar, ")  # plain models refuse others
    first = found["layers"].facts["kinds"][0]
    assert layers.startswith(f"{len(first['layers'])} {first['reach']}: {first['sizes']}")


def test_what_states_of_recurrent_layers_take_is_told(plain_dir: Path, tmp_path: Path) -> None:
    tokenizer, model = read_checkpoint(plain_dir).tokenizer, build_family("lfm2", vocab_size=320)
    save_checkpoint(tmp_path, model, tokenizer, None)
    found = by_check(libraries.torch_findings(tmp_path))
    told = "0 layers with states and 2 with convolutions take 0.00 MiB a slot, 0.00 GiB with"
    assert found["states"].found.startswith(told)
    assert found["layers"].found.startswith("1 full: ")


def test_a_family_that_is_refused_is_named(plain_dir: Path, tmp_path: Path) -> None:
    tokenizer = read_checkpoint(plain_dir).tokenizer
    model = build_family("diffllama", vocab_size=320)
    save_checkpoint(tmp_path, model, tokenizer, None)
    [wrong] = failures(libraries.torch_findings(tmp_path)).values()
    assert "'diffllama', and it attends more than once a pass in layers 0, 1; take one" in wrong


def cut_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def move_mask(model: Path) -> None:
    content = json.loads((model / "mars.json").read_text())
    (model / "mars.json").write_text(json.dumps({**content, "mask_token_id": 7}))


def lose_a_tensor(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["extra.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, model / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (cut_weights, r"^model: [^(]*\(model.safetensors: .*\); copy all of its .* files$"),
        (move_mask, "mask_token_id is 7"),
        (lose_a_tensor, r"1 tensors are missing \(model.norm.weight\); copy all"),
        (lambda model: (model / "config.json").unlink(), "config.json"),
    ],
)
def test_a_broken_file_is_named_with_its_remedy(
    copied: Path, damage: Callable[[Path], None], named: str
) -> None:
    damage(copied)
    wrong = failures(libraries.torch_findings(copied))
    assert set(wrong) == {"checkpoint"}
    assert re.search(named, wrong["checkpoint"])


def test_a_missing_chat_template_is_a_warning(copied: Path) -> None:
    (copied / "chat_template.jinja").unlink()
    found = by_check(libraries.torch_findings(copied))
    assert failures(found.values()) == {}
    assert found["chat template"].state == "warning"


def test_a_frontier_of_before_is_refused(copied: Path) -> None:
    (copied / "frontier.json").write_text('{"format_version": 1}')
    wrong = failures(libraries.torch_findings(copied))
    assert set(wrong) == {"frontier"}
    assert "format_version" in wrong["frontier"]
    assert "marsray calibrate" in wrong["frontier"]


def test_a_taken_port_fails_if_it_was_named(free_tcp_port: int) -> None:
    assert failures(machine.check_port(free_tcp_port)) == {}
    with socket.create_server(("127.0.0.1", free_tcp_port)):
        [wrong] = machine.check_port(free_tcp_port)
    assert wrong.state == "failed"
    assert f"{free_tcp_port} is taken" in wrong.found
    assert "--port" in wrong.remedy


@pytest.fixture
def free_tcp_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_memory_is_compared_with_the_weights() -> None:
    [much] = machine.check_memory(2**60)
    assert much.state == "warning"


def installed(directory: Path, name: str, version: str) -> None:
    """Make a package's metadata, as an installer does."""
    info = directory / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(text)


def test_a_package_outside_its_range_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failures(machine.check_versions()) == {}
    installed(tmp_path, "torch", "1.13.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    wrong = failures(machine.check_versions())
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
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.usefixtures("nothing_works")
def test_libraries_that_cannot_be_loaded_do_not_keep_the_other_checks_from_running(
    copied: Path, free_tcp_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", str(copied), "--port", str(free_tcp_port), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    checks = {each["check"]: each for each in found["checks"]}
    wrong = {name: each["found"] for name, each in checks.items() if each["state"] == "failed"}
    assert set(wrong) == {"torch", "Ray"}
    assert f"ended with status -{signal.SIGILL:d}" in wrong["torch"]
    assert "No module named ray" in wrong["Ray"]
    assert checks["packages"]["state"] == checks["port"]["state"] == "ok"
    assert found["counts"]["failed"] == 2


def test_a_check_that_fails_is_a_finding() -> None:
    def check() -> Iterable[Finding]:
        raise ValueError("no such thing")

    [wrong] = guarded("thing", check, "mend it")
    assert wrong.state == "failed"
    assert "ValueError: no such thing" in wrong.found


def test_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    [found] = findings_of_child("Ray", None, None)
    assert found.state == "ok", found
    assert "a cluster starts within" in found.found


def test_an_unreachable_cluster_that_is_named_fails(
    free_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_tcp_port}")
    assert "nothing answers; unset it" in failures(libraries.ray_findings())["Ray"]
