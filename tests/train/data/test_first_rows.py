import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chats import GOOD, chat, write_lines
from mars_platform.errors import UserError
from mars_train.data import first_rows
from mars_train.data.first_rows import check_format, read_first_rows
from mars_train.recipe import Recipe


def recipe_of(batch_size=1, **data):
    return Recipe.model_validate(
        {
            "model": {"base": "some/model"},
            "data": {"train": ["unused"], **data},
            "stages": [{"objective": "ar", "batch_size": batch_size}],
            "output": "out",
        }
    )


def places(first):
    return [(row.file, row.line) for row in first.rows]


def refusal(files, recipe):
    with pytest.raises(UserError) as caught:
        check_format(read_first_rows(files), recipe)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def file(tmp_path):
    return lambda *lines, name="chat.jsonl": str(write_lines(tmp_path / name, *lines))


# --- reading --------------------------------------------------------------------------------------


def test_small_files_are_read_whole(file):
    files = [file("one", "two"), file(name="empty.jsonl"), file("three", name="other.jsonl")]
    first = read_first_rows(files)
    assert first.are_all
    assert places(first) == [(files[0], 1), (files[0], 2), (files[2], 1)]
    assert first.rows[-1].content == b"three\n"


def test_of_a_long_file_only_the_first_rows_are_read(file, monkeypatch):
    monkeypatch.setattr(first_rows, "_ROWS_OF_FILE", 3)
    whole, longer = file(*"abc"), file(*"abcd", name="longer.jsonl")
    assert read_first_rows([whole]).are_all
    first = read_first_rows([longer, whole])
    assert not first.are_all
    assert places(first) == [(longer, n) for n in (1, 2, 3)] + [(whole, n) for n in (1, 2, 3)]


def test_files_share_the_bytes_and_each_gives_a_row(file, monkeypatch):
    monkeypatch.setattr(first_rows, "_BYTES", 20)
    files = [file("x" * 12, "y", "z"), file("ab", "cd", name="short.jsonl")]
    first = read_first_rows(files)
    assert places(first) == [(files[0], 1), (files[1], 1), (files[1], 2)]
    assert not first.are_all


def test_of_many_files_the_first_are_read_and_few_remote_ones(file, monkeypatch):
    monkeypatch.setattr(first_rows, "_LOCAL_FILES", 2)
    monkeypatch.setattr(first_rows, "_REMOTE_FILES", 1)
    local = [file(GOOD, name=f"{number}.jsonl") for number in range(3)]
    remote = [f"file://{name}" for name in local]
    assert [row.file for row in read_first_rows([*local, *remote]).rows] == [*local[:2], remote[0]]
    assert read_first_rows([*local[:2], remote[2]]).are_all
    assert not read_first_rows(local).are_all


def test_a_file_that_cannot_be_read_is_refused_by_name(file, tmp_path):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "text.parquet")
    message = refusal([file(GOOD), str(tmp_path / "text.parquet")], recipe_of())
    assert message.startswith(f"data.train: {tmp_path / 'text.parquet'} cannot be read (no column")
    assert message.endswith("; mend the file or leave it out")


# --- refusals -------------------------------------------------------------------------------------


def test_conversations_are_accepted(file):
    check_format(read_first_rows([file(GOOD, GOOD)]), recipe_of(batch_size=2))
    check_format(read_first_rows([file(GOOD, "{", "")]), recipe_of(max_bad_rows=2))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "not valid JSON"),
        (json.dumps({"text": "Hello"}), "messages: required, but not given"),
        (json.dumps({"conversations": [{"from": "human", "value": "Hello"}]}), "messages: "),
        (json.dumps(chat("Hello")), "messages: the last turn must have the role 'assistant'"),
    ],
)
def test_rows_of_another_format_are_refused_by_line(file, row, reason):
    name = file(GOOD, row, row, GOOD)
    message = refusal([name], recipe_of(max_bad_rows=1))
    assert message.startswith(
        f"data.train: 2 bad rows, and data.max_bad_rows allows 1: {name}:2: {reason}"
    )
    assert f"; {name}:3: {reason}" in message


def test_only_the_first_bad_rows_are_shown(file):
    message = refusal([file(GOOD, *"{" * 9)], recipe_of())
    assert message.startswith("data.train: 9 bad rows, ")
    assert message.endswith("; and 6 more")


def test_more_bad_rows_are_awaited_where_they_are_allowed(file, monkeypatch):
    monkeypatch.setattr(first_rows, "_ROWS_OF_FILE", 3)
    name = file(*"{" * 4, GOOD)
    check_format(read_first_rows([name]), recipe_of(max_bad_rows=4))
    assert "none of the 3 rows read is usable" in refusal([name], recipe_of(max_bad_rows=2))


def test_files_without_a_usable_row_are_refused(file):
    message = refusal([file()], recipe_of())
    assert message == "data.train: the files hold no row; name files with conversations"
    message = refusal([file("{", "")], recipe_of(max_bad_rows=9))
    assert message.startswith("data.train: none of the 2 rows read is usable: ")


def test_fewer_conversations_than_a_batch_are_refused(file, monkeypatch):
    name = file(*[GOOD] * 4, "{")
    recipe = recipe_of(batch_size=5, max_bad_rows=1)
    assert refusal([name], recipe) == (
        "data.train: 4 conversations do not fill one batch of stages.ar.batch_size = 5; lower it "
        "or add data"
    )
    monkeypatch.setattr(first_rows, "_ROWS_OF_FILE", 4)
    check_format(read_first_rows([name]), recipe)  # the file may hold more
