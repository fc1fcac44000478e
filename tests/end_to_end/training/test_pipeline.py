"""Rows of files become a store of tokens, on Ray Data."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from chats import GOOD, LONG, chat, write_lines
from mars_platform.errors import UserError
from mars_train.data import pipeline
from mars_train.data.pipeline import encode_rows, encoded_tables, prepare
from mars_train.data.token_store import TokenStore
from mars_train.recipe import DataSettings


@pytest.fixture
def lines_file(tmp_path):
    return lambda *lines: write_lines(tmp_path / "chat.jsonl", *lines)


def contents(path):
    return [(ids.tolist(), supervised.tolist()) for ids, supervised in TokenStore(path)]


def reported(directory):
    return [json.loads(line) for line in (directory / "report.jsonl").read_text().splitlines()]


def settings_for(*sources, **settings):
    return DataSettings(train=[str(source) for source in sources], **settings)


def test_every_row_is_counted_and_bad_or_cut_ones_are_reported(
    tokenizer_path, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in" / "b.jsonl", GOOD, LONG, "7", GOOD, "{")
    prompt_only = json.dumps(chat("Count " * 50, "x"))
    write_lines(tmp_path / "in" / "a.jsonl", *[GOOD] * 3, LONG, GOOD, prompt_only)
    settings = settings_for("in", max_length=64, max_bad_rows=3)
    output = tmp_path / "out" / "tokens"
    counts = prepare(settings, tokenizer_path, output)
    store, rows = TokenStore(output), contents(output)
    assert (counts.num_examples, counts.num_truncated, counts.num_bad) == (8, 2, 3)
    assert len(store) == counts.num_examples
    assert counts.num_tokens == store.num_tokens == sum(len(ids) for ids, _ in rows)
    assert counts.num_supervised == sum(sum(supervised) for _, supervised in rows)
    assert max(len(ids) for ids, _ in rows) == 64
    assert counts.max_token_id == max(max(ids) for ids, _ in rows)
    report = reported(tmp_path / "out")
    assert [(row["file"], row["line"], row["what"]) for row in report] == [
        ("in/a.jsonl", 4, "truncated"),
        ("in/a.jsonl", 6, "dropped"),
        ("in/b.jsonl", 2, "truncated"),
        ("in/b.jsonl", 3, "dropped"),
        ("in/b.jsonl", 5, "dropped"),
    ]
    assert [row["reason"].split(" (")[0] for row in report if row["file"] == "in/b.jsonl"] == [
        report[0]["reason"],
        'a row must be an object, such as {"messages": [...]}',
        "not valid JSON",
    ]
    assert report[1]["reason"].startswith("no supervised token within data.max_length = 64, of ")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["report.jsonl", "tokens"]


def test_the_store_does_not_depend_on_files_and_their_format(tokenizer_path, tmp_path):
    lines = [json.dumps(chat(f"Count {i}", f"{i} apples " * (i % 7 + 1))) for i in range(700)]
    one = write_lines(tmp_path / "one" / "chat.jsonl", *lines)
    sizes = [1, 300, 2, 40, 0, 357]
    for index, size in enumerate(sizes):
        start = sum(sizes[:index])
        write_lines(tmp_path / "many" / f"{index}.jsonl", *lines[start : start + size])
    rows = [{"chat": json.loads(line)["messages"]} for line in lines]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chat.parquet")
    rows = [{"file": 0, "line": i, "content": line.encode()} for i, line in enumerate(lines, 1)]
    table = pa.Table.from_pylist(rows)
    encoded = encode_rows(table, str(tokenizer_path), settings_for(one)).to_pylist()
    expected = [(row["input_ids"], row["supervised"]) for row in encoded]
    fingerprints = set()
    sources = {"one": one, "many": tmp_path / "many", "chat": f"file://{tmp_path}/*.parquet"}
    for name, source in sources.items():
        output = tmp_path / "tokens" / name
        columns = {"messages": "chat"} if name == "chat" else {}
        counts = prepare(settings_for(source, columns=columns), tokenizer_path, output)
        assert counts.shapes == {"messages": 700}
        assert contents(output) == expected
        fingerprints.add(TokenStore(output).fingerprint)
    assert len(fingerprints) == 1


def test_one_large_file_is_tokenised_by_several_tasks(tokenizer_path, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "BLOCK_BYTES", 50_000)

    def with_task(rows, **arguments):
        task = ray.get_runtime_context().get_task_id()
        table = encode_rows(rows, **arguments)
        return table.append_column("task", pa.array([task] * table.num_rows))

    monkeypatch.setattr(pipeline, "encode_rows", with_task)
    file = write_lines(tmp_path / "chat.jsonl", *[GOOD] * 3000)  # 400 kB
    tables = list(encoded_tables([str(file)], settings_for(file), tokenizer_path))
    assert sorted(line for table in tables for line in table["line"].to_pylist()) == list(
        range(1, 3001)
    )
    assert len({task for table in tables for task in table["task"].to_pylist()}) >= 5


def refused(settings, tokenizer_path, output):
    """Return the error message of `prepare`, which must leave nothing but the report."""
    with pytest.raises(UserError) as caught:
        prepare(settings, tokenizer_path, output)
    assert not output.exists()
    assert {file.name for file in output.parent.glob("*")} <= {"report.jsonl"}
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_more_bad_rows_than_allowed_are_refused(tokenizer_path, lines_file, tmp_path):
    file = lines_file(GOOD, "7", *["{"] * 4)
    output = tmp_path / "out" / "tokens"
    settings = settings_for(file, max_bad_rows=4)
    message = refused(settings, tokenizer_path, output)
    assert message.startswith(
        f"data.train: 5 bad rows, and data.max_bad_rows allows 4: {file}:2: a row must be "
    )
    assert message.endswith(f"; and 2 more, listed in {tmp_path / 'out' / 'report.jsonl'}")
    assert len(reported(tmp_path / "out")) == 5
    allowed = settings_for(file, max_bad_rows=5)
    assert prepare(allowed, tokenizer_path, output).num_examples == 1


def test_reading_stops_if_no_row_is_usable(tokenizer_path, lines_file, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(pipeline, "HOPELESS_ROWS", 300)
    settings = settings_for(lines_file(*["{" * 50] * 20_000), max_bad_rows=600)
    message = refused(settings, tokenizer_path, tmp_path / "out" / "tokens")
    num_read = int(re.match(r"data\.train: none of the (\d+) rows read is usable", message)[1])
    assert 600 < num_read < 20_000
    assert (tmp_path / "out" / "report.jsonl").read_text().count("\n") == num_read


def corrupt(file):
    rows = [chat("Count", f"answer {number}") for number in range(2000)]
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=100)
    content = bytearray(file.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 500] = bytes(500)
    file.write_bytes(content)


def test_a_broken_file_is_refused_by_name(tokenizer_path, tmp_path):
    good = write_lines(tmp_path / "good.jsonl", *[GOOD] * 10)
    corrupt(tmp_path / "middle.parquet")
    settings = settings_for(good, tmp_path / "middle.parquet", max_bad_rows=10**6)
    message = refused(settings, tokenizer_path, tmp_path / "out" / "tokens")
    assert message.startswith(f"data.train: {tmp_path / 'middle.parquet'} cannot be read")


def test_parquet_rows_without_text_are_bad_rows(tokenizer_path, tmp_path):
    rows = [json.loads(GOOD), chat("Count", None), {"messages": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chat.parquet")
    settings = settings_for(tmp_path / "chat.parquet", max_bad_rows=2)
    assert prepare(settings, tokenizer_path, tmp_path / "out" / "tokens").num_examples == 1
    reasons = [row["reason"].split(": ")[0] for row in reported(tmp_path / "out")]
    assert reasons == ["messages.1.content", "no conversation"]


def test_an_output_that_cannot_be_written_is_refused(tokenizer_path, lines_file, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/tokens: cannot be written \("):
        prepare(settings_for(lines_file(GOOD)), tokenizer_path, tmp_path / "file" / "tokens")
