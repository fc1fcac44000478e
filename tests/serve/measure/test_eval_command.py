from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from conversations import read, row, write
from mars_platform.checkpoint.calibration import Calibration, DepthCalibration, write_calibration
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.checkpoint.weights import load_model, save_checkpoint
from mars_platform.cli import main as cli
from mars_platform.data.rendering import render_prompt
from mars_serve.api.text import encode
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.measure.evaluation.decoding import (
    ONE_TOKEN,
    evaluation_engine,
    run_setting,
)

QUESTIONS = {"three": "Answer: 7", "four": "#### 8", "five": "Answer: 1,009", "six": "Answer: 4!"}


@pytest.fixture(scope="module")
def taught_dir(mars_dir: Path) -> Path:
    """A MARS checkpoint that has learnt some answers by heart, in mode ar only."""
    path = mars_dir.with_name("taught")
    checkpoint, model = read_checkpoint(mars_dir), load_model(mars_dir)
    tokenizer = checkpoint.tokenizer
    lessons = [teach(tokenizer, *lesson) for lesson in QUESTIONS.items()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    loss = torch.tensor(1.0)
    for _ in range(100):
        loss = sum(model(input_ids=ids, labels=labels).loss for ids, labels in lessons)  # type: ignore[assignment]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05
    (mark,) = encode(tokenizer, "!", add_special_tokens=False)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, mark]
    save_checkpoint(path, model, tokenizer, checkpoint.metadata)
    return path


def teach(tokenizer: Any, question: str, answer: str) -> tuple[torch.Tensor, torch.Tensor]:
    prompt = render_prompt(tokenizer, [{"role": "user", "content": question}])
    before = encode(tokenizer, prompt, add_special_tokens=False)
    after = encode(tokenizer, f"{answer}<|im_end|>", add_special_tokens=False)
    return torch.tensor([before + after]), torch.tensor([[-100] * len(before) + after])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two rows that the taught model gets right, one that it gets wrong, one without an answer."""
    return write(
        tmp_path / "a.jsonl",
        row("three", answer="7"),
        row("four", answer="9"),
        row("five", "So it is 1009.", answer=1009),
        row("three"),
    )


def evaluate(capsys: Any, *arguments: Any) -> dict[str, Any]:
    assert cli.run(["eval", *map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_command_scores_each_threshold(
    taught_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--threshold", 0.05, "--threshold", 1, "--threshold", 0.9, "--max-tokens", 32]
    found = evaluate(capsys, taught_dir, "--data", data, *options)
    rows = found["rows"]
    assert [(each["mode"], each["threshold"]) for each in rows] == [
        ("ar", 1.0),
        ("threshold", 0.9),
        ("threshold", 0.05),
    ]
    ar, _, hasty = rows
    assert (ar["num_items"], ar["num_checkable"], found["num_unstated"]) == (4, 3, 2)
    assert ar["accuracy"]["value"] == pytest.approx(2 / 3)
    assert (ar["difference"], ar["identical"], ar["cut_off"]) == (None, None, 0.0)
    assert ar["tokens_per_forward"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert hasty["tokens_per_forward"]["value"] > 1.5
    assert hasty["difference"]["value"] == pytest.approx(
        hasty["accuracy"]["value"] - ar["accuracy"]["value"]
    )
    assert all(each["tokens_per_s"] > 0 for each in rows)


def test_mode_exact_is_scored_for_each_outcome_option(
    taught_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--mode", "exact", "--outcomes", "last", "--outcomes", "all", "--max-tokens", 32]
    sampling = ["--temperature", 0.9, "--top-p", 0.8, "--seed", 11]
    found = evaluate(capsys, taught_dir, "--data", data, *options, *sampling)
    assert (found["temperature"], found["top_p"], found["seed"]) == (0.9, 0.8, 11)
    ar, last, every = found["rows"]
    assert [(each["mode"], each["outcomes"]) for each in (ar, last, every)] == [
        ("ar", None),
        ("exact", "last"),
        ("exact", "all"),
    ]
    for exact in (last, every):
        assert (exact["identical"], exact["accuracy"]) == (1.0, ar["accuracy"])
    assert last["positions_per_forward"]["value"] < every["positions_per_forward"]["value"]
    assert ar["positions_per_forward"]["value"] == 1.0


def test_calibrated_confidence_is_compared_with_the_threshold(
    taught_dir: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", data, "--threshold", 0.5, "--max-tokens", 32]
    path = tmp_path / "calibrated"
    shutil.copytree(taught_dir, path)
    assert cli.run(["eval", str(path), *map(str, options), "--calibrated"]) == 2
    assert "calibrated: this model has no calibration.json" in capsys.readouterr().err
    depths = [DepthCalibration(temperature=t, num_fitted=1, num_checked=0) for t in (1, *[50] * 4)]
    weights = weights_fingerprint(path)  # at temperature 50 no deeper token is sure
    write_calibration(path, Calibration(weights=weights, num_items=2, depths=tuple(depths)))
    _, raw = evaluate(capsys, path, *options)["rows"]
    _, corrected = evaluate(capsys, path, *options, "--calibrated")["rows"]
    assert raw["tokens_per_forward"]["value"] > 1.0 == corrected["tokens_per_forward"]["value"]


def test_an_end_token_is_not_part_of_the_answer(taught_dir: Path, tmp_path: Path) -> None:
    items = read(write(tmp_path / "a.jsonl", row("six", answer="4")), model=taught_dir)
    engine = evaluation_engine(read_checkpoint(taught_dir), items, max_tokens=32, max_num_seqs=1)
    (outcome,) = run_setting(engine, items, ONE_TOKEN, max_tokens=32)
    assert engine.checkpoint.tokenizer.decode(outcome.tokens) == "Answer: 4!"
    assert (outcome.finish_reason, outcome.correct) == (FinishReason.STOP, True)


def test_the_table_is_printed_with_its_notes(
    taught_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data", str(data), "--threshold", "0.9", "--max-tokens", "32"]
    assert cli.run(["eval", str(taught_dir), *arguments]) == 0
    output = capsys.readouterr()
    printed = " ".join(output.out.split())
    for title in ("mode", "τ", "accuracy", "difference", "tok/fwd", "identical", "cut off"):
        assert title in printed
    assert "│ ar │ 1 │ 66.7% [20.8, 93.9] │ │ 1.00 [1.00, 1.00] │" in printed
    assert "4 conversations, at most 32 output tokens" in printed
    assert "3 conversations with an answer" in printed
    assert "2 of these do not state their answer" in printed
    assert "threshold 0.9: 4/4" in output.err


def test_data_without_answers_has_no_accuracy(
    mars_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.jsonl", row("a"), row("b"))
    arguments = ["--data", str(file), "--threshold", "0.05", "--max-tokens", "32"]
    assert cli.run(["eval", str(mars_dir), *arguments]) == 0
    printed = capsys.readouterr().out
    assert "No row has an answer" in printed
    assert "accuracy " not in printed.splitlines()[1]
    assert "identical" in printed


def test_a_plain_checkpoint_is_scored_in_mode_ar(
    plain_dir: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write(tmp_path / "b.jsonl", row("another"))
    for extra in ([], ["--threshold", 1], ["--mode", "ar"]):
        options = ["--data", data, "--data", other, "--max-tokens", 3, *extra]
        found = evaluate(capsys, plain_dir, *options, "--dtype", "bfloat16")
        assert [(each["mode"], each["num_items"]) for each in found["rows"]] == [("ar", 5)]
        assert (found["device"], found["dtype"]) == ("cpu", "bfloat16")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--threshold", "0"], "--threshold: 0.0 is not in (0, 1]"),
        (["--threshold", "0.9", "--threshold", "1.5"], "--threshold: 1.5 is not in (0, 1]"),
        (["--threshold", "nan"], "--threshold: nan is not in (0, 1]"),
        (["--threshold", "0.5", "--mode", "ar"], "--threshold: mode ar knows no threshold"),
        (["--threshold", "0.5", "--mode", "exact"], "--threshold: mode exact knows no threshold"),
        (["--calibrated", "--mode", "exact"], "--calibrated: only mode threshold"),
        (["--outcomes", "all"], "--outcomes: only mode exact has outcomes"),
        (["--outcomes", "first", "--mode", "exact"], "--outcomes"),
        (["--temperature", "2.5"], "'--temperature': Input should be less than or equal to 2"),
        (["--temperature", "nan"], "'--temperature': Input should be"),
        (["--top-p", "0"], "top_p: Input should be greater than 0"),
        (["--seed", "-1"], "--seed"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--max-items", "0"], "--max-items"),
        (["--batch", "0"], "--batch"),
        (["--device", "tpu"], "--device"),
        pytest.param(
            ["--device", "cuda"],
            "--device: there is no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
        (["--dtype", "int8"], "--dtype"),
        (["--data", "nothing.jsonl"], "data: nothing.jsonl cannot be read"),
    ],
)
def test_a_bad_option_is_refused_in_one_line(
    mars_dir: Path,
    data: Path,
    arguments: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = cli.run(["eval", str(mars_dir), "--data", str(data), *arguments])
    output = capsys.readouterr()
    assert status == 2
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert named in output.err
    assert len(output.err.splitlines()) == 1


@pytest.mark.parametrize("extra", [["--threshold", "0.9"], ["--mode", "threshold"]])
def test_a_plain_checkpoint_takes_no_threshold(
    plain_dir: Path, data: Path, extra: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["eval", str(plain_dir), "--data", str(data), *extra]) == 2
    message = capsys.readouterr().err
    assert "plain AR checkpoint without mars.json and decodes in modes ar and exact" in message
