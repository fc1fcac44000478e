"""The commands with an adapter: what they decode, and how they refuse one that does not fit."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from safetensors.torch import load_file, save_file

from conversations import row, write
from decoding.adapters import write_adapter
from frontiers import AR, frontier_of
from mars_autoscale.model.frontier import FRONTIER_FILE, read_frontier, write_frontier
from mars_platform.checkpoint.adapted import load_weights, read_model
from mars_platform.checkpoint.calibration import CALIBRATION_FILE
from mars_platform.checkpoint.examples import EXAMPLES_FILE
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.checkpoint.weights import load_model
from mars_platform.cli.main import run
from mars_platform.method import reference
from mars_serve.api.text import decode, encode
from mars_serve.cli.doctor.libraries import torch_findings
from mars_serve.cli.options import ServeOptions
from mars_serve.cli.serve_settings import serve_settings
from mars_serve.config.settings import ServeSettings
from rest.rest_requests import PROMPT

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def copied(adapter_dir: Path, tmp_path: Path) -> Path:
    """The adapter, in a directory that the test may write into."""
    return shutil.copytree(adapter_dir, tmp_path / "adapter")


@pytest.fixture(scope="module")
def other_dir(plain_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model like the adapter's own, with other weights."""
    path = shutil.copytree(plain_dir, tmp_path_factory.mktemp("other") / "model")
    weights = load_file(path / "model.safetensors")
    changed_weights = {name: weight * 1.01 for name, weight in weights.items()}
    save_file(changed_weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    return write(tmp_path / "sums.jsonl", *(row(f"What is {n} plus 2?", "7") for n in range(6)))


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that is in use, so that a server would not start even if all else were right."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def changed(path: Path, name: str, **values: Any) -> None:
    content = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps({**content, **values}))


def refused(capsys: Capture, *arguments: Any) -> str:
    """Return the one line with which a command refuses, before Ray or anything else is started."""
    assert run([str(each) for each in arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert not ray.is_initialized()
    return line.removeprefix("error: ")


# --- which model an adapter belongs to


def settings_of(*, models: list[str], adapters: list[str]) -> ServeSettings:
    return serve_settings(ServeOptions(models=tuple(models), adapters=tuple(adapters)))


def test_an_adapter_goes_to_the_only_model_or_to_the_one_that_it_names() -> None:
    (only,) = settings_of(models=["m=some/base"], adapters=["some/adapter"]).models
    assert (only.path, only.adapter) == ("some/base", "some/adapter")
    alone, fast = settings_of(models=["m=base", "fast=base"], adapters=["fast=some/a"]).models
    assert (alone.adapter, fast.adapter) == (None, "some/a")


@pytest.mark.parametrize(
    ("adapters", "problem"),
    [
        (["some/a"], "--adapter: some/a belongs to one model of 2; give it as NAME=DIR"),
        (["x=some/a"], "--adapter: there is no model 'x'; the models are a, b"),
        (["a=p", "a=q"], "--adapter: model 'a' gets several; a model has one adapter"),
    ],
)
def test_an_adapter_of_no_certain_model_is_refused(
    capsys: Capture, adapters: list[str], problem: str
) -> None:
    options = [part for name in adapters for part in ("--adapter", name)]
    assert refused(capsys, "serve", "--model", "a=x", "--model", "b=y", *options) == problem


# --- bad adapters


def other_rank(path: Path) -> None:
    changed(path, "adapter_config.json", r=8)


def without_metadata(path: Path) -> None:
    (path / "mars.json").unlink()


def cut_short(path: Path) -> None:
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])


BAD: dict[Callable[[Path], None], str] = {
    other_rank: "has the shape",
    without_metadata: "its weights are not for masks",
    cut_short: "cannot be read",
}


@pytest.mark.parametrize("spoil", BAD, ids=lambda function: function.__name__)
def test_the_server_refuses_a_bad_adapter_before_it_starts(
    plain_dir: Path, copied: Path, taken: int, capsys: Capture, spoil: Callable[[Path], None]
) -> None:
    spoil(copied)
    options = ["--model", f"m={plain_dir}", "--port", taken]
    line = refused(capsys, "serve", *options, "--adapter", copied)
    assert BAD[spoil] in line
    assert str(copied) in line
    assert "; " in line  # the remedy


@pytest.mark.parametrize(
    "command", ["serve", "generate", "chat", "eval", "calibrate", "bench decode"]
)
def test_every_command_refuses_an_adapter_of_another_model(
    other_dir: Path, copied: Path, sums: Path, taken: int, capsys: Capture, command: str
) -> None:
    options = {
        "serve": ["--model", f"m={other_dir}", "--port", taken],
        "generate": [other_dir, "--prompt", "What?"],
        "eval": [other_dir, "--data", sums],
        "calibrate": [other_dir, "--data", sums],
    }.get(command, [other_dir])
    before = sorted(copied.iterdir())
    line = refused(capsys, *command.split(), *options, "--adapter", copied)
    assert line.startswith(f"adapter: {copied} belongs to another model than {other_dir}")
    assert "; give the model that it was trained on, " in line
    assert sorted(copied.iterdir()) == before


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_an_adapter_in_place_of_a_model_is_refused_with_the_option(
    adapter_dir: Path, capsys: Capture, command: str
) -> None:
    options = ["--model", adapter_dir] if command == "serve" else [adapter_dir, "--prompt", "x"]
    line = refused(capsys, command, *options)
    assert line == (
        f"model: {adapter_dir / 'adapter_config.json'} makes this an adapter of another model, not "
        "a model; give its model here, and the adapter beside it: --adapter, or adapter in a file"
    )


def test_options_without_a_model_for_the_adapter_are_refused(
    adapter_dir: Path, capsys: Capture
) -> None:
    adapter = ["--adapter", adapter_dir]
    assert "the server has chosen" in refused(capsys, "chat", "http://127.0.0.1:9", *adapter)
    assert "give the checkpoint" in refused(capsys, "doctor", *adapter)
    line = refused(capsys, "bench", "decode", "--untrained", "qwen2-100m", *adapter)
    assert line == "--adapter: untrained weights have none; name a checkpoint"


# --- outputs and files


def generated(capsys: Capture, *arguments: Any) -> dict[str, Any]:
    options = ["--prompt", PROMPT, "--max-tokens", "20", "--raw", "--json"]
    assert run(["generate", *map(str, arguments), *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_generate_gives_the_base_models_text_in_modes_ar_and_exact(
    plain_dir: Path, adapter_dir: Path, capsys: Capture
) -> None:
    alone = generated(capsys, plain_dir, "--mode", "ar")
    options = [plain_dir, "--adapter", adapter_dir]
    for mode in ("ar", "exact"):
        assert generated(capsys, *options, "--mode", mode)["text"] == alone["text"]
    checkpoint = read_model(plain_dir, adapter_dir)
    assert checkpoint.metadata is not None
    expected = reference.decode(
        load_weights(checkpoint, dtype=load_model(plain_dir).dtype),
        encode(checkpoint.tokenizer, PROMPT, add_special_tokens=True),
        checkpoint.special,
        max_tokens=20,
        threshold=0.05,
        num_masks=4,
        mask_token_id=checkpoint.metadata.mask_token_id,
    )
    found = generated(capsys, *options, "--threshold", "0.05")
    assert found["text"] == decode(checkpoint.tokenizer, expected.tokens)
    assert len(found["passes"]) == len(expected.passes) < 20


def test_what_is_measured_lies_with_the_adapter_and_belongs_to_it_alone(
    plain_dir: Path, copied: Path, sums: Path, tmp_path: Path, capsys: Capture
) -> None:
    before = sorted(plain_dir.iterdir())
    options = ["--data", str(sums), "--max-tokens", "8", "--batch", "2", "--quick"]
    command = ["calibrate", str(plain_dir), "--adapter", str(copied), *options]
    assert run([*command, "--threshold", "0.05"]) == 0
    assert sorted(plain_dir.iterdir()) == before
    measured = [CALIBRATION_FILE, FRONTIER_FILE, EXAMPLES_FILE]
    assert all((copied / name).is_file() for name in measured)
    assert read_model(plain_dir, copied).calibration is not None
    assert [point.mode for point in read_frontier(copied).points] == ["ar", "threshold", "exact"]
    assert run(["eval", str(plain_dir), "--adapter", str(copied), *options[:4], "--json"]) == 0
    capsys.readouterr()

    other = write_adapter(plain_dir, tmp_path / "other", seed=2)
    shutil.copy(copied / CALIBRATION_FILE, other)
    line = refused(capsys, "generate", plain_dir, "--adapter", other, "--prompt", "x")
    assert f"{other / CALIBRATION_FILE}: weights: it was made for another model's" in line

    link = tmp_path / "current"
    assert run(["promote", str(copied), "--service", str(link)]) == 0
    assert read_model(plain_dir, link).calibration is not None


def test_doctor_looks_over_the_adapter(
    plain_dir: Path, other_dir: Path, adapter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {each.check: each for each in torch_findings(plain_dir, adapter_dir)}
    assert found["adapter"].found == "rank 4, block size 4"
    assert found["adapter"].state == found["checkpoint"].state == "ok"
    checks = {each.check: each for each in torch_findings(other_dir, adapter_dir)}
    assert [name for name, each in checks.items() if each.state == "failed"] == ["adapter"]
    assert "belongs to another model" in checks["adapter"].found
    assert f"--adapter {adapter_dir} --data FILE" in checks["frontier"].remedy
    asked = list[list[str]]()

    def note(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        asked.append(command[-3:])
        return subprocess.CompletedProcess(command, 0, b"", b"")

    monkeypatch.setattr(subprocess, "run", note)  # each process would take seconds
    run(["doctor", str(other_dir), "--adapter", str(adapter_dir)])
    paths = [str(other_dir), str(adapter_dir)]
    assert sorted(asked) == [["Ray", *paths], ["torch", *paths]]


def test_a_link_to_a_model_is_never_turned_to_an_adapter(
    mars_dir: Path, copied: Path, tmp_path: Path, capsys: Capture
) -> None:
    link = tmp_path / "current"
    link.symlink_to(mars_dir)
    write_frontier(copied, frontier_of(AR, weights=weights_fingerprint(copied), seconds=0.01))
    line = refused(capsys, "promote", copied, "--service", link, "--force")
    assert line == (
        f"{copied} is an adapter, and {link} leads to a whole model, which servers load in another "
        "way; name a link of its own"
    )
    assert link.resolve() == mars_dir
