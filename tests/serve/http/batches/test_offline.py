"""Files of requests that are answered without a server; Ray Data only spreads what runs here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mars_platform.errors import UserError
from mars_serve.deploy.offline import (
    LineAnswerer,
    Tally,
    append_answers,
    digest_of,
    read_file,
    request_of,
)
from rest.rest_server import SingleEngineBackend, served

MESSAGES = [{"role": "user", "content": "What is 1?"}]


@pytest.fixture
def run(mars, make_loop, tmp_path: Path) -> Callable[..., Tally]:
    """Answer files: ``run(*files)``; each table of answers holds one line."""
    answerer = LineAnswerer(
        lambda: served("mine", mars, SingleEngineBackend(make_loop(mars, max_num_seqs=2)))
    )

    def answers(files: Iterable[Path], done: frozenset[bytes]) -> Iterable[pa.Table]:
        for file in files:
            item = {"name": file.name, "url": str(file)}
            for request in read_file(item, done, {"max_tokens": 2}):
                yield answerer(pa.Table.from_pylist([request]))

    def run_over(*files: Path, stop_after: int | None = None) -> Tally:
        told = 0

        def tell(_: Tally) -> None:
            nonlocal told
            told += 1
            if told == stop_after:
                raise KeyboardInterrupt

        return append_answers(tmp_path / "out.jsonl", lambda done: answers(files, done), tell)

    return run_over


def written(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in (directory / "out.jsonl").read_text().splitlines()]


def test_rows_of_all_forms_are_answered_once_also_behind_a_stop(run, tmp_path):
    rows = [
        {"custom_id": "line", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 3}},
        {"messages": MESSAGES, "label": "one"},
        {"prompt": "What is 2", "custom_id": ""},
        {"custom_id": "line", "messages": MESSAGES},
        {"custom_id": "named", "body": {"model": "gpt", "messages": MESSAGES, "stream": True}},
        {"answer": 1},
        [],
        {"custom_id": "bad", "body": {"messages": MESSAGES, "temperature": 9}},
        {"custom_id": "nowhere", "url": "/v1/nowhere", "body": {}},
    ]
    lines = [json.dumps(row) for row in rows] + ["not json"]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    pq.write_table(pa.Table.from_pylist([{"messages": MESSAGES, "n": 5}]), tmp_path / "in.parquet")
    files = [tmp_path / "in.jsonl", tmp_path / "in.parquet"]
    with pytest.raises(KeyboardInterrupt):
        run(*files, stop_after=3)
    with (tmp_path / "out.jsonl").open("ab") as file:
        file.write(b'{"custom_id": "named", "resp')  # a line that a killed run has begun
    assert run(*files) == Tally(done=10, errors=5, repeated=0)
    found = {each["custom_id"]: each for each in written(tmp_path)}
    assert len(found) == len(written(tmp_path)) == 10
    right = {"line", "in.jsonl:2", "in.jsonl:3", "named", "in.parquet:1"}
    for name, each in found.items():
        status = each["response"] and each["response"]["status_code"]
        assert status == (200 if name in right else {"bad": 400}.get(name)), each
        assert (each["error"] is None) == (status is not None)
    assert found["line"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert found["named"]["response"]["body"]["model"] == "mine"
    assert found["named"]["response"]["body"]["usage"]["completion_tokens"] == 2
    assert run(*files) == Tally(done=10)


def test_repeated_ids_are_counted_and_other_outputs_are_refused(run, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a", "prompt": "x"}\n' * 3)
    assert run(tmp_path / "in.jsonl") == Tally(done=1, repeated=2)
    (tmp_path / "out.jsonl").write_text('{"text": "mine"}\n')
    with pytest.raises(UserError, match=r"^--output: .* holds something else"):
        run(tmp_path / "in.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == '{"text": "mine"}\n'
    (tmp_path / "out.jsonl").unlink()
    (tmp_path / "out.jsonl").mkdir()
    with pytest.raises(UserError, match=r"^--output: .* cannot be written"):
        run(tmp_path / "in.jsonl")


def test_a_row_for_no_endpoint_is_no_request():
    row = {"url": "/v1/chat/completions\n", "body": {"messages": []}}
    found = request_of("rows.jsonl:1", 1, json.dumps(row).encode(), {})
    assert found["problem"].startswith("url: it names none of /v1/chat/completions, ")
    assert request_of("rows.jsonl:1", 1, b'{"body": {}}', {})["problem"] == ""


def test_two_runs_do_not_write_one_output(tmp_path):
    def answers(_: frozenset[bytes]) -> Iterable[pa.Table]:
        with pytest.raises(UserError, match="another run writes"):
            append_answers(tmp_path / "out.jsonl", lambda _: [], lambda _: None)
        yield pa.Table.from_pylist([{"custom_id": "a", "is_right": True, "line": b"{}"}])

    assert append_answers(tmp_path / "out.jsonl", answers, lambda _: None) == Tally(done=1)


def test_an_engine_that_has_died_is_started_again(mars, make_loop):
    engines = []

    def start():
        engines.append(make_loop(mars))
        return served("mine", mars, SingleEngineBackend(engines[-1]))

    answerer = LineAnswerer(start)
    engines[0].stop()
    row = {"custom_id": "a", "url": "/v1/completions", "body": b'{"prompt": "x"}', "problem": ""}
    (answer,) = answerer(pa.Table.from_pylist([row])).to_pylist()
    assert (answer["is_right"], len(engines)) == (True, 2)
    assert digest_of("a") != digest_of("b")
