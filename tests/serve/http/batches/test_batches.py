"""Files and batches by OpenAI's client, over an engine in this process."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp

from mars_serve.config.served import ServedModel
from mars_serve.config.settings import KeySettings, LimitSettings, StorageSettings
from mars_serve.http.batches.records import ENDED, Lease
from mars_serve.http.batches.run import Pace
from mars_serve.http.in_process import OwnRequests
from mars_serve.storage.objects import new_id
from rest.api_keys import key_entry
from rest.rest_server import app_of, client_of

CHAT = "/v1/chat/completions"


FAST = Pace(look_s=0.02, beat_s=0.05, lease_s=1.0, settle_s=0.01)


def official_of(app: FastAPI, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key=key, base_url="http://localhost/v1", http_client=client_of(app), max_retries=0
    )


@pytest.fixture
def make_app(models: list[ServedModel], tmp_path: Path) -> Callable[..., FastAPI]:
    """Make an application with a storage: ``make_app(**storage)``; ``keys`` are fields of keys."""

    def make(
        keys: tuple[dict[str, Any], ...] = (), limits: dict[str, Any] | None = None, **storage: Any
    ) -> FastAPI:
        entries = [key_entry(**fields) for fields in keys]
        app = app_of(
            *models,
            storage=StorageSettings(**{"path": str(tmp_path / "kept"), **storage}),
            keys=KeySettings(entries=entries or None),
            limits=LimitSettings(**(limits or {})),
        )
        app.state.batches.means = replace(app.state.batches.means, pace=FAST)
        return app

    return make


def running(app: FastAPI) -> Any:
    """Run an application's batches within the block."""
    return app.router.lifespan_context(app)


def line(custom_id: str, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"model": "mars", "messages": [{"role": "user", "content": custom_id}], "max_tokens": 3}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**body, **fields}}


def jsonl(*lines: Any) -> bytes:
    return "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines).encode()


async def until_ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(60):
        while (batch := await client.batches.retrieve(batch_id)).status not in ENDED:
            await asyncio.sleep(0.02)
    return batch


async def contents(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(each) for each in (await client.files.content(file_id)).text.splitlines()]


async def created(client: openai.AsyncOpenAI, content: bytes, **fields: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    settings = {"endpoint": CHAT, "completion_window": "24h", **fields}
    return await client.batches.create(input_file_id=file.id, **settings)


async def test_a_batch_answers_each_line_as_its_request_alone_would_be(make_app):
    app = make_app()
    lines = [
        line("one"),
        line("two", seed=5, temperature=1),
        line("three", service_tier="default", mode="ar"),
        line("bad", temperature=9),
        line("lost", model="absent"),
    ]
    async with running(app), official_of(app) as client:
        batch = await created(client, jsonl(*lines, ""), metadata={"run": "7"})
        assert (batch.status, batch.metadata) == ("validating", {"run": "7"})
        batch = await until_ended(client, batch.id)
        assert (batch.status, batch.errors) == ("completed", None)
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (5, 3, 2)
        times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
        assert list(times) == sorted(times)
        assert batch.expires_at - batch.created_at in (86_400, 86_399)
        report = app.state.telemetry.report
        assert report("mars").batch_lines == {"completed": 3}
        assert report("").batch_lines == {"failed": 2}
        output = {each["custom_id"]: each for each in await contents(client, batch.output_file_id)}
        errors = {each["custom_id"]: each for each in await contents(client, batch.error_file_id)}
        assert (output.keys(), errors.keys()) == ({"one", "two", "three"}, {"bad", "lost"})
        for each in lines[:3]:
            answer, body = output[each["custom_id"]], each["body"]
            assert answer["error"] is None
            assert answer["response"]["status_code"] == 200
            assert answer["response"]["request_id"]
            got = answer["response"]["body"]
            assert got["service_tier"] == body.get("service_tier", "flex")
            alone = await client_of(app).answer(CHAT, body)
            assert got["choices"] == alone["choices"]
        statuses = {name: each["response"]["status_code"] for name, each in errors.items()}
        assert statuses == {"bad": 400, "lost": 404}
        assert errors["bad"]["response"]["body"]["error"]["param"] == "temperature"
        files = [each.purpose async for each in await client.files.list(order="asc", limit=1)]
        assert sorted(files) == ["batch", "batch_output", "batch_output"]
        assert [each.id async for each in await client.batches.list()] == [batch.id]


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        ("/v1/messages", {"max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"max_output_tokens": 3, "input": "x"}),
    ],
)
async def test_lines_go_to_other_endpoints_in_their_own_form(make_app, url, fields):
    app, body = make_app(), {"model": "mars", **fields}
    lines = [{"custom_id": "a", "method": "POST", "url": url, "body": body}]
    lines += [{**lines[0], "custom_id": "b", "body": {**lines[0]["body"], "temperature": 9}}]
    async with running(app), official_of(app) as client:
        batch = await until_ended(client, (await created(client, jsonl(*lines), endpoint=url)).id)
        (right,) = await contents(client, batch.output_file_id)
        (wrong,) = await contents(client, batch.error_file_id)
        assert (right["custom_id"], right["response"]["status_code"]) == ("a", 200)
        assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("b", 400)
        assert "temperature" in wrong["response"]["body"]["error"]["message"]
        assert right["response"]["body"].get("store", False) is False


async def test_two_ingresses_and_two_stops_answer_each_line_once(make_app):
    names = [f"line {number}" for number in range(200)]
    content = jsonl(*(line(name, max_tokens=1) for name in names))
    apps, num_seen = [make_app(batch_concurrency=8) for _ in range(4)], list[int]()
    num_sent = 0

    def counting(app: FastAPI) -> ASGIApp:
        async def counted(*call: Any) -> None:
            nonlocal num_sent
            num_sent += 1
            await app(*call)

        return counted

    for app in apps:
        means = app.state.batches.means
        app.state.batches.means = replace(means, requests=OwnRequests(counting(app)))
    async with official_of(apps[0]) as client:
        batch_id = (await created(client, content)).id
        for app in apps[:2]:
            async with running(app):
                while (
                    counts := (await client.batches.retrieve(batch_id)).request_counts
                ).completed <= (num_seen[-1] if num_seen else 0):
                    await asyncio.sleep(0.01)
            num_seen.append(counts.completed)
        async with running(apps[2]), running(apps[3]):
            batch = await until_ended(client, batch_id)
        assert num_seen[0] < num_seen[1] < 200
        assert batch.request_counts.model_dump() == {"total": 200, "completed": 200, "failed": 0}
        output = [each["custom_id"] for each in await contents(client, batch.output_file_id)]
        assert sorted(output) == sorted(names)
        assert num_sent <= 200 + 2 * 8, "lines are answered again only if a stop came between"


async def test_a_batch_that_another_ingress_has_taken_is_left_to_it(make_app):
    app = make_app(batch_concurrency=1)
    async with running(app), official_of(app) as client:
        batch = await created(client, jsonl(*(line(str(each), max_tokens=1) for each in range(40))))
        while not (await client.batches.retrieve(batch.id)).request_counts.completed:
            await asyncio.sleep(0.01)
        store, name = app.state.batches.store, batch.id.removeprefix("batch_")
        foreign = Lease(tenant="", owner="another", beat=7)
        await store.put_lease(name, foreign)
        num_before = -1
        while num_before != (num := len(await store.parts("", name))):
            num_before = num
            await asyncio.sleep(4 * FAST.beat_s)
        assert await store.lease(name) == foreign
        batch = await until_ended(client, batch.id)  # the other one is heard of no more
        output = [each["custom_id"] for each in await contents(client, batch.output_file_id)]
        assert sorted(output) == sorted(map(str, range(40)))


async def test_a_cancelled_batch_keeps_what_was_answered(make_app):
    app = make_app(batch_concurrency=2, objects_per_key=1)  # output counts, but is always kept
    content = jsonl(*(line(str(number), max_tokens=1) for number in range(100)))
    async with official_of(app) as client:
        batch = await created(client, content)
        async with running(app):
            while not (await client.batches.retrieve(batch.id)).request_counts.completed:
                await asyncio.sleep(0.01)
        cancelled = await client.batches.cancel(batch.id)
        assert (cancelled.status, cancelled.cancelled_at) == ("cancelling", None)
        assert (await client.batches.retrieve(batch.id)).status == "cancelling"
        before = new_id()
        async with running(make_app(objects_per_key=1)):
            batch = await until_ended(client, batch.id)
        assert (batch.status, batch.completed_at) == ("cancelled", None)
        assert batch.created_at <= batch.cancelling_at <= batch.cancelled_at
        output = await contents(client, batch.output_file_id)
        assert 0 < len(output) == batch.request_counts.completed < 100
        assert batch.output_file_id > f"file-{before}", "files live on from the end of the batch"
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            await client.batches.cancel(batch.id)


async def test_an_expired_batch_says_which_requests_have_no_answer(make_app, monkeypatch):
    app = make_app(batch_concurrency=1)
    async with official_of(app) as client:
        batch = await created(client, jsonl(*map(line, "abc")), completion_window="30m")
        assert batch.expires_at - batch.created_at in (1799, 1800)
        store = app.state.batches.store
        name = batch.id.removeprefix("batch_")
        record = (await store.find_all("", [name]))[name]
        await store.update(name, record.model_copy(update={"expires_at": record.expires_at - 3600}))
        async with running(app):
            batch = await until_ended(client, batch.id)
        assert (batch.status, batch.output_file_id) == ("expired", None)
        errors = await contents(client, batch.error_file_id)
        assert [each["custom_id"] for each in errors] == ["a", "b", "c"]
        assert {each["error"]["code"] for each in errors} == {"batch_expired"}
        assert batch.request_counts.failed == 3


async def test_errors_of_the_input_name_their_lines(make_app):
    bad = [
        line("same"),
        line("same"),
        "",
        "{not json",
        "[1]",
        line("url", url="/v1/completions"),
        {**line("method"), "method": "GET"},
        line("stream", stream=True),
        line("background", background=True),
        "[" * 200 + "]" * 200,
        {"custom_id": "", "method": "POST", "url": CHAT, "body": {}},
        line("long", user="x" * 2000),
        {"custom_id": "body", "method": "POST", "url": CHAT, "body": []},
    ]
    app = make_app(limits={"body_bytes": 1500})
    async with running(app), official_of(app) as client:
        batch = await until_ended(client, (await created(client, jsonl(*bad))).id)
        assert (batch.status, batch.request_counts.total) == ("failed", 0)
        found = {error.line: (error.code, error.param) for error in batch.errors.data}
        assert found == {
            2: ("duplicate_custom_id", "custom_id"),
            4: ("invalid_json_line", None),
            5: ("invalid_value", None),
            6: ("mismatched_url", "url"),
            7: ("invalid_value", "method"),
            8: ("invalid_value", "stream"),
            9: ("invalid_value", "background"),
            10: ("body_too_large", None),
            11: ("invalid_value", "custom_id"),
            12: ("body_too_large", None),
            13: ("invalid_value", "body"),
        }
        batch = await until_ended(client, (await created(client, b"\n\n")).id)
        assert [error.code for error in batch.errors.data] == ["empty_file"]


async def test_keys_see_their_own_alone_and_removed_ones_end_their_batches(make_app):
    app = make_app(keys=({"key": "a"}, {"key": "b"}), objects_per_key=2)
    async with official_of(app, "a") as a, official_of(app, "b") as b:
        batch = await created(a, jsonl(line("x")))
        file_id = batch.input_file_id
        assert [each.id async for each in await b.files.list()] == []
        assert [each.id async for each in await b.batches.list()] == []
        for refused in (
            b.files.retrieve(file_id), b.files.content(file_id), b.files.delete(file_id),
            b.batches.retrieve(batch.id), b.batches.cancel(batch.id), created_from(b, file_id),
            a.files.retrieve("file-../x"), a.batches.retrieve(file_id),
        ):  # fmt: skip
            with pytest.raises(openai.NotFoundError):
                await refused
        await created(a, jsonl(line("y")))
        with pytest.raises(openai.RateLimitError, match="2 objects") as full:
            await created(a, jsonl(line("z")))
        assert full.value.body["code"] == "storage_full"
        async with running(make_app(keys=({"key": "b"},))):
            ended = await until_ended(a, batch.id)
        (error,) = ended.errors.data
        assert ended.status == "failed"
        assert error.code == "invalid_api_key"
        assert (await a.files.delete(file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await a.files.content(file_id)


def created_from(client: openai.AsyncOpenAI, file_id: str) -> Any:
    return client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")


async def test_a_key_with_few_requests_at_once_and_without_flex_gets_all_its_answers(make_app):
    app = make_app(keys=({"key": "a", "max_concurrent": 1, "tiers": ["default"]},))
    async with running(app), official_of(app, "a") as client:
        batch = await until_ended(client, (await created(client, jsonl(*map(line, "ab")))).id)
        assert batch.request_counts.model_dump() == {"total": 2, "completed": 2, "failed": 0}


async def test_lists_come_in_pages(make_app):
    async with official_of(make_app()) as client:
        ids = [(await created(client, jsonl(line("x")))).id for _ in range(3)]
        page = await client.batches.list(limit=2)
        assert ([each.id for each in page.data], page.has_more) == ([ids[2], ids[1]], True)
        assert {each.id async for each in page} == set(ids)
        with pytest.raises(openai.BadRequestError, match="after"):
            await client.batches.list(after="batch_x")
        assert [each async for each in await client.files.list(purpose="batch_output")] == []


async def test_uploads_are_refused_that_are_no_files_of_a_batch(make_app):
    app = make_app(file_bytes=2000)
    form = {"purpose": "batch"}
    async with client_of(app) as client:
        refusals = [
            ({"data": form}, 415, None),
            ({"json": form}, 415, None),
            ({"data": form, "files": {"other": b"x"}}, 400, "file"),
            ({"data": {"file": "x"}, "files": {"none": b"x"}}, 400, "file"),
            ({"files": {"file": b"x"}}, 400, "purpose"),
            ({"data": {"purpose": "fine-tune"}, "files": {"file": b"x"}}, 400, "purpose"),
            (
                {"data": {**form, "expires_after[seconds]": "1"}, "files": {"file": b"x"}},
                400,
                "expires_after",
            ),
            ({"data": form, "files": {"file": bytes(2001)}}, 413, "file"),
            ({"data": form, "files": {"file": bytes(200_000)}}, 413, "file"),
        ]
        for request, status, param in refusals:
            response = await client.post("/v1/files", **request)
            client.error_of(response, status, param)

        async def unmeasured():
            yield b"--x\r\ncontent-disposition: form-data; name=file; filename=f\r\n\r\n"
            for _ in range(50):
                yield bytes(10_000)

        headers = {"content-type": "multipart/form-data; boundary=x"}
        response = await client.post("/v1/files", content=unmeasured(), headers=headers)
        client.error_of(response, 413, "file")
        for content in (b"", b"--x\r\nbad", b"--x--"):
            response = await client.post("/v1/files", content=content, headers=headers)
            assert response.status_code == 400, response.text
        assert (await client.get("/v1/files")).json()["data"] == []


async def test_a_server_without_storage_says_how_to_have_one(client):
    for path in ("/v1/files", "/v1/files/file-x", "/v1/batches", "/v1/batches/batch_x"):
        assert "set storage.path" in client.error_of(await client.get(path), 404, None)
    body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"}
    assert "set storage.path" in await client.refusal("/v1/batches", body, 404, None)


async def test_bodies_of_batches_are_checked(make_app):
    async with client_of(make_app()) as client:
        file = {"file": ("f", jsonl(line("x")))}
        name = (await client.post("/v1/files", data={"purpose": "batch"}, files=file)).json()["id"]
        body = {"input_file_id": name, "endpoint": CHAT, "completion_window": "24h"}
        for field, value in (
            ("endpoint", "/v1/embeddings"), ("completion_window", "30d"),
            ("completion_window", "1"), ("metadata", {"a": 1}),
            ("metadata", {str(number): "" for number in range(17)}),
            ("output_expires_after", {"anchor": "created_at", "seconds": 3600}),
        ):  # fmt: skip
            message = await client.refusal("/v1/batches", {**body, field: value}, 400, field)
            assert value != "30d" or re.search("give 431[89][0-9]m or less, or upload", message)
