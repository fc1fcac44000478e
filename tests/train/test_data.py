import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from mars_platform.errors import UserError
from mars_train.data import (
    PreparedData,
    _check,
    _read_rows,
    _summarise,
    _tokenize_batch,
    find_files,
    read_conversations,
)
from mars_train.recipe import DataSettings
from mars_train.scratch import TURN_END, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    texts = ["Count a box of 12 apples", "There are 12 apples in the box."] * 10
    train_tokenizer(texts, 300).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path):
    return AutoTokenizer.from_pretrained(tokenizer_path)


def chat(*contents):
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return {"messages": messages}


GOOD = json.dumps(chat("Count a box of 12 apples", "There are 12 apples in the box."))


def tokenise(path, lines, loss_on="last", max_length=512):
    rows = [{"path": "chat.jsonl", "line": i, "text": t} for i, t in enumerate(lines, start=1)]
    return _tokenize_batch(pa.Table.from_pylist(rows), str(path), loss_on, max_length)


def prepare(tokenizer_path, file, output, **settings):
    """What the pipeline does with one file, without a cluster."""
    data = DataSettings(train=[file], **settings)
    rows = list(_read_rows({"path": str(file)}))
    table = _tokenize_batch(
        pa.Table.from_pylist(rows), str(tokenizer_path), data.loss_on, data.max_length
    )
    output.mkdir()
    pq.write_table(table, output / "part.parquet")
    prepared = _summarise(output)
    _check(prepared, data)
    return prepared


@pytest.fixture
def lines_file(tmp_path):
    def write(*lines):
        file = tmp_path / "chat.jsonl"
        file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return file

    return write


# --- files ----------------------------------------------------------------------------------------


def test_files_of_directories_come_in_order(tmp_path):
    names = ["b.jsonl", "a.parquet", "sub/c.jsonl", "notes.txt", "d.json"]
    for name in names:
        (tmp_path / "sub").mkdir(exist_ok=True)
        (tmp_path / name).touch()
    expected = [tmp_path / name for name in ("a.parquet", "b.jsonl", "sub/c.jsonl")]
    assert find_files([tmp_path]) == expected


def test_files_come_in_the_order_given(tmp_path):
    paths = [tmp_path / "z.jsonl", tmp_path / "a.jsonl"]
    for path in paths:
        path.touch()
    assert find_files(paths) == paths


def test_missing_path(tmp_path):
    with pytest.raises(UserError, match=r"data\.train: there is no file or directory .*nothing"):
        find_files([tmp_path / "nothing"])


def test_directory_without_data(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match=r"data\.train: .* holds no \.jsonl or \.parquet file"):
        find_files([tmp_path])


def test_jsonl_rows_are_numbered(lines_file):
    file = lines_file("one", "", "three")
    rows = list(_read_rows({"path": str(file)}))
    assert [(row["line"], row["text"].rstrip("\n")) for row in rows] == [
        (1, "one"),
        (2, ""),
        (3, "three"),
    ]
    assert {row["path"] for row in rows} == {str(file)}


def test_bytes_that_are_not_text_spoil_their_own_row_only(tmp_path):
    file = tmp_path / "chat.jsonl"
    file.write_bytes(b"\xff\xfe{\n" + GOOD.encode() + b"\n")
    first, second = _read_rows({"path": str(file)})
    assert (first["line"], second["line"]) == (1, 2)
    assert json.loads(second["text"]) == json.loads(GOOD)


def test_parquet_rows(tmp_path):
    rows = [chat("Count", f"answer {number}") for number in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chat.parquet")
    read = list(_read_rows({"path": str(tmp_path / "chat.parquet")}))
    assert [json.loads(row["text"]) for row in read] == rows
    assert [row["line"] for row in read] == [1, 2, 3]


def test_conversations_pass_over_bad_rows(lines_file):
    file = lines_file(GOOD, "", "{", json.dumps(chat("Hello", "there")))
    answers = [c.messages[-1].content for c in read_conversations([file])]
    assert answers == ["There are 12 apples in the box.", "there"]


# --- tokens ---------------------------------------------------------------------------------------


def supervised_text(tokenizer, row):
    pairs = zip(row["input_ids"], row["supervised"], strict=True)
    return tokenizer.decode([token for token, chosen in pairs if chosen])


@pytest.mark.parametrize(
    "response",
    [
        "There are 12 apples in the box.",
        "x",
        " spaces around ",
        "two\n\nlines",
        "naïve café 東京 🙂 é",
        "12",
    ],
)
def test_response_and_end_marker_are_supervised_exactly(tokenizer_path, tokenizer, response):
    text = json.dumps(chat("Count a box of 12 apples", response))
    (row,) = tokenise(tokenizer_path, [text]).to_pylist()
    assert row["error"] is None
    assert supervised_text(tokenizer, row) == response + TURN_END
    first = row["supervised"].index(True)
    assert tokenizer.decode(row["input_ids"][:first]) == (
        "<|im_start|>user\nCount a box of 12 apples<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(("loss_on", "expected"), [("last", ["two"]), ("all", ["one", "two"])])
def test_supervised_turns(tokenizer_path, tokenizer, loss_on, expected):
    text = json.dumps(chat("Count", "one", "Again", "two"))
    (row,) = tokenise(tokenizer_path, [text], loss_on).to_pylist()
    assert supervised_text(tokenizer, row) == "".join(turn + TURN_END for turn in expected)


def test_tokens_are_those_of_the_chat_template(tokenizer_path, tokenizer):
    (row,) = tokenise(tokenizer_path, [GOOD]).to_pylist()
    messages = json.loads(GOOD)["messages"]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert row["input_ids"] == tokenizer.encode(text, add_special_tokens=False)
    assert not row["truncated"]


def test_truncation(tokenizer_path, tokenizer):
    (whole,) = tokenise(tokenizer_path, [GOOD]).to_pylist()
    length = whole["supervised"].index(True) + 3
    (cut,) = tokenise(tokenizer_path, [GOOD], max_length=length).to_pylist()
    assert cut["error"] is None
    assert cut["truncated"]
    assert cut["input_ids"] == whole["input_ids"][:length]
    assert cut["supervised"] == whole["supervised"][:length]


def test_length_of_exactly_the_limit_is_not_truncated(tokenizer_path):
    (whole,) = tokenise(tokenizer_path, [GOOD]).to_pylist()
    (row,) = tokenise(tokenizer_path, [GOOD], max_length=len(whole["input_ids"])).to_pylist()
    assert row == whole


def test_prompt_that_fills_the_limit(tokenizer_path):
    (whole,) = tokenise(tokenizer_path, [GOOD]).to_pylist()
    length = whole["supervised"].index(True)
    (row,) = tokenise(tokenizer_path, [GOOD], max_length=length).to_pylist()
    assert row["error"] == f"no supervised token within data.max_length = {length}"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("\n", "empty line"),
        ('{"messages": ', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        (json.dumps(chat("Hello")), "the last turn must have the role 'assistant'"),
        (json.dumps(chat("Hello", "there", "again")), "the last turn must have"),
        (json.dumps(chat("Hello", "")), "messages.1.content: "),
        (json.dumps({"text": "Hello"}), "messages: required, but not given"),
    ],
)
def test_bad_row_spoils_no_other(tokenizer_path, line, error):
    before, bad, after = tokenise(tokenizer_path, [GOOD, line, GOOD]).to_pylist()
    assert error in bad["error"]
    assert bad["input_ids"] == bad["supervised"] == []
    assert (bad["path"], bad["line"]) == ("chat.jsonl", 2)
    assert before["error"] is after["error"] is None
    assert before["input_ids"] == after["input_ids"]


# --- the report -----------------------------------------------------------------------------------


def test_report_counts_every_row(tokenizer_path, lines_file, tmp_path):
    long = json.dumps(chat("Count", "a long answer " * 20))
    file = lines_file(GOOD, long, "", GOOD, "{")
    prepared = prepare(tokenizer_path, file, tmp_path / "out", max_length=64, max_bad_rows=2)
    table = pq.read_table(tmp_path / "out").to_pylist()
    good = [row for row in table if row["error"] is None]
    assert (prepared.num_examples, prepared.num_truncated) == (3, 1)
    assert prepared.num_tokens == sum(len(row["input_ids"]) for row in good)
    assert prepared.num_supervised == sum(sum(row["supervised"]) for row in good)
    assert prepared.bad_rows[0] == f"{file}:3: empty line"
    assert prepared.bad_rows[1].startswith(f"{file}:5: not valid JSON")


def test_parquet_and_jsonl_give_the_same_tokens(tokenizer_path, lines_file, tmp_path):
    pq.write_table(pa.Table.from_pylist([json.loads(GOOD)] * 2), tmp_path / "chat.parquet")
    first = prepare(tokenizer_path, tmp_path / "chat.parquet", tmp_path / "one")
    second = prepare(tokenizer_path, lines_file(GOOD, GOOD), tmp_path / "two")
    columns = ["input_ids", "supervised"]
    tables = [pq.read_table(prepared.path, columns=columns) for prepared in (first, second)]
    assert tables[0].equals(tables[1])


@pytest.mark.parametrize("line", ["", "{", json.dumps(chat("Hello")), json.dumps(chat("Hi", ""))])
def test_bad_row_is_named_by_file_and_line(tokenizer_path, lines_file, tmp_path, line):
    file = lines_file(GOOD, line)
    with pytest.raises(UserError) as caught:
        prepare(tokenizer_path, file, tmp_path / "out")
    message = str(caught.value)
    assert message.startswith("data.train: 1 bad rows, and data.max_bad_rows allows 0: ")
    assert f"{file}:2: " in message
    assert "\n" not in message


def test_allowed_bad_rows_are_skipped(tokenizer_path, lines_file, tmp_path):
    file = lines_file(GOOD, "", "{")
    assert prepare(tokenizer_path, file, tmp_path / "out", max_bad_rows=2).num_examples == 1
    with pytest.raises(UserError, match=r"2 bad rows, and data\.max_bad_rows allows 1"):
        prepare(tokenizer_path, file, tmp_path / "again", max_bad_rows=1)


def test_many_bad_rows_are_summed_up(tokenizer_path, lines_file, tmp_path):
    with pytest.raises(UserError, match=r"5 bad rows.*:1: .*:2: .*:3: .*; and 2 more"):
        prepare(tokenizer_path, lines_file(*["{"] * 5), tmp_path / "out")


def test_bad_rows_come_in_the_order_of_their_lines(tokenizer_path, lines_file, tmp_path):
    file = lines_file(GOOD, *["{"] * 11)
    prepared = prepare(tokenizer_path, file, tmp_path / "out", max_bad_rows=11)
    lines = [int(row.removeprefix(f"{file}:").split(":")[0]) for row in prepared.bad_rows]
    assert lines == list(range(2, 13))


def test_no_usable_row(tokenizer_path, lines_file, tmp_path):
    with pytest.raises(UserError, match=r"data\.train: the files hold no usable row"):
        prepare(tokenizer_path, lines_file("", "{"), tmp_path / "out", max_bad_rows=9)


def test_check_accepts_good_data(tmp_path):
    prepared = PreparedData(tmp_path, 3, 30, 12, 0, [])
    _check(prepared, DataSettings(train=["chat.jsonl"]))
