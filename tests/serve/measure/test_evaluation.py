from __future__ import annotations

import copy
import json
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import PreTrainedModel

from mars_platform.checkpoint.calibration import Calibration, DepthCalibration, write_calibration
from mars_platform.checkpoint.directory import (
    Checkpoint,
    MarsMetadata,
    SpecialTokens,
    load_model,
    read_checkpoint,
    save_checkpoint,
)
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.cli import main as cli
from mars_platform.data.answers import is_correct
from mars_platform.data.conversations import render_prompt
from mars_platform.errors import UserError
from mars_platform.method import reference
from mars_platform.method.mode import Mode
from mars_serve.api.text import encode
from mars_serve.engine.decoding_options import (
    DecodingOptions,
    FinishReason,
    Outcomes,
    Sampling,
)
from mars_serve.engine.request import Request
from mars_serve.measure.evaluation.decoding import (
    ONE_TOKEN,
    DecodedItem,
    DecodingSetting,
    evaluation_engine,
    run_setting,
)
from mars_serve.measure.evaluation.items import EvalItem, read_items
from mars_serve.measure.evaluation.scoring import score

SPECIAL = SpecialTokens(eos=frozenset({1, 2, 9, 33}), never_emitted=frozenset({0, 3}))
CAREFUL, HASTY = DecodingSetting(Mode.THRESHOLD, 0.3), DecodingSetting(Mode.THRESHOLD, 0.05)
MAX_TOKENS = 24

# Answers


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("Half of 144 is 72.\n#### 72", "72", True),
        ("Half of 144 is 72.\n####72 ", "72", True),
        ("#### 71\n#### 72", "72", True),
        ("#### 72\nAnswer: 71", "72", False),
        ("Answer: 71\n#### 72", "72", True),
        ("#### 72 clips", "72", False),
        ("#### 1,234", "1234", True),
        ("#### 1234", "1,234", True),
        ("#### 1,234,567.50", "1234567.5", True),
        ("#### 72.0", "72", True),
        ("#### -0.50", "-.5", False),
        ("#### -7", "7", False),
        ("#### +7", "7", True),
        ("#### 12,34", "1234", False),
        ("#### 007", "7", True),
        ("#### 0.1", "0.10000000000000000001", False),
        ("Answer: blue", "blue", True),
        ("Answer: Blue", "blue", False),
        ("Answer: 72", "Half of 144 is 72.\n#### 72", True),
        ("Answer: 71", "Half of 144 is 72.\n#### 72", False),
        ("72", "72", False),
        ("Answer: ", "", False),
    ],
)
def test_answers(response: str, answer: str, expected: bool) -> None:
    assert is_correct(response, answer) is expected


# Reading


def row(question: str, response: str = "Answer: 7", **columns: Any) -> dict[str, Any]:
    turns = [("user", question), ("assistant", response)]
    return {"messages": [{"role": role, "content": text} for role, text in turns], **columns}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return path


def read(*paths: Path, model: Path, **options: Any) -> list[EvalItem]:
    checkpoint = read_checkpoint(model)
    fields = {"max_length": checkpoint.max_length, **options}
    return read_items(paths, checkpoint.tokenizer, **fields)


def test_prompts_hold_all_before_the_final_turn(tmp_path: Path, mars_dir: Path) -> None:
    turns = [("system", "Add."), ("user", "1+1"), ("assistant", "2"), ("user", "2+2")]
    before = [{"role": role, "content": text} for role, text in turns]
    file = write(
        tmp_path / "a.jsonl", {"messages": [*before, {"role": "assistant", "content": "4"}]}
    )
    (item,) = read(file, model=mars_dir)
    tokenizer = read_checkpoint(mars_dir).tokenizer
    text = render_prompt(tokenizer, before)
    assert text.endswith("<|im_start|>assistant\n")
    assert list(item.prompt) == encode(tokenizer, text, add_special_tokens=False)
    assert item.source == f"{file}:1"


def test_answers_of_rows(tmp_path: Path, mars_dir: Path) -> None:
    file = write(
        tmp_path / "a.jsonl",
        row("a", answer="7", kind="sum"),
        row("b", answer=7),
        row("c", answer=7.0),
        row("d", answer=None),
        row("e"),
        row("f", answer="8"),
    )
    items = read(file, model=mars_dir)
    assert [item.answer for item in items] == ["7", "7", "7.0", None, None, "8"]
    assert [item.states_answer for item in items] == [True, True, True, False, False, False]


def test_parquet_reads_as_jsonl_does(tmp_path: Path, mars_dir: Path) -> None:
    rows = [row("a", answer="7"), row("b", answer=None), row("c", answer="8")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    ours = read(tmp_path / "a.parquet", model=mars_dir)
    theirs = read(write(tmp_path / "a.jsonl", *rows), model=mars_dir)
    assert [item.source for item in ours] == [f"{tmp_path / 'a.parquet'}:{n}" for n in (1, 2, 3)]
    assert ours == [
        replace(theirs_, source=item.source) for theirs_, item in zip(theirs, ours, strict=True)
    ]


def test_max_items_counts_over_all_files_and_reads_no_further(
    tmp_path: Path, mars_dir: Path
) -> None:
    first = write(tmp_path / "a.jsonl", row("a"), row("b"))
    second = write(tmp_path / "b.jsonl", row("c"), {"no": "messages"})
    items = read(first, second, model=mars_dir, max_items=3)
    assert [item.source for item in items] == [f"{first}:1", f"{first}:2", f"{second}:1"]
    with pytest.raises(UserError):
        read(first, second, model=mars_dir, max_items=4)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b"{", "not valid JSON"),
        (b"", "empty line"),
        (b'"\xff"', "not valid UTF-8"),
        (b'{"messages": []}', "messages: the last turn"),
        (json.dumps(row("a", answer="  ")).encode(), "answer: must not be empty"),
        (json.dumps(row("a", answer=True)).encode(), "answer: must be a text or a number"),
        (json.dumps(row("a", answer=["7"])).encode(), "answer: must be a text or a number"),
        (json.dumps(row("long " * 100)).encode(), "leaves no room for an output"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(
    tmp_path: Path, mars_dir: Path, line: bytes, named: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(json.dumps(row("a")).encode() + b"\n" + line + b"\n")
    with pytest.raises(UserError) as refusal:
        read(file, model=mars_dir)
    assert str(refusal.value).startswith(f"{file}:2: ")
    assert named in str(refusal.value)


def test_bad_parquet_row_is_named_by_file_and_line(tmp_path: Path, mars_dir: Path) -> None:
    pq.write_table(pa.Table.from_pylist([row("a"), {"messages": None}]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet:2: messages"):
        read(tmp_path / "a.parquet", model=mars_dir)


def test_prompt_may_leave_room_for_one_token(tmp_path: Path, mars_dir: Path) -> None:
    file = write(tmp_path / "a.jsonl", row("What is it?"))
    (item,) = read(file, model=mars_dir)
    length = len(item.prompt)
    assert read(file, model=mars_dir, max_length=length + 1) == [item]
    with pytest.raises(UserError, match=rf"{length} tokens .* context of {length}"):
        read(file, model=mars_dir, max_length=length)


def test_files_that_cannot_be_read(tmp_path: Path, mars_dir: Path) -> None:
    (tmp_path / "bad.parquet").write_text("no parquet")
    write(tmp_path / "empty.jsonl")
    for name in ("nothing.jsonl", "nothing.parquet", "bad.parquet", "", "empty.jsonl"):
        with pytest.raises(UserError, match=r"^data: ") as refusal:
            read(tmp_path / name, model=mars_dir)
        assert name in str(refusal.value) or name == "empty.jsonl"


# Running

Models = Callable[[str], PreTrainedModel]


@pytest.fixture(scope="module")
def model(tiny_model: Models) -> PreTrainedModel:
    return tiny_model("qwen2")


@pytest.fixture(scope="module")
def checkpoint(model: PreTrainedModel) -> Checkpoint:
    metadata = MarsMetadata(block_size=4, mask_token_id=3)
    return Checkpoint(None, model.config, None, metadata, SPECIAL)


@pytest.fixture(scope="module")
def items() -> list[EvalItem]:
    source = random.Random(0)
    prompts = [tuple(source.choices(range(4, 64), k=source.randint(1, 90))) for _ in range(23)]
    return [EvalItem(f"x:{n}", prompt, None, False) for n, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def run(model: PreTrainedModel, checkpoint: Checkpoint) -> Callable[..., list[DecodedItem]]:
    def run(
        items: list[EvalItem], setting: DecodingSetting, *, max_num_seqs: int = 5, **options: Any
    ) -> list[DecodedItem]:
        fields = {"max_tokens": MAX_TOKENS, **options}
        engine = evaluation_engine(
            checkpoint,
            items,
            max_tokens=fields["max_tokens"],
            max_num_seqs=max_num_seqs,
            model=copy.deepcopy(model),
        )
        outcomes = run_setting(engine, items, setting, **fields)
        assert engine.status().num_free_pages == engine.settings.num_pages
        return outcomes

    return run


Run = Callable[..., list[DecodedItem]]


@pytest.mark.parametrize(
    "setting", [ONE_TOKEN, CAREFUL, HASTY, DecodingSetting(Mode.THRESHOLD, 1.0)]
)
def test_outcomes_equal_the_oracles(
    model: PreTrainedModel, items: list[EvalItem], run: Run, setting: DecodingSetting
) -> None:
    decoded = [
        reference.decode(
            model,
            item.prompt,
            SPECIAL,
            max_tokens=MAX_TOKENS,
            threshold=setting.threshold,
            num_masks=4,
            mask_token_id=3,
        )
        for item in items
    ]
    outcomes = run(items, setting)
    assert [list(outcome.tokens) for outcome in outcomes] == [each.tokens for each in decoded]
    assert [outcome.num_passes for outcome in outcomes] == [len(each.passes) for each in decoded]
    assert {outcome.finish_reason for outcome in outcomes} == {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }
    total = sum(len(each.tokens) for each in decoded) / sum(len(each.passes) for each in decoded)
    assert score(outcomes).tokens_per_forward.value == pytest.approx(total)
    assert (total == 1.0) == (setting.threshold == 1.0)


@pytest.mark.parametrize("setting", [ONE_TOKEN, HASTY])
def test_outcomes_do_not_depend_on_the_batch(
    items: list[EvalItem], run: Run, setting: DecodingSetting
) -> None:
    together = run(items, setting)
    assert together == run(items, setting, max_num_seqs=1)
    assert together == run(items, setting, max_num_seqs=40)
    assert together == [run([item], setting)[0] for item in items]


def test_a_split_set_put_together_scores_as_the_whole(items: list[EvalItem], run: Run) -> None:
    def share(rank: int, setting: DecodingSetting) -> list[DecodedItem]:
        return pickle.loads(pickle.dumps(run(items[rank::3], setting)))  # noqa: S301

    whole = score(run(items, CAREFUL), run(items, ONE_TOKEN))
    ours = [outcome for rank in (2, 0, 1) for outcome in share(rank, CAREFUL)]
    baseline = [outcome for rank in (0, 1, 2) for outcome in share(rank, ONE_TOKEN)]
    assert score(ours, baseline) == whole
    assert 0.0 < whole.identical < 1.0


def test_no_items_give_no_outcomes(run: Run) -> None:
    assert run([], HASTY) == []


def test_one_engine_serves_one_setting_after_the_other(
    model: PreTrainedModel, checkpoint: Checkpoint, items: list[EvalItem], run: Run
) -> None:
    engine = evaluation_engine(
        checkpoint, items, max_tokens=MAX_TOKENS, max_num_seqs=5, model=copy.deepcopy(model)
    )
    for setting in (HASTY, ONE_TOKEN, HASTY):
        assert run_setting(engine, items, setting, max_tokens=MAX_TOKENS) == run(items, setting)


@pytest.mark.parametrize("block_size", [4, 64])
def test_the_longest_items_run_together(
    model: PreTrainedModel, checkpoint: Checkpoint, block_size: int
) -> None:
    metadata = MarsMetadata(block_size=block_size, mask_token_id=3)
    endless = replace(checkpoint.special, eos=frozenset())
    wide = replace(checkpoint, metadata=metadata, special=endless)
    lengths = [1, 1, 1, *range(40, 50)]
    items = [EvalItem(str(n), (4 + n,) * n, None, False) for n in lengths]  # nothing to share
    engine = evaluation_engine(
        wide, items, max_tokens=190, max_num_seqs=10, model=copy.deepcopy(model)
    )
    accept_all = DecodingOptions(190, Mode.THRESHOLD, 1e-9)
    for index, item in enumerate(items[3:]):
        engine.add(Request(str(index), list(item.prompt), accept_all))
    for _ in range(2):
        outputs = engine.step()
        assert [len(output.tokens) for output in outputs] == [block_size + 1] * 10
    while engine.has_work:
        engine.step()
    assert engine.status().num_preemptions == 0


def test_the_context_cuts_outputs(
    model: PreTrainedModel, checkpoint: Checkpoint, items: list[EvalItem], run: Run
) -> None:
    limit = checkpoint.max_length
    long = [EvalItem(str(n), (7,) * (limit - n), None, False) for n in (1, 2, 30)]
    outcomes = run([*long, *items[:2]], ONE_TOKEN)
    assert [outcome.num_tokens for outcome in outcomes[:2]] == [1, 2]
    assert outcomes[0].finish_reason is FinishReason.LENGTH
    assert outcomes[3:] == run(items[:2], ONE_TOKEN)


def test_progress_counts_up_to_all_items(items: list[EvalItem], run: Run) -> None:
    seen: list[int] = []
    run(items, HASTY, on_progress=seen.append)
    assert seen == sorted(set(seen))
    assert seen[-1] == len(items)
    assert len(seen) > 3


def test_a_plain_checkpoint_decodes_in_ar_only(
    model: PreTrainedModel, checkpoint: Checkpoint, items: list[EvalItem], run: Run
) -> None:
    plain = replace(checkpoint, metadata=None)
    engine = evaluation_engine(
        plain, items, max_tokens=MAX_TOKENS, max_num_seqs=5, model=copy.deepcopy(model)
    )
    outcomes = run_setting(engine, items, ONE_TOKEN, max_tokens=MAX_TOKENS)
    assert outcomes == run(items, ONE_TOKEN)
    with pytest.raises(UserError, match=r"^mode: .*'ar'"):
        run_setting(engine, items, HASTY, max_tokens=MAX_TOKENS)


# Mode exact and sampling

EXACT = DecodingSetting(Mode.EXACT, 1.0, outcomes=Outcomes.ALL)
EXACT_LAST = replace(EXACT, outcomes=Outcomes.LAST)


@pytest.fixture
def numbered(items: list[EvalItem]) -> list[EvalItem]:
    return [replace(item, index=index) for index, item in enumerate(items)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("setting", [EXACT, EXACT_LAST])
def test_mode_exact_says_what_mode_ar_does(
    numbered: list[EvalItem], run: Run, setting: DecodingSetting, temperature: float
) -> None:
    sampling = Sampling(temperature=temperature, top_p=0.9, seed=7)
    ours = run(numbered, replace(setting, sampling=sampling))
    theirs = run(numbered, replace(ONE_TOKEN, sampling=sampling))
    assert [each.tokens for each in ours] == [each.tokens for each in theirs]
    found = score(ours, theirs)
    assert found.identical == 1.0
    assert found.tokens_per_forward.value > 1.0
    assert (temperature > 0) == (theirs != run(numbered, ONE_TOKEN))


def test_positions_are_those_of_decoding(items: list[EvalItem], run: Run) -> None:
    last, every = score(run(items, EXACT_LAST)), score(run(items, EXACT))
    assert score(run(items, ONE_TOKEN)).positions_per_forward.value == 1.0
    # at most the pending token, four drafts, and four masks for one or for five outcomes
    assert 1.0 < last.positions_per_forward.value <= 9.0 < every.positions_per_forward.value <= 25.0
    assert 2.0 < score(run(items, CAREFUL)).positions_per_forward.value <= 9.0


def test_a_draw_depends_on_the_item_and_the_seed(numbered: list[EvalItem], run: Run) -> None:
    setting = DecodingSetting(Mode.AR, 1.0, sampling=Sampling(temperature=1.0, seed=2**63 - 2))
    whole = run(numbered, setting)
    assert whole[1::3] == run(numbered[1::3], setting)
    assert whole == run(numbered, setting, max_num_seqs=2)
    other = replace(setting, sampling=replace(setting.sampling, seed=3))
    assert whole != run(numbered, other)
    twice = [replace(numbered[5], index=index, source=str(index)) for index in range(2)]
    first, second = run(twice, setting)
    assert first.tokens != second.tokens


def test_no_mask_is_left_out_for_want_of_room(
    model: PreTrainedModel, checkpoint: Checkpoint
) -> None:
    metadata = MarsMetadata(block_size=12, mask_token_id=3)
    wide = replace(
        checkpoint, metadata=metadata, special=replace(checkpoint.special, eos=frozenset())
    )
    items = [EvalItem(str(n), (4 + n,) * 5, None, False) for n in range(10)]
    engine = evaluation_engine(
        wide, items, max_tokens=60, max_num_seqs=10, exact=True, model=copy.deepcopy(model)
    )
    for index, item in enumerate(items):
        options = DecodingOptions(60, Mode.EXACT, outcomes=Outcomes.ALL)
        engine.add(Request(str(index), list(item.prompt), options))
    engine.step()
    assert {output.num_positions for output in engine.step()} == {13**2}


# Scores


def outcome(
    name: str,
    *,
    tokens: int = 4,
    passes: int = 2,
    positions: int = 6,
    correct: bool | None = None,
    cut: bool = False,
    first: int = 0,
) -> DecodedItem:
    reason = FinishReason.LENGTH if cut else FinishReason.STOP
    return DecodedItem(name, (first, *range(1, tokens)), passes, positions, reason, correct)


def test_known_score() -> None:
    ours = [
        outcome("a", tokens=4, passes=1, positions=9, correct=True),
        outcome("b", tokens=2, passes=2, correct=False, cut=True),
        outcome("c", tokens=6, passes=3, correct=None, first=9),
    ]
    theirs = [
        outcome("c", tokens=6, passes=6),
        outcome("b", tokens=2, passes=2, correct=True),
        outcome("a", tokens=4, passes=4, correct=True),
    ]
    found = score(ours, theirs)
    assert (found.num_items, found.num_checkable) == (3, 2)
    assert found.accuracy == pytest.approx((0.5, 0.094531, 0.905469), abs=1e-6)  # Wilson, 1 of 2
    # lost 1 of 2: p = 1/4, q = 2/4, half width 1.959964 * sqrt((3/4 - 1/16) / 4)
    assert found.difference == pytest.approx((-0.5, -1.0, 0.562558), abs=1e-6)
    assert found.tokens_per_forward == pytest.approx((2.0, 0.868414, 3.131586), abs=1e-6)
    assert found.positions_per_forward.value == pytest.approx(21 / 6)
    assert found.identical == pytest.approx(2 / 3)
    assert found.mean_tokens == 4.0
    assert found.cut_off == pytest.approx(1 / 3)


def test_the_baseline_has_nothing_to_be_compared_with() -> None:
    found = score([outcome("a", correct=True)])
    assert (found.difference, found.identical) == (None, None)
    assert found.accuracy.value == 1.0


def test_nothing_checkable_leaves_tokens_and_sameness() -> None:
    found = score([outcome("a"), outcome("b")], [outcome("a"), outcome("b", first=9)])
    assert (found.num_checkable, found.accuracy, found.difference) == (0, None, None)
    assert (found.identical, found.tokens_per_forward.value) == (0.5, 2.0)


@pytest.mark.parametrize("correct", [True, False])
def test_all_right_and_all_wrong_keep_an_interval(correct: bool) -> None:
    outcomes = [outcome(str(n), correct=correct) for n in range(10)]
    found = score(outcomes, outcomes)
    low, high = (0.722467, 1.0) if correct else (0.0, 0.277533)
    assert found.accuracy == pytest.approx((float(correct), low, high), abs=1e-6)
    assert found.difference.value == 0.0
    assert found.difference.low == -found.difference.high < 0.0
    assert found.identical == 1.0


def test_scores_of_different_items_are_not_compared() -> None:
    with pytest.raises(AssertionError, match="same items"):
        score([outcome("a")], [outcome("b")])


# The command

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
    """Two rows the taught model gets right, one it gets wrong, one without an answer."""
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


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # the command sets it where it is not set


def test_command(taught_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--threshold", 0.05, "--threshold", 1, "--threshold", 0.9, "--max-tokens", 32]
    found = evaluate(capsys, taught_dir, "--data", data, *options)
    rows = found["rows"]
    assert [(row["mode"], row["threshold"]) for row in rows] == [
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
    assert all(row["tokens_per_s"] > 0 for row in rows)


def test_command_equals_the_core(
    taught_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluate(capsys, taught_dir, "--data", data, "--batch", 2, "--max-tokens", 32)
    thresholds = [row["threshold"] for row in found["rows"]]
    assert thresholds == [1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5]
    items = read(data, model=taught_dir)
    engine = evaluation_engine(read_checkpoint(taught_dir), items, max_tokens=32, max_num_seqs=3)
    setting = DecodingSetting(Mode.THRESHOLD, 0.7)
    ours, theirs = (run_setting(engine, items, s, max_tokens=32) for s in (setting, ONE_TOKEN))
    expected = asdict(score(ours, theirs))
    for key in ("accuracy", "difference", "tokens_per_forward", "positions_per_forward"):
        expected[key] = expected[key]._asdict()
    assert found["rows"][4].items() >= expected.items()


def test_command_measures_mode_exact(
    taught_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--mode", "exact", "--outcomes", "last", "--outcomes", "all", "--max-tokens", 32]
    sampling = ["--temperature", 0.9, "--top-p", 0.8, "--seed", 11]
    found = evaluate(capsys, taught_dir, "--data", data, *options, *sampling)
    assert (found["temperature"], found["top_p"], found["seed"]) == (0.9, 0.8, 11)
    ar, last, every = found["rows"]
    assert [(row["mode"], row["outcomes"]) for row in (ar, last, every)] == [
        ("ar", None),
        ("exact", "last"),
        ("exact", "all"),
    ]
    for row in (last, every):
        assert row["identical"] == 1.0
        assert row["accuracy"] == ar["accuracy"]
    assert last["positions_per_forward"]["value"] < every["positions_per_forward"]["value"]
    assert ar["positions_per_forward"]["value"] == 1.0


def test_command_measures_calibrated_confidence(
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


def test_the_table_names_layouts_and_sampling(
    taught_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data", str(data), "--mode", "exact", "--temperature", "0.5"]
    assert cli.run(["eval", str(taught_dir), *arguments, "--max-tokens", "8"]) == 0
    output = capsys.readouterr()
    printed = " ".join(output.out.split())
    assert "│ exact │ all │" in printed
    assert "Sampled at temperature 0.5, top-p 1, seed 0" in printed
    assert "exact all: 4/4" in output.err


def test_an_end_token_is_no_part_of_the_answer(taught_dir: Path, tmp_path: Path) -> None:
    items = read(write(tmp_path / "a.jsonl", row("six", answer="4")), model=taught_dir)
    engine = evaluation_engine(read_checkpoint(taught_dir), items, max_tokens=32, max_num_seqs=1)
    (outcome,) = run_setting(engine, items, ONE_TOKEN, max_tokens=32)
    assert engine.checkpoint.tokenizer.decode(outcome.tokens) == "Answer: 4!"
    assert (outcome.finish_reason, outcome.correct) == (FinishReason.STOP, True)


def test_command_prints_a_table_with_notes(
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


def test_data_without_answers_is_compared_with_one_token_decoding(
    mars_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.jsonl", row("a"), row("b"))
    arguments = ["--data", str(file), "--threshold", "0.05", "--max-tokens", "32"]
    assert cli.run(["eval", str(mars_dir), *arguments]) == 0
    printed = capsys.readouterr().out
    assert "No row has an answer" in printed
    assert "accuracy " not in printed.splitlines()[1]
    assert "identical" in printed


def test_interval_of_one_item_has_no_ends_in_json(
    mars_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--mode", "ar", "--max-items", 1, "--max-tokens", 3]
    (only,) = evaluate(capsys, mars_dir, "--data", data, *options)["rows"]
    assert only["num_items"] == 1
    assert only["tokens_per_forward"] == {"value": 1.0, "low": None, "high": None}


def test_plain_checkpoint_has_one_row(
    plain_dir: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write(tmp_path / "b.jsonl", row("another"))
    for extra in ([], ["--threshold", 1], ["--mode", "ar"]):
        options = ["--data", data, "--data", other, "--max-tokens", 3, "--dtype", "bf16", *extra]
        found = evaluate(capsys, plain_dir, *options)
        assert [(row["mode"], row["num_items"]) for row in found["rows"]] == [("ar", 5)]
        assert (found["device"], found["dtype"]) == ("cpu", "bf16")


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
        (["--temperature", "2.5"], "--temperature: 2.5 is not in [0, 2]"),
        (["--temperature", "nan"], "--temperature: nan is not in [0, 2]"),
        (["--top-p", "0"], "--top-p: 0.0 is not in (0, 1]"),
        (["--seed", "-1"], "--seed"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--max-items", "0"], "--max-items"),
        (["--batch", "0"], "--batch"),
        (["--device", "tpu"], "--device"),
        (["--dtype", "int8"], "--dtype"),
        (["--data", "nothing.jsonl"], "data: nothing.jsonl cannot be read"),
    ],
)
def test_mistakes_are_one_line(
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


@pytest.mark.parametrize(
    "extra", [["--threshold", "0.9"], ["--mode", "threshold"], ["--mode", "exact"]]
)
def test_plain_checkpoint_takes_no_threshold(
    plain_dir: Path, data: Path, extra: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["eval", str(plain_dir), "--data", str(data), *extra]) == 2
    message = capsys.readouterr().err
    assert "is a plain AR checkpoint without mars.json and decodes in mode ar only" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none(
    mars_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["eval", str(mars_dir), "--data", str(data), "--device", "cuda"]) == 2
    assert "--device: there is no CUDA device" in capsys.readouterr().err
