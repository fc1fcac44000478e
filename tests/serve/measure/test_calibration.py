from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mars_platform.checkpoint.calibration import (
    CALIBRATION_FILE,
    calibrate_depth,
    log_probability_curves,
)
from mars_platform.checkpoint.directory import (
    Checkpoint,
    MarsMetadata,
    SpecialTokens,
    load_model,
    read_checkpoint,
)
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.cli import main as cli
from mars_platform.errors import UserError
from mars_platform.method import reference
from mars_serve.measure.calibration import collect as collection
from mars_serve.measure.calibration.collect import (
    Continuation,
    Observations,
    check_halves,
    choose_cursors,
    is_fitted,
    measure_calibration,
    observe,
)
from mars_serve.measure.evaluation.items import EvalItem, read_items

BLOCK_SIZE, MASK = 4, 3
SPECIAL = SpecialTokens(eos=frozenset({1}), never_emitted=frozenset({0, MASK}))
PROMPT = tuple(range(5, 16))
MAX_TOKENS = 12

Models = Callable[[str], PreTrainedModel]


def described(model: PreTrainedModel) -> Checkpoint:
    metadata = MarsMetadata(block_size=BLOCK_SIZE, mask_token_id=MASK)
    return Checkpoint(Path(), model.config, None, metadata, SPECIAL)


@torch.inference_mode()
def directly(
    model: PreTrainedModel, checkpoint: Checkpoint, text: Continuation, cursors: list[int]
) -> Observations:
    """The same from whole passes over the tokens before each cursor and all of the masks."""
    depths, curves, correct = [], [], []
    banned = torch.tensor(sorted(checkpoint.special.never_emitted))
    masks = [checkpoint.metadata.mask_token_id] * checkpoint.metadata.block_size
    for cursor in cursors:
        before = [*text.prompt, *text.output[:cursor]]
        logits = model(input_ids=torch.tensor([before + masks])).logits[0, len(before) - 1 :]
        proposed = logits.index_fill(-1, banned, -torch.inf).argmax(-1)
        there = torch.tensor(text.output[cursor : cursor + len(masks) + 1])
        depths.append(torch.arange(len(there)))
        curves.append(log_probability_curves(logits, proposed)[: len(there)])
        correct.append(proposed[: len(there)] == there)
    return Observations(torch.cat(depths), torch.cat(curves), torch.cat(correct))


def together(parts: list[Observations]) -> Observations:
    columns = ([getattr(part, name) for part in parts] for name in ("depth", "curves", "correct"))
    return Observations(*map(torch.cat, columns))


def assert_same(ours: Observations, theirs: Observations) -> None:
    assert ours.depth.equal(theirs.depth)
    assert ours.correct.equal(theirs.correct)
    torch.testing.assert_close(ours.curves, theirs.curves, rtol=1e-4, atol=1e-4)


# Observing


def guessed(model: PreTrainedModel, num_tokens: int) -> Continuation:
    """An output in which masks are often right: now and then four of their guesses are taken."""
    output: list[int] = []
    while len(output) < num_tokens:
        threshold = 1e-9 if len(output) % 3 else 1.0
        decoded = reference.decode(
            model,
            [*PROMPT, *output],
            replace(SPECIAL, eos=frozenset()),
            max_tokens=BLOCK_SIZE + 1,
            threshold=threshold,
            num_masks=BLOCK_SIZE,
            mask_token_id=MASK,
        )
        output += decoded.tokens
    return Continuation(PROMPT, tuple(output[:num_tokens]))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_one_pass_observes_what_a_pass_at_each_cursor_does(tiny_model: Models, family: str) -> None:
    model = tiny_model(family)
    checkpoint, text = described(model), guessed(model, 30)
    for cursors in (list(range(30)), [29], [0, 3, 4, 17, 26]):
        (ours,) = observe(model, checkpoint, text, cursors)
        assert_same(ours, directly(model, checkpoint, text, cursors))
    every = directly(model, checkpoint, text, list(range(30)))
    for depth in range(1, BLOCK_SIZE + 1):
        correct = every.at(depth).correct
        assert len(correct) == 30 - depth
        assert 0 < correct.sum() < len(correct)


def test_many_cursors_take_several_passes(
    tiny_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen2")
    checkpoint, text = described(model), guessed(model, 30)
    (whole,) = observe(model, checkpoint, text, range(30))
    monkeypatch.setattr(collection, "_MAX_MASKS", 7 * BLOCK_SIZE)
    monkeypatch.setattr(collection, "_MAX_LOGITS", 10 * model.config.vocab_size)
    parts = observe(model, checkpoint, text, range(30))
    assert [int((part.depth == 0).sum()) for part in parts] == [7, 7, 7, 7, 2]
    assert_same(together(parts), whole)
    assert observe(model, checkpoint, text, []) == []


def test_hidden_tokens_are_never_proposed(tiny_model: Models) -> None:
    model = tiny_model("qwen2")
    checkpoint, text = described(model), guessed(model, 30)
    (free,) = observe(model, checkpoint, text, range(30))
    banned = SpecialTokens(SPECIAL.eos, SPECIAL.never_emitted | {text.output[0]})
    (ours,) = observe(model, replace(checkpoint, special=banned), text, range(30))
    hit = torch.tensor(text.output) == text.output[0]
    assert free.at(0).correct[hit].any()
    assert not ours.at(0).correct[hit].any()


# Halves and cursors

TEXTS = [Continuation((n, n + 1), tuple(range(5 + n % 4))) for n in range(40)]


def test_copies_of_a_prompt_are_in_one_half() -> None:
    halves = [is_fitted(text.prompt) for text in TEXTS]
    assert halves == [is_fitted(tuple(text.prompt)) for text in TEXTS]
    assert 10 < sum(halves) < 30


@pytest.mark.parametrize("num_items", [0, 1, 3])
def test_items_of_one_half_are_refused(num_items: int) -> None:
    items = [EvalItem(str(n), (1, 2), None, False) for n in range(num_items)]
    with pytest.raises(UserError, match=r"^data: all conversations fall into one"):
        check_halves(items)


def test_few_places_are_all_chosen() -> None:
    assert choose_cursors(TEXTS, 10000) == [list(range(len(text.output))) for text in TEXTS]


@pytest.mark.parametrize("max_cursors", [2, 3, 100])
def test_each_half_gets_its_share_of_cursors(max_cursors: int) -> None:
    chosen = choose_cursors(TEXTS, max_cursors)
    assert chosen == choose_cursors(TEXTS, max_cursors)
    for half in (True, False):
        ours = [
            places
            for text, places in zip(TEXTS, chosen, strict=True)
            if is_fitted(text.prompt) is half
        ]
        assert sum(map(len, ours)) == max_cursors // 2
    for text, places in zip(TEXTS, chosen, strict=True):
        assert places == sorted(set(places))
        assert all(place < len(text.output) for place in places)
    if max_cursors == 100:  # no pattern of places
        assert {place for places in chosen for place in places} == set(range(8))


# The whole


@pytest.fixture
def data(tmp_path: Path) -> Path:
    questions = [f"What is {n} plus {n * n}?" for n in range(12)]
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "7"}]}
        for text in questions
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture
def model_dir(mars_dir: Path, tmp_path: Path) -> Path:
    """A checkpoint of its own, for its file."""
    return shutil.copytree(mars_dir, tmp_path / "model")


def test_measuring_equals_a_slow_direct_computation(model_dir: Path, data: Path) -> None:
    checkpoint, model = read_checkpoint(model_dir), load_model(model_dir)
    items = read_items([data], checkpoint.tokenizer, max_length=checkpoint.max_length)
    halves: dict[bool, list[Observations]] = {True: [], False: []}
    for item in items:
        decoded = reference.decode(model, item.prompt, checkpoint.special, max_tokens=MAX_TOKENS)
        text = Continuation(item.prompt, tuple(decoded.tokens))
        every = list(range(len(text.output)))
        halves[is_fitted(item.prompt)].append(directly(model, checkpoint, text, every))
    fitting, checking = together(halves[True]), together(halves[False])
    seen: list[tuple[str, int, int]] = []
    measured = measure_calibration(
        checkpoint,
        items,
        max_tokens=MAX_TOKENS,
        max_cursors=10000,
        max_num_seqs=5,
        dtype=torch.float32,
        device="cpu",
        on_progress=lambda *progress: seen.append(progress),
    )
    assert measured.num_cursors == len(fitting.at(0).correct) + len(checking.at(0).correct)
    assert measured.calibration.weights == weights_fingerprint(model_dir)
    assert measured.calibration.num_items == len(items)
    for depth, found in enumerate(measured.calibration.depths):
        expected = calibrate_depth(depth, fitting.at(depth), checking.at(depth))
        assert found.model_dump() == pytest.approx(expected.model_dump(), abs=1e-3)
        bins = measured.reliability[depth].before
        assert sum(part.num_tokens for part in bins) == found.num_checked
    assert measured.calibration.depths[0].accuracy == 1.0
    assert ("decode", 12, 12) in seen
    assert seen[-1] == ("calibrate", 12, 12)


def test_depths_that_no_output_reaches(model_dir: Path) -> None:
    def part(depths: list[int]) -> Observations:
        num = len(depths)
        curves = log_probability_curves(torch.eye(num, 9), torch.arange(num))
        return Observations(torch.tensor(depths), curves, torch.arange(num) % 2 == 0)

    checkpoint = read_checkpoint(model_dir)
    measured = collection.fit(checkpoint, part([0, 0, 1, 1]), part([0, 1, 2]), num_items=2)
    found = measured.calibration.depths
    assert [depth.num_fitted for depth in found] == [2, 2, 0, 0, 0]
    assert [depth.num_checked for depth in found] == [1, 1, 1, 0, 0]
    assert [depth.temperature for depth in found[2:]] == [1.0] * 3
    assert measured.reliability[3].after == []


# The command


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # the command sets it where it is not set


def run(*arguments: Any) -> int:
    return cli.run(["calibrate", *map(str, arguments)])


def test_command(
    model_dir: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "reliability.svg"
    options = ["--data", data, "--max-tokens", MAX_TOKENS, "--plot", plot]
    assert run(model_dir, *options, "--json") == 0
    output = capsys.readouterr()
    printed = json.loads(output.out)
    content = json.loads((model_dir / CALIBRATION_FILE).read_text())
    assert printed.items() >= content.items()
    assert (printed["file"], printed["device"]) == (str(model_dir / CALIBRATION_FILE), "cpu")
    assert "calibrate: 12/12" in output.err
    calibration = read_checkpoint(model_dir).calibration
    assert calibration is not None
    assert calibration.model_dump(mode="json") == content
    assert len(calibration.temperatures) == BLOCK_SIZE + 1
    assert "<svg" in plot.read_text()


def test_command_prints_a_table_and_repeats_itself(
    model_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = model_dir / CALIBRATION_FILE
    options = ["--data", data, "--max-tokens", MAX_TOKENS, "--max-items", 9, "--max-cursors", 60]
    assert run(model_dir, *options) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for title in ("depth", "fitted on", "checked on", "right", "temperature", "ECE", "Brier"):
        assert title in printed
    assert "│ 0 │ 30 │ 30 │ 100.0% │ 1.000 │" in printed
    assert "9 conversations, at most 12 output tokens, 60 cursors; float32 on cpu" in printed
    assert f"Written to {file} " in printed
    before = file.read_bytes()
    assert run(model_dir, *options, "--batch", 2) == 0
    assert file.read_bytes() == before


def test_what_is_replaced_need_not_be_readable(
    model_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = model_dir / CALIBRATION_FILE
    file.write_text("{")
    assert cli.run(["generate", str(model_dir), "--prompt", "What?"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {file}: ")
    assert "marsray calibrate" in message
    assert run(model_dir, "--data", data, "--max-tokens", 4) == 0
    assert read_checkpoint(model_dir).calibration is not None


def test_metadata_for_training_drops_a_calibration(model_dir: Path, data: Path) -> None:
    assert run(model_dir, "--data", data, "--max-tokens", 4) == 0
    checkpoint = read_checkpoint(model_dir)
    assert read_checkpoint(model_dir, with_calibration=False).calibration is None
    assert checkpoint.with_metadata(checkpoint.metadata).calibration is None


def test_a_plain_checkpoint_has_no_calibration(plain_dir: Path, tmp_path: Path) -> None:
    path = shutil.copytree(plain_dir, tmp_path / "plain")
    (path / CALIBRATION_FILE).write_text("somebody else's")
    assert read_checkpoint(path).calibration is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-items", "1"], "data: all conversations fall into one of the two halves"),
        (["--max-cursors", "1"], "--max-cursors"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--device", "tpu"], "--device"),
        (["--plot", "picture.txt"], "--plot: picture.txt names no format of pictures"),
        (["--plot", "nowhere/picture.png"], "--plot: there is no directory nowhere"),
        (["--data", "nothing.jsonl"], "data: nothing.jsonl cannot be read"),
    ],
)
def test_mistakes_are_one_line(
    model_dir: Path,
    data: Path,
    arguments: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(model_dir, "--data", data, *arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert named in output.err
    assert len(output.err.splitlines()) == 1
    assert not (model_dir / CALIBRATION_FILE).exists()


def test_a_plain_checkpoint_is_refused(
    plain_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(plain_dir, "--data", data) == 2
    assert "is a plain AR checkpoint without mars.json" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(
    model_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model_dir / CALIBRATION_FILE).mkdir()
    assert run(model_dir, "--data", data, "--max-tokens", 4) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: model: calibration.json cannot be written into ")
