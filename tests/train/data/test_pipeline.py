import gzip
import json
import os
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from transformers import AutoTokenizer

from mars_platform.data.conversations import parse_conversation
from mars_platform.errors import UserError
from mars_train.data import pipeline as data_module
from mars_train.data.pipeline import (
    PreparedData,
    _read_rows,
    _tokenize_batch,
    _tokenized,
    check_vocabulary,
    encode_conversation,
    find_files,
    prepare,
    read_conversations,
)
from mars_train.data.token_store import TokenStore
from mars_train.recipe import DataSettings
from mars_train.run.scratch import TURN_END, train_tokenizer

KINDS = r"\(\.jsonl, \.jsonl\.gz, \.jsonl\.zst, \.parquet\)"


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    texts = ["Count a box of 12 apples", "There are 12 apples in the box."] * 10
    train_tokenizer(texts, 300).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path):
    return AutoTokenizer.from_pretrained(tokenizer_path)


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False
    )
    yield
    ray.shutdown()


def chat(*contents):
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return {"messages": messages}


GOOD = json.dumps(chat("Count a box of 12 apples", "There are 12 apples in the box."))
LONG = json.dumps(chat("Count", "a long answer " * 20))


def write_lines(file, *lines):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return file


@pytest.fixture
def lines_file(tmp_path):
    return lambda *lines: write_lines(tmp_path / "chat.jsonl", *lines)


def tokenise(path, lines, loss_on="last", max_length=512):
    rows = [{"file": 4, "line": i, "content": t.encode()} for i, t in enumerate(lines, start=1)]
    return _tokenize_batch(pa.Table.from_pylist(rows), str(path), loss_on, max_length)


def contents(path):
    return [(ids.tolist(), supervised.tolist()) for ids, supervised in TokenStore(path)]


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path, monkeypatch):
    names = ["b.jsonl", "a.parquet", "sub/c.jsonl.gz", "sub/e.jsonl.zst", "notes.txt", "d.json"]
    for name in names:
        (tmp_path / "data" / "sub").mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


ALL = ["data/a.parquet", "data/b.jsonl", "data/sub/c.jsonl.gz", "data/sub/e.jsonl.zst"]


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (["data"], ALL),
        (["data/"], ALL),
        (["data/b.jsonl", "data/a.parquet"], ["data/b.jsonl", "data/a.parquet"]),
        (["data/*"], ALL[:2]),
        (["data/*.jsonl"], ["data/b.jsonl"]),
        (["data/**/*.jsonl*"], ALL[1:]),
        (["data/[ab].*", "data/sub"], ALL),
    ],
)
def test_files_come_in_order(tree, sources, expected):
    assert find_files(sources) == expected
    absolute = [str(tree / source) for source in sources]
    assert find_files(absolute) == [str(tree / name) for name in expected]
    urls = [f"file://{source}" for source in absolute]
    assert find_files(urls) == [f"file://{tree / name}" for name in expected]


def test_files_behind_links_are_found(tree):
    os.link(tree / "data/b.jsonl", tree / "blob")
    (tree / "links").mkdir()
    (tree / "links" / "train.jsonl").symlink_to(tree / "blob")
    assert find_files(["links"]) == find_files(["links/*"]) == ["links/train.jsonl"]


def test_name_with_the_characters_of_a_glob(tree):
    (tree / "data" / "[ab].jsonl").touch()
    assert find_files(["data/[ab].jsonl"]) == ["data/[ab].jsonl"]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("nothing.jsonl", r"there is no file or directory nothing\.jsonl"),
        ("data/nothing-*.jsonl", r"there is no file or directory data/nothing-\*\.jsonl"),
        ("data/*.txt", r"there is no file or directory data/\*\.txt"),
        ("data/d.json", rf"data/d\.json is of no supported kind {KINDS}"),
        ("data/notes.txt", rf"data/notes\.txt is of no supported kind {KINDS}"),
        ("empty", rf"empty holds no file of a supported kind {KINDS}"),
        ("foo://bucket/x", r"foo://bucket/x cannot be read \(Protocol not known: foo\)"),
    ],
)
def test_source_that_gives_no_file(tree, source, problem):
    (tree / "empty").mkdir()
    with pytest.raises(UserError, match=rf"^evaluation\.data: {problem}$"):
        find_files(["data", source], "evaluation.data")


def read(file):
    return [(row["line"], row["content"]) for row in _read_rows({"file": 0, "url": str(file)})]


def test_jsonl_rows_are_numbered(lines_file):
    assert read(lines_file("one", "", "three")) == [(1, b"one\n"), (2, b"\n"), (3, b"three\n")]


def compress_zstd(content):
    return pa.compress(content, codec="zstd", asbytes=True)


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", compress_zstd)])
def test_compressed_rows(tmp_path, suffix, compress):
    file = tmp_path / f"chat.jsonl.{suffix}"
    content = compress(b"one\ntwo\n")
    file.write_bytes(content + compress(b"three"))  # concatenated, as compressors allow
    assert read(file) == [(1, b"one\n"), (2, b"two\n"), (3, b"three")]
    file.write_bytes(content[:-4])
    line, problem = read(file)[-1]
    assert line == 0
    assert problem.startswith(b"cannot be read")


def test_parquet_rows(tmp_path):
    rows = [chat("Count", f"answer {number}") | {"id": number} for number in range(600)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chat.parquet", row_group_size=70)
    got = read(tmp_path / "chat.parquet")
    assert [json.loads(content)["messages"] for _, content in got] == [r["messages"] for r in rows]
    assert [line for line, _ in got] == list(range(1, 601))


def test_conversations_pass_over_bad_rows(lines_file):
    file = lines_file(GOOD, "", "{", json.dumps(chat("Hello", "there")))
    answers = [c.messages[-1].content for c in read_conversations([str(file)])]
    assert answers == ["There are 12 apples in the box.", "there"]


def test_conversations_of_a_broken_file(tmp_path):
    (tmp_path / "chat.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(UserError, match=r"^evaluation\.data: .*chat\.parquet cannot be read \("):
        list(read_conversations([str(tmp_path)], "evaluation.data"))


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
    assert (row["outcome"], row["reason"]) == ("used", None)
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


def test_truncation(tokenizer_path):
    (whole,) = tokenise(tokenizer_path, [GOOD]).to_pylist()
    length = whole["supervised"].index(True) + 3
    (cut,) = tokenise(tokenizer_path, [GOOD], max_length=length).to_pylist()
    assert cut["outcome"] == "truncated"
    assert cut["reason"] == f"{len(whole['input_ids'])} tokens, cut to data.max_length = {length}"
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
    assert (row["outcome"], row["input_ids"], row["supervised"]) == ("dropped", [], [])
    assert row["reason"] == (
        f"no supervised token within data.max_length = {length}, "
        f"of {len(whole['input_ids'])} tokens"
    )


def test_one_conversation_is_encoded_as_the_rows_are(tokenizer_path, tokenizer):
    for line in (GOOD, LONG):
        (row,) = tokenise(tokenizer_path, [line], max_length=64).to_pylist()
        ids, supervised = encode_conversation(tokenizer, parse_conversation(line), "last", 64)
        assert (ids.tolist(), supervised.tolist()) == (row["input_ids"], row["supervised"])
    with pytest.raises(UserError, match=r"^messages: no supervised token within data\.max_length"):
        encode_conversation(tokenizer, parse_conversation(GOOD), "last", 8)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"\n", "empty line"),
        (b'{"messages": ', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"\xff\xfe{", "not valid UTF-8 (at byte 1)"),
        (GOOD.encode().replace(b"apples", "Äpfel".encode("latin-1")), "not valid UTF-8 (at byte "),
        (json.dumps(chat("Hello", "a\ud800b")).encode(), "messages.1.content: "),
        (json.dumps(chat("Hello")).encode(), "the last turn must have the role 'assistant'"),
        (json.dumps(chat("Hello", "there", "again")).encode(), "the last turn must have"),
        (json.dumps(chat("Hello", "")).encode(), "messages.1.content: "),
        (b'{"messages": null}', "messages: "),
        (b'{"text": "Hello"}', "messages: required, but not given"),
        (json.dumps({"messages": [{"role": "x" * 99}] * 99}).encode(), "messages.0.role: "),
    ],
)
def test_bad_row_spoils_no_other(tokenizer_path, line, reason):
    contents = [GOOD.encode(), line, GOOD.encode()]
    rows = [{"file": 4, "line": i, "content": c} for i, c in enumerate(contents, start=1)]
    table = _tokenize_batch(pa.Table.from_pylist(rows), str(tokenizer_path), "last", 512)
    before, bad, after = table.to_pylist()
    assert reason in bad["reason"]
    assert "\n" not in bad["reason"]
    assert len(bad["reason"]) < 400
    assert (bad["outcome"], bad["input_ids"], bad["supervised"]) == ("dropped", [], [])
    assert (bad["file"], bad["line"]) == (4, 2)
    assert before["outcome"] == after["outcome"] == "used"
    assert before["input_ids"] == after["input_ids"]


# --- preparation ----------------------------------------------------------------------------------


def settings_for(*sources, **settings):
    return DataSettings(train=[str(source) for source in sources], **settings)


def test_everything_is_counted_and_reported(cluster, tokenizer_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in" / "b.jsonl", GOOD, LONG, "", GOOD, "{")
    prompt_only = json.dumps(chat("Count " * 50, "x"))
    write_lines(tmp_path / "in" / "a.jsonl", *[GOOD] * 3, LONG, GOOD, prompt_only)
    settings = settings_for("in", max_length=64, max_bad_rows=3)
    prepared = prepare(settings, tokenizer_path, tmp_path / "out" / "tokens")
    store = TokenStore(prepared.path)
    rows = contents(prepared.path)
    assert (prepared.num_examples, prepared.num_truncated, prepared.num_bad) == (8, 2, 3)
    assert len(store) == prepared.num_examples
    assert prepared.num_tokens == store.num_tokens == sum(len(ids) for ids, _ in rows)
    assert prepared.num_supervised == sum(sum(supervised) for _, supervised in rows)
    assert prepared.longest == max(len(ids) for ids, _ in rows) == 64
    assert prepared.max_token_id == max(max(ids) for ids, _ in rows)
    assert prepared.fingerprint == store.fingerprint
    assert prepared.report == tmp_path / "out" / "report.jsonl"
    report = [json.loads(line) for line in prepared.report.read_text().splitlines()]
    places = [(row["file"], row["line"], row["what"]) for row in report]
    assert places == [
        ("in/a.jsonl", 4, "truncated"),
        ("in/a.jsonl", 6, "dropped"),
        ("in/b.jsonl", 2, "truncated"),
        ("in/b.jsonl", 3, "dropped"),
        ("in/b.jsonl", 5, "dropped"),
    ]
    assert [row["reason"].split(" (")[0] for row in report if row["file"] == "in/b.jsonl"] == [
        report[0]["reason"],
        "empty line",
        "not valid JSON",
    ]
    assert report[1]["reason"].startswith("no supervised token within data.max_length = 64, of ")
    short = [f"{row['file']}:{row['line']}: {row['reason']}" for row in report]
    assert prepared.bad_rows == [short[1], short[3], short[4]]
    assert prepared.truncated_rows == [short[0], short[2]]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["report.jsonl", "tokens"]


def test_store_does_not_depend_on_how_rows_are_spread(cluster, tokenizer_path, tmp_path):
    lines = [json.dumps(chat(f"Count {i}", f"{i} apples " * (i % 7 + 1))) for i in range(700)]
    one = write_lines(tmp_path / "one" / "chat.jsonl", *lines)
    sizes = [1, 300, 2, 40, 0, 357]
    for index, size in enumerate(sizes):
        start = sum(sizes[:index])
        write_lines(tmp_path / "many" / f"{index}.jsonl", *lines[start : start + size])
    rows = [json.loads(line) for line in lines]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chat.parquet")
    first = prepare(settings_for(one), tokenizer_path, tmp_path / "tokens-one")
    second = prepare(settings_for(tmp_path / "many"), tokenizer_path, tmp_path / "tokens-many")
    third = prepare(
        settings_for(f"file://{tmp_path}/*.parquet"), tokenizer_path, tmp_path / "tokens-parquet"
    )
    assert first.fingerprint == second.fingerprint == third.fingerprint
    expected = [
        (row["input_ids"], row["supervised"]) for row in tokenise(tokenizer_path, lines).to_pylist()
    ]
    for prepared in (first, second, third):
        assert contents(prepared.path) == expected


def test_one_large_file_is_tokenised_by_several_tasks(
    cluster, tokenizer_path, tmp_path, monkeypatch
):
    monkeypatch.setattr(data_module, "_BLOCK_BYTES", 50_000)
    tokenize = _tokenize_batch

    def with_task(batch, **arguments):
        task = ray.get_runtime_context().get_task_id()
        table = tokenize(batch, **arguments)
        return table.append_column("task", pa.array([task] * table.num_rows))

    monkeypatch.setattr(data_module, "_tokenize_batch", with_task)
    file = write_lines(tmp_path / "chat.jsonl", *[GOOD] * 3000)  # 400 kB
    tables = list(_tokenized([str(file)], settings_for(file), tokenizer_path))
    assert sorted(line for table in tables for line in table["line"].to_pylist()) == list(
        range(1, 3001)
    )
    assert len({task for table in tables for task in table["task"].to_pylist()}) >= 5


def refused(settings, tokenizer_path, output):
    """The message of `prepare`, which leaves nothing but the report."""
    with pytest.raises(UserError) as caught:
        prepare(settings, tokenizer_path, output)
    assert not output.exists()
    assert {file.name for file in output.parent.glob("*")} <= {"report.jsonl"}
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_too_many_bad_rows(cluster, tokenizer_path, lines_file, tmp_path):
    file = lines_file(GOOD, "", *["{"] * 4)
    output = tmp_path / "out" / "tokens"
    settings = settings_for(file, max_bad_rows=4)
    message = refused(settings, tokenizer_path, output)
    assert message.startswith(
        f"data.train: 5 bad rows, and data.max_bad_rows allows 4: {file}:2: empty line; {file}:3: "
    )
    assert message.endswith(f"; and 2 more, listed in {tmp_path / 'out' / 'report.jsonl'}")
    assert len((tmp_path / "out" / "report.jsonl").read_text().splitlines()) == 5
    allowed = settings_for(file, max_bad_rows=5)
    assert prepare(allowed, tokenizer_path, output).num_examples == 1


def test_no_supervised_token_in_any_row(cluster, tokenizer_path, lines_file, tmp_path):
    settings = settings_for(lines_file(GOOD, GOOD), max_length=8, max_bad_rows=9)
    message = refused(settings, tokenizer_path, tmp_path / "out" / "tokens")
    assert message.startswith("data.train: none of the 2 rows read is usable: ")
    assert "chat.jsonl:1: no supervised token within data.max_length = 8, of " in message


def test_files_without_rows(cluster, tokenizer_path, lines_file, tmp_path):
    message = refused(settings_for(lines_file()), tokenizer_path, tmp_path / "out" / "tokens")
    assert message == "data.train: the files hold no row"


def test_hopeless_data_is_not_read_to_its_end(
    cluster, tokenizer_path, lines_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(data_module, "_BLOCK_BYTES", 10_000)
    monkeypatch.setattr(data_module, "_HOPELESS_ROWS", 300)
    settings = settings_for(lines_file(*["{" * 50] * 20_000), max_bad_rows=600)
    message = refused(settings, tokenizer_path, tmp_path / "out" / "tokens")
    num_read = int(re.match(r"data\.train: none of the (\d+) rows read is usable", message)[1])
    assert 600 < num_read < 20_000
    assert (tmp_path / "out" / "report.jsonl").read_text().count("\n") == num_read


def save_with_template(tokenizer_path, path, template):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


def test_tokenizer_without_chat_template(tokenizer_path, lines_file, tmp_path):
    plain = save_with_template(tokenizer_path, tmp_path / "plain", None)
    message = refused(settings_for(lines_file(GOOD)), plain, tmp_path / "out" / "tokens")
    assert message.startswith("model: the tokenizer has no chat template; ")
    assert not (tmp_path / "out").exists()  # said before anything is begun


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ raise_exception('No\n  such\nrole') }}{% endfor %}", "No such"),
        ("{% for m in messages %}", "Unexpected end of template"),
    ],
)
def test_template_that_fails_on_every_row(
    cluster, tokenizer_path, lines_file, tmp_path, template, reason
):
    broken = save_with_template(tokenizer_path, tmp_path / "broken", template)
    settings = settings_for(lines_file(GOOD, GOOD), max_bad_rows=9)
    message = refused(settings, broken, tmp_path / "out" / "tokens")
    assert message.startswith("data.train: none of the 2 rows read is usable: ")
    assert f"chat.jsonl:1: messages: the chat template cannot render them ({reason}" in message


def corrupt(file):
    rows = [chat("Count", f"answer {number}") for number in range(2000)]
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=100)
    content = bytearray(file.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 500] = bytes(500)
    file.write_bytes(content)


BROKEN = {
    "foot.parquet": lambda file: file.write_bytes(b"PAR1 and then nothing"),
    "empty.parquet": lambda file: file.touch(),
    "middle.parquet": corrupt,
    "column.parquet": lambda file: pq.write_table(pa.table({"text": ["a"], "id": [1]}), file),
    "cut.jsonl.gz": lambda file: file.write_bytes(gzip.compress(GOOD.encode() * 99)[:-9]),
    "plain.jsonl.zst": lambda file: file.write_text(GOOD),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_is_named(cluster, tokenizer_path, tmp_path, name):
    good = write_lines(tmp_path / "good.jsonl", *[GOOD] * 10)
    BROKEN[name](tmp_path / name)
    settings = settings_for(good, tmp_path / name, max_bad_rows=10**6)
    message = refused(settings, tokenizer_path, tmp_path / "out" / "tokens")
    assert message.startswith(f"data.train: {tmp_path / name} cannot be read")
    if name == "column.parquet":
        assert message.endswith(" (no column messages among text, id)")


def test_file_that_vanishes_is_named(tmp_path):
    ((line, problem),) = read(tmp_path / "gone.jsonl")
    assert line == 0
    assert problem.startswith(b"cannot be read (")


def test_parquet_rows_that_are_no_text_are_bad_rows(cluster, tokenizer_path, tmp_path):
    rows = [json.loads(GOOD), chat("Count", None), {"messages": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chat.parquet")
    settings = settings_for(tmp_path / "chat.parquet", max_bad_rows=2)
    prepared = prepare(settings, tokenizer_path, tmp_path / "out" / "tokens")
    assert prepared.num_examples == 1
    assert [row.split(": ")[1] for row in prepared.bad_rows] == ["messages.1.content", "messages"]


def test_parquet_bytes_are_not_taken_for_text(tmp_path):
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.binary())]))
    table = pa.table({"messages": pa.array([chat(b"Count", b"one")["messages"]], kind)})
    pq.write_table(table, tmp_path / "chat.parquet")
    ((_, content),) = read(tmp_path / "chat.parquet")
    assert [message["content"] for message in json.loads(content)["messages"]] == [None, None]


def test_store_is_not_overwritten(tokenizer_path, lines_file, tmp_path):
    write_lines(tmp_path / "out" / "tokens", "precious")
    with pytest.raises(UserError, match=r"tokens is there already"):
        prepare(settings_for(lines_file(GOOD)), tokenizer_path, tmp_path / "out" / "tokens")
    assert (tmp_path / "out" / "tokens").read_text() == "precious\n"


def test_output_that_cannot_be_written(tokenizer_path, lines_file, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/tokens: cannot be written \("):
        prepare(settings_for(lines_file(GOOD)), tokenizer_path, tmp_path / "file" / "tokens")


def test_tokens_out_of_vocabulary(tmp_path):
    prepared = PreparedData(tmp_path, "", 1, 3, 1, 0, 0, 3, 151_645, [], [])
    check_vocabulary(prepared, 151_646)
    with pytest.raises(UserError) as caught:
        check_vocabulary(prepared, 32_000)
    assert "token ids go up to 151645, but the embedding has 32000 rows" in str(caught.value)
