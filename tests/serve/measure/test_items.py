from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conversations import read, row, write
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.data.rendering import render_prompt
from mars_platform.errors import UserError
from mars_serve.api.text import encode


def test_a_prompt_holds_all_turns_before_the_final_one(tmp_path: Path, mars_dir: Path) -> None:
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


def test_answers_are_read_and_compared_with_the_final_turn(tmp_path: Path, mars_dir: Path) -> None:
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


def test_parquet_is_read_like_jsonl(tmp_path: Path, mars_dir: Path) -> None:
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
        (b'"\xff"', "not valid UTF-8"),
        (b'{"messages": []}', "messages: the last turn"),
        (json.dumps(row("a", answer="  ")).encode(), "answer: must not be empty"),
        (json.dumps(row("a", answer=True)).encode(), "answer: must be a text or a number"),
        (json.dumps(row("a", answer=["7"])).encode(), "answer: must be a text or a number"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(
    tmp_path: Path, mars_dir: Path, line: bytes, named: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(json.dumps(row("a")).encode() + b"\n" + line + b"\n")
    with pytest.raises(UserError) as refusal:
        read(file, model=mars_dir)
    assert str(refusal.value).startswith(f"{file}:2: ")
    assert named in str(refusal.value)


def test_a_bad_parquet_row_is_named_by_file_and_line(tmp_path: Path, mars_dir: Path) -> None:
    pq.write_table(pa.Table.from_pylist([row("a"), {"messages": None}]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet:2: no conversation"):
        read(tmp_path / "a.parquet", model=mars_dir)


def test_a_prompt_must_leave_room_for_one_token(tmp_path: Path, mars_dir: Path) -> None:
    file = write(tmp_path / "a.jsonl", row("What is it?"))
    (item,) = read(file, model=mars_dir)
    length = len(item.prompt)
    assert read(file, model=mars_dir, max_length=length + 1) == [item]
    with pytest.raises(UserError, match=rf"{length} tokens .* context of {length}"):
        read(file, model=mars_dir, max_length=length)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.jsonl", r"^data: .*/nothing.jsonl cannot be read"),
        ("nothing.parquet", r"^data: .*/nothing.parquet cannot be read"),
        ("bad.parquet", r"^data: .*/bad.parquet cannot be read"),
        ("", r"^data: .* cannot be read"),
        ("empty.jsonl", r"^data: the files hold no row"),
    ],
)
def test_a_file_without_rows_is_refused(
    tmp_path: Path, mars_dir: Path, name: str, message: str
) -> None:
    (tmp_path / "bad.parquet").write_text("no parquet")
    write(tmp_path / "empty.jsonl")
    with pytest.raises(UserError, match=message):
        read(tmp_path / name, model=mars_dir)
