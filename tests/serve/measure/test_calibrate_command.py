from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mars_autoscale.model.frontier import FRONTIER_FILE, read_frontier
from mars_platform.checkpoint.calibration import CALIBRATION_FILE
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.examples import EXAMPLES_FILE, read_examples
from mars_platform.cli import main as cli
from mars_serve.measure.frontier.working_file import WORKING_FILE
from mars_serve.measure.options import CalibrateOptions


def run(*arguments: Any) -> int:
    return cli.run(["calibrate", *map(str, arguments)])


def test_quick_limits_only_what_is_not_given() -> None:
    quick = CalibrateOptions(model="m", data=(), quick=True)
    assert (quick.num_rows, quick.below_one) == (100, (0.95, 0.9, 0.8, 0.7))
    full = CalibrateOptions(model="m", data=())
    assert (full.num_rows, full.below_one) == (None, (0.95, 0.9, 0.8, 0.7, 0.6, 0.5))
    assert quick.repeats < full.repeats
    given = quick.model_copy(update={"max_items": 7, "thresholds": (0.8, 1.0, 0.8)})
    assert (given.num_rows, given.below_one) == (7, (0.8,))


def test_a_stopped_run_is_continued_and_writes_both_files_and_the_plot(
    model_dir: Path, sums: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibration_file, frontier_file = model_dir / CALIBRATION_FILE, model_dir / FRONTIER_FILE
    options = ["--data", sums, "--max-tokens", 10, "--batch", 2, "--quick"]
    options += ["--threshold", 0.5, "--threshold", 0.05, "--threshold", 1]
    frontier_file.mkdir()
    assert run(model_dir, *options) == 2
    error = capsys.readouterr().err
    assert "decode: 12/12" in error
    assert "calibrate: " in error
    assert error.splitlines()[-1].startswith("error: model: frontier.json cannot be written")
    assert (model_dir / WORKING_FILE).exists()

    frontier_file.rmdir()
    for file in (calibration_file, frontier_file):
        file.write_text("{")  # files that are replaced need not be readable
    assert cli.run(["generate", str(model_dir), "--prompt", "What?"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {calibration_file}: ")
    assert "marsray calibrate" in error

    plot = tmp_path / "plot.svg"
    assert run(model_dir, *options, "--json", "--plot", plot) == 0
    output = capsys.readouterr()
    names = ["τ 0.5", "τ 0.05", "mode exact"]
    runs = ", ".join(f"{name}, {name}, 1 mask, {name}, 2 masks" for name in names)
    parts = f"calibration, step times, mode ar, {runs}"
    assert output.err == f"{model_dir / WORKING_FILE}: not measured again: {parts}\n"
    assert not (model_dir / WORKING_FILE).exists()
    assert "<svg" in plot.read_text()

    printed = json.loads(output.out)
    content = json.loads(calibration_file.read_text())
    assert printed.items() >= content.items()
    assert (printed["file"], printed["device"]) == (str(calibration_file), "cpu")
    calibration = read_checkpoint(model_dir).calibration
    assert calibration is not None
    assert calibration.model_dump(mode="json") == content
    assert len(calibration.temperatures) == 5

    examples = [example.messages[-1].content for example in read_examples(model_dir)]
    first = [json.loads(line) for line in sums.read_text().splitlines()]
    assert examples == [row["messages"][-2]["content"] for row in first][:8]

    frontier = read_frontier(model_dir)
    content = frontier.model_dump(mode="json", exclude_none=True)
    assert printed["frontier"].items() >= content.items()
    assert [point.threshold for point in frontier.points] == [1, 0.5, 0.05, 1]
    assert printed["frontier"]["num_slots"] == 2


def test_the_tables_are_printed_and_the_calibration_does_not_depend_on_the_batch(
    gpt_oss_dir: Path, tmp_path: Path, sums: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_dir = shutil.copytree(gpt_oss_dir, tmp_path / "gpt_oss")
    file = model_dir / CALIBRATION_FILE
    options = ["--data", sums, "--max-tokens", 12, "--max-items", 9, "--max-cursors", 60]
    options += ["--threshold", 0.1, "--quick"]
    (model_dir / EXAMPLES_FILE).unlink(missing_ok=True)
    assert run(model_dir, *options, "--no-examples") == 0
    assert not (model_dir / EXAMPLES_FILE).exists()
    printed = " ".join(capsys.readouterr().out.split())
    for title in ("depth", "fitted on", "checked on", "right", "temperature", "ECE", "Brier"):
        assert title in printed
    assert "│ 0 │ 30 │ 30 │ 100.0% │ 1.000 │" in printed
    assert "9 conversations, at most 12 output tokens, 60 cursors; float32 on cpu" in printed
    assert f"Written to {file} " in printed
    for title in ("likelihood, %", "points lost", "differ", "break-even", "ladder"):
        assert title in printed
    assert "│ τ 0.1 │ " in printed
    assert "│ mode ar │ 100.0 │ │ │ 1.00 │ 1.00 │" in printed
    assert "No row has an answer" in printed
    assert re.search(r"upper end of a τ's interval, which is up to \d+\.\d points above", printed)
    assert printed.endswith(f"Written to {model_dir / FRONTIER_FILE}")
    before = file.read_bytes()
    assert run(model_dir, *options, "--batch", 2) == 0
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-items", "1"], "data: all conversations fall into one of the two halves"),
        (["--max-cursors", "1"], "--max-cursors"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--device", "tpu"], "--device"),
        (["--plot", "picture.txt"], "--plot: picture.txt names no format of pictures"),
        (["--plot", "nowhere/picture.png"], "--plot: there is no directory nowhere"),
        (["--data", "nothing.jsonl"], "data: nothing.jsonl cannot be read"),
        (["--threshold", "0"], "--threshold: 0.0 is not in (0, 1]"),
        (["--threshold", "nan"], "--threshold: nan is not in (0, 1]"),
    ],
)
def test_a_bad_option_is_refused_in_one_line(
    model_dir: Path,
    sums: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(model_dir, "--data", sums, *arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert message in output.err
    assert len(output.err.splitlines()) == 1
    assert not (model_dir / CALIBRATION_FILE).exists()


def test_a_plain_checkpoint_is_refused_and_has_no_calibration(
    plain_dir: Path, tmp_path: Path, sums: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shutil.copytree(plain_dir, tmp_path / "plain")
    (path / CALIBRATION_FILE).write_text("somebody else's")
    assert run(path, "--data", sums) == 2
    assert "is a plain AR checkpoint without mars.json" in capsys.readouterr().err
    assert read_checkpoint(path).calibration is None
