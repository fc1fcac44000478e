import gzip
import json
import os

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chats import GOOD, chat, write_lines
from mars_platform.data import contents
from mars_platform.data.files import find_files, read_conversations, read_rows
from mars_platform.errors import UserError
from row_shapes import CALLED

KINDS = r"\(\.jsonl and \.json, also \.gz or \.zst, \.parquet, \.arrow\)"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    names = ["b.jsonl", "a.parquet", "sub/c.jsonl.gz", "sub/e.jsonl.zst", "notes.txt"]
    names += ["state.json", "dataset_info.json", "cache-1.arrow", "d.json"]
    names += [".ipynb_checkpoints/b.jsonl", "sub/._c.jsonl"]
    for name in names:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


ALL = [
    "data/a.parquet",
    "data/b.jsonl",
    "data/d.json",
    "data/sub/c.jsonl.gz",
    "data/sub/e.jsonl.zst",
]


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (["data"], ALL),
        (["data/"], ALL),
        (["data/b.jsonl", "data/a.parquet"], ["data/b.jsonl", "data/a.parquet"]),
        (["data/*"], ALL[:3]),
        (["data/*.jsonl"], ["data/b.jsonl"]),
        (["data/**/*.jsonl*"], [ALL[1], *ALL[3:]]),
        (["data/.i*/*"], ["data/.ipynb_checkpoints/b.jsonl"]),
        (["data/[abd].*", "data/sub"], ALL),
    ],
)
def test_files_are_found_in_order(tree, sources, expected):
    assert find_files(sources) == expected
    absolute = [str(tree / source) for source in sources]
    assert find_files(absolute) == [str(tree / name) for name in expected]
    urls = [f"file://{source}" for source in absolute]
    assert find_files(urls) == [f"file://{tree / name}" for name in expected]


def test_links_are_followed(tree):
    os.link(tree / "data/b.jsonl", tree / "blob")
    (tree / "links").mkdir()
    (tree / "links" / "train.jsonl").symlink_to(tree / "blob")
    assert find_files(["links"]) == find_files(["links/*"]) == ["links/train.jsonl"]


def test_a_file_name_may_contain_glob_characters(tree):
    (tree / "data" / "[ab].jsonl").touch()
    assert find_files(["data/[ab].jsonl"]) == ["data/[ab].jsonl"]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("nothing.jsonl", r"there is no file or directory nothing\.jsonl"),
        ("data/nothing-*.jsonl", r"there is no file or directory data/nothing-\*\.jsonl"),
        ("data/*.txt", r"there is no file or directory data/\*\.txt"),
        ("data/state.json", rf"data/state\.json is of no supported kind {KINDS}"),
        ("data/notes.txt", rf"data/notes\.txt is of no supported kind {KINDS}"),
        ("empty", rf"empty holds no file of a supported kind {KINDS}"),
        ("foo://bucket/x", r"foo://bucket/x cannot be read \(Protocol not known: foo\)"),
    ],
)
def test_a_source_without_usable_files_is_refused(tree, source, problem):
    (tree / "empty").mkdir()
    with pytest.raises(UserError, match=rf"^evaluation\.data: {problem}$"):
        find_files(["data", source], "evaluation.data")


def read(file):
    return list(read_rows(str(file)))


def test_jsonl_rows_are_numbered_by_lines_and_blank_ones_are_none(tmp_path):
    file = write_lines(tmp_path / "chat.jsonl", "one", "", " \t", "four", "")
    assert read(file) == [(1, b"one\n"), (4, b"four\n")]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    file = write_lines(tmp_path / "chat.jsonl", "\ufeff" + GOOD, "\ufeff")
    assert read(file) == [(1, GOOD.encode() + b"\n"), (2, "\ufeff\n".encode())]
    assert read(write_lines(tmp_path / "empty.jsonl", "\ufeff")) == []


def compress_zstd(content):
    return pa.compress(content, codec="zstd", asbytes=True)


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", compress_zstd)])
def test_compressed_files_are_read_and_cut_ones_reported(tmp_path, suffix, compress):
    file = tmp_path / f"chat.jsonl.{suffix}"
    content = compress(b"one\ntwo\n")
    file.write_bytes(content + compress(b"three"))  # concatenated, as compressors allow
    assert read(file) == [(1, b"one\n"), (2, b"two\n"), (3, b"three")]
    file.write_bytes(content[:-4])
    line, problem = read(file)[-1]
    assert line == 0
    assert problem.startswith(b"cannot be read")


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", compress_zstd)])
def test_a_small_file_does_not_become_a_line_of_512_mib(tmp_path, suffix, compress):
    file = tmp_path / f"chat.jsonl.{suffix}"
    file.write_bytes(compress(b"one\n") + compress(b"0" * 2**24) * 32)
    assert file.stat().st_size < 2**20
    assert read(file) == [
        (1, b"one\n"),
        (0, b"cannot be read past row 1 (the next has more than 67,108,864 bytes; shorten it)"),
    ]


BROKEN = {
    "foot.parquet": lambda file: file.write_bytes(b"PAR1 and then nothing"),
    "empty.parquet": lambda file: file.touch(),
    "column.parquet": lambda file: pq.write_table(pa.table({"text": ["a"], "id": [1]}), file),
    "plain.jsonl.zst": lambda file: file.write_text(GOOD),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_reported(tmp_path, name):
    BROKEN[name](tmp_path / name)
    ((line, problem),) = read(tmp_path / name)
    assert line == 0
    assert problem.startswith(b"cannot be read")
    if name == "column.parquet":
        assert problem.endswith(b" (no column of a known name among text, id; see data.columns)")


def test_parquet_rows_are_read_as_json(tmp_path):
    rows = [chat("Count", f"answer {number}") | {"id": number} for number in range(600)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chat.parquet", row_group_size=70)
    got = read(tmp_path / "chat.parquet")
    assert [json.loads(content)["messages"] for _, content in got] == [r["messages"] for r in rows]
    assert [line for line, _ in got] == list(range(1, 601))


def test_reading_conversations_skips_bad_rows(tmp_path):
    file = write_lines(tmp_path / "chat.jsonl", GOOD, "", "{", json.dumps(chat("Hello", "there")))
    answers = [c.messages[-1].content for c in read_conversations([str(file)])]
    assert answers == ["There are 12 apples in the box.", "there"]


def test_reading_conversations_refuses_a_broken_file(tmp_path):
    (tmp_path / "chat.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(UserError, match=r"^evaluation\.data: .*chat\.parquet cannot be read \("):
        list(read_conversations([str(tmp_path)], "evaluation.data"))


def test_parquet_bytes_are_not_read_as_text(tmp_path):
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.binary())]))
    table = pa.table({"messages": pa.array([chat(b"Count", b"one")["messages"]], kind)})
    pq.write_table(table, tmp_path / "chat.parquet")
    ((_, content),) = read(tmp_path / "chat.parquet")
    assert [message["content"] for message in json.loads(content)["messages"]] == [[], []]


# --- JSON, Arrow and data sets --------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 7, 2**18])
def test_the_items_of_a_json_array_are_its_rows(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(contents, "_PIECE", piece)
    file = tmp_path / "chat.json"
    items = [json.loads(GOOD), 12345, "a, ] b", {"naïve": ["東京", {}]}, None]
    for text in (json.dumps(items), json.dumps(items, indent=2, ensure_ascii=False)):
        file.write_text(f"\ufeff \n{text}\n \n", encoding="utf-8")
        assert [(n, json.loads(row)) for n, row in read(file)] == [*enumerate(items, start=1)]
    file.write_bytes(b"[ ]")
    assert read(file) == []


def test_a_json_file_of_lines_is_read_as_such(tmp_path):
    (tmp_path / "chat.json.gz").write_bytes(gzip.compress(f"{GOOD}\n\n{GOOD}".encode()))
    assert [number for number, _ in read(tmp_path / "chat.json.gz")] == [1, 3]


@pytest.mark.parametrize(
    ("text", "num_rows", "problem"),
    [
        ('[{"a": 1}, {"b": ', 1, "the next item is not valid JSON, or the array has no end"),
        ('[{"a": 1}, x]', 1, "the next item is not valid JSON"),
        ('[{"a": 1}, {"b": 2}', 1, "the next item is not valid JSON, or the array has no end"),
        ('[{"a": 1} {"b": 2}]', 0, "a comma is missing behind the next item"),
        ('[{"a": 1}]\n[{"b": 2}]', 1, "something follows the end of the array"),
        ("[" * 100_000, 0, "recursion"),
    ],
)
def test_a_broken_json_array_is_reported(tmp_path, text, num_rows, problem):
    (tmp_path / "chat.json").write_text(text)
    *rows, (line, told) = read(tmp_path / "chat.json")
    assert (len(rows), line) == (num_rows, 0)
    assert problem in told.decode()


def test_a_small_json_file_does_not_become_an_item_of_512_mib(tmp_path):
    file = tmp_path / "chat.json.zst"
    file.write_bytes(compress_zstd(b'[1, "' + b"0" * 2**27))
    (_, problem) = read(file)
    assert b"the next has more than 67,108,864 bytes" in problem[1]


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_arrow_files_are_read_without_what_a_row_lacks(tmp_path, new):
    table = pa.Table.from_pylist([{"messages": CALLED, "id": 1}] * 600)
    with new(tmp_path / "chat.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=500)
    assert [json.loads(row) for _, row in read(tmp_path / "chat.arrow")] == [
        {"messages": CALLED}
    ] * 600


def test_columns_of_the_recipe_are_read_from_tables(tmp_path):
    pq.write_table(pa.table({"chat": ["x"], "id": [1]}), tmp_path / "chat.parquet")
    url = str(tmp_path / "chat.parquet")
    assert list(read_rows(url, {"messages": "chat"})) == [(1, b'{"chat": "x"}')]
    [(line, problem)] = read_rows(url, {"messages": "chats"})
    assert line == 0
    assert b"data.columns.messages: no column 'chats' among chat, id" in problem


def test_a_data_set_that_was_saved_is_read_by_split(tmp_path):
    rows = [chat("Count", "one"), chat("Count", "two")]
    split = datasets.Dataset.from_list(rows)
    datasets.DatasetDict(train=split, test=split).save_to_disk(tmp_path / "both")
    with pytest.raises(
        UserError, match=r"holds the splits test, train; name one .* as .*both/test$"
    ):
        find_files([f"{tmp_path}/both/"])
    found = read_conversations([str(tmp_path / "both" / "train")])
    assert [each.messages[-1].content for each in found] == ["one", "two"]
    datasets.DatasetDict(train=split).save_to_disk(tmp_path / "one")
    assert len(list(read_conversations([str(tmp_path / "one")]))) == 2


def test_a_data_set_of_the_hub_is_read_by_its_own_notes(tmp_path):
    write_lines(tmp_path / "en" / "rows.jsonl", GOOD, GOOD)
    write_lines(tmp_path / "en" / "held-out.jsonl", GOOD)
    notes = {"train": "en/rows.jsonl", "test": "en/held-out.jsonl"}
    files = [{"split": split, "path": path} for split, path in notes.items()]
    text = json.dumps({"configs": [{"config_name": "en", "data_files": files}]})
    (tmp_path / "README.md").write_text(f"---\n{text}\n---\n")
    source = f"hub:{tmp_path}"
    assert len(list(read_conversations([source]))) == 2
    assert find_files([f"{source}:en/test"]) == [str(tmp_path / "en" / "held-out.jsonl")]
    with pytest.raises(
        UserError, match=r"^data\.train: hub:.*no split dev; known are train, test$"
    ):
        find_files([f"{source}:dev"])
    with pytest.raises(UserError, match=r"^data\.train: hub:.* cannot be read \("):
        find_files([f"{source}:de/train"])
    with pytest.raises(UserError, match=r"write it as hub:NAME@REVISION:CONFIG/SPLIT$"):
        find_files(["hub:a:b/c/d"])
