"""Files and batches by OpenAI's client, over an engine in this process."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp

from mars_serve.config.served import ServedModel
from mars_serve.config.settings import KeySettings, LimitSettings, StorageSettings
from mars_serve.http.batches import records, run, runner
from mars_serve.http.batches.records import ENDED, Lease
from mars_serve.http.batches.run import Pace
from mars_serve.http.endpoints import files
from mars_serve.http.in_process import OwnRequests
from mars_serve.storage.objects import new_id
from rest.api_keys import bearer, key_entry
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
        foreign = Lease(tenant="", expires_at=batch.expires_at, owner="another", beat=7)
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
        second = await created(a, jsonl(line("y")))
        with pytest.raises(openai.RateLimitError, match="2 objects") as full:
            await created(a, jsonl(line("z")))
        assert full.value.body["code"] == "storage_full"
        moved = make_app(keys=({"key": "a", "tenant": "others"}, {"key": "b"}))
        for other, name in ((moved, second.id), (make_app(keys=({"key": "b"},)), batch.id)):
            async with running(other):
                ended = await until_ended(a, name)
            assert (ended.status, ended.errors.data[0].code) == ("failed", "invalid_api_key")
            assert (ended.output_file_id, ended.request_counts.completed) == (None, 0)
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


class Door:
    """An application whose requests wait until it opens, beside a count of those inside."""

    def __init__(self, app: FastAPI) -> None:
        self.num_inside = self.most_inside = 0
        self.is_open = asyncio.Event()
        self._app = app
        means = app.state.batches.means
        app.state.batches.means = replace(means, requests=OwnRequests(self))

    async def __call__(self, *call: Any) -> None:
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        await self.is_open.wait()
        await self._app(*call)
        self.num_inside -= 1


async def some_answered(client: openai.AsyncOpenAI, batch_id: str) -> None:
    while not (await client.batches.retrieve(batch_id)).request_counts.completed:
        await asyncio.sleep(0.01)


def name_of(batch: Any) -> str:
    return batch.id.removeprefix("batch_")


async def test_lines_wait_in_the_file_while_others_take_their_room(make_app, monkeypatch):
    app = make_app()
    lines = [line(str(number), max_tokens=1) for number in range(9)]
    size = len(jsonl(lines[0]))
    monkeypatch.setattr(run, "_LINES_BYTES", 2 * size + size // 2)
    monkeypatch.setattr(run, "_READ_BYTES", size)
    door = Door(app)
    lines.append(line("long", max_tokens=1, user="x" * 3 * size))
    async with running(app), official_of(app) as client:
        batch = await created(client, jsonl(*lines))
        while door.num_inside < 2:
            await asyncio.sleep(0.01)
        door.is_open.set()
        batch = await until_ended(client, batch.id)
    assert (batch.request_counts.completed, door.most_inside) == (10, 2)


async def test_a_tenant_may_have_so_many_batches_that_have_not_ended(make_app, monkeypatch):
    monkeypatch.setattr(records, "_MOST_UNFINISHED", 2)
    app = make_app(keys=({"key": "a"}, {"key": "b"}))
    # batches that have ended keep their leases, as they do until their parts are deleted
    monkeypatch.setattr(app.state.batches.store, "clear", lambda *_: asyncio.Event().wait())
    async with official_of(app, "a") as a, official_of(app, "b") as b:
        batch = await created(a, jsonl(line("x")))
        batches = [created_from(a, batch.input_file_id) for _ in range(5)]
        found = await asyncio.gather(*batches, return_exceptions=True)
        refused = [each for each in found if isinstance(each, openai.RateLimitError)]
        assert len(refused) >= 4
        assert {each.body["code"] for each in refused} == {"too_many_batches"}
        assert "have not ended, and 2 may; wait for some to end, or cancel" in str(refused[0])
        await created(b, jsonl(line("x")))
        async with running(app):
            for each in (batch, *(each for each in found if each not in refused)):
                await until_ended(a, each.id)
        await created_from(a, batch.input_file_id)


async def test_batches_that_wait_for_others_end_when_they_are_cancelled_or_expire(
    make_app, monkeypatch
):
    monkeypatch.setattr(runner, "_MOST_RUNS_OF_TENANT", 1)
    app = make_app()
    store, door = app.state.batches.store, Door(app)
    async with running(app), official_of(app) as client:
        first = await created(client, jsonl(line("x")))
        while not door.num_inside:
            await asyncio.sleep(0.01)
        cancelled, expired, waiting = [
            await created(client, jsonl(line(each))) for each in ("cancelled", "expired", "waits")
        ]
        await client.batches.cancel(cancelled.id)
        assert (await until_ended(client, cancelled.id)).status == "cancelled"
        record = (await store.find_all("", [name_of(expired)]))[name_of(expired)]
        await store.update(name_of(expired), record.model_copy(update={"expires_at": 1}))
        await store.put_lease(name_of(expired), Lease(tenant="", expires_at=1))
        runner_leases = await store.leases([name_of(waiting)])
        app.state.batches._seen.clear()  # as by another process, which has not read it yet
        assert (await until_ended(client, expired.id)).status == "expired"
        assert (await client.batches.retrieve(waiting.id)).status == "validating"
        assert await store.leases([name_of(waiting)]) == runner_leases
        door.is_open.set()
        for each in (first, waiting):
            assert (await until_ended(client, each.id)).status == "completed"
        assert await store.cancelled() == set()


async def test_answers_outlive_their_input(make_app):
    app = make_app(batch_concurrency=1)
    async with official_of(app) as client:
        batch = await created(client, jsonl(*(line(str(each), max_tokens=1) for each in range(40))))
        async with running(app):
            await some_answered(client, batch.id)
        await client.files.delete(batch.input_file_id)
        async with running(make_app()):
            batch = await until_ended(client, batch.id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "input_file_gone")
        output = await contents(client, batch.output_file_id)
        assert 0 < len(output) == batch.request_counts.completed < 40


@pytest.mark.parametrize("is_expired", [False, True])
async def test_lines_beyond_limits_that_were_lowered_are_errors(make_app, is_expired):
    app = make_app(batch_concurrency=1)
    long = [line(each, max_tokens=1, user="x" * 1500) for each in ("long", "cut")]
    lines = [*(line(str(each), max_tokens=1) for each in range(20)), long[0]]
    lines.append(dict(reversed(long[1].items())))  # its custom_id comes last
    async with official_of(app) as client:
        batch = await created(client, jsonl(*lines))
        async with running(app):
            await some_answered(client, batch.id)
        store, name = app.state.batches.store, name_of(batch)
        if is_expired:
            record = (await store.find_all("", [name]))[name]
            await store.update(name, record.model_copy(update={"expires_at": 1}))
        async with running(make_app(limits={"body_bytes": 1024})):
            batch = await until_ended(client, batch.id)
        assert batch.status == ("expired" if is_expired else "completed")
        errors = await contents(client, batch.error_file_id)
        codes = {each["custom_id"]: each["error"]["code"] for each in errors}
        code = "batch_expired" if is_expired else "body_too_large"
        assert (codes["long"], codes["line 22"]) == (code, code)
        assert len(errors) == batch.request_counts.failed


@pytest.fixture
def slow_put(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[asyncio.Task[None]]]:
    """Let a storage write late what begins with a kind and has a text, as a thread of it might."""

    def make(
        app: FastAPI, kind: str, delay_s: float, text: bytes = b""
    ) -> list[asyncio.Task[None]]:
        storage, writes = app.state.batches.store.files.storage, list[asyncio.Task[None]]()
        put = storage.put

        async def late(*put_arguments: Any, **others: Any) -> None:
            await asyncio.sleep(delay_s)
            await put(*put_arguments, **others)

        async def maybe_late(*arguments: Any, **others: Any) -> None:
            if arguments[1].startswith(kind) and text in arguments[3]:
                writes.append(asyncio.create_task(late(*arguments, **others)))
                await asyncio.shield(writes[-1])  # nothing stops a thread
            else:
                await put(*arguments, **others)

        monkeypatch.setattr(storage, "put", maybe_late)
        return writes

    return make


async def test_a_record_that_is_written_late_does_not_undo_the_end(make_app, slow_put):
    app = make_app(batch_concurrency=1)
    async with running(app), official_of(app) as client:
        batch = await created(client, jsonl(*map(line, "abcdefgh")))
        while (await client.batches.retrieve(batch.id)).status != "in_progress":
            await asyncio.sleep(0.01)
        writes = slow_put(app, "batches", 0.3, b'"status":"in_progress"')
        await until_ended(client, batch.id)
        assert writes
        await asyncio.gather(*writes)
        assert (await client.batches.retrieve(batch.id)).status == "completed"


async def test_answers_that_are_being_written_at_the_end_are_kept_once(
    make_app, slow_put, monkeypatch
):
    monkeypatch.setattr(run, "_PART_BYTES", 1)
    app = make_app(batch_concurrency=4)
    writes = slow_put(app, "batch_parts", 0.1)
    async with running(app), official_of(app) as client:
        batch = await created(client, jsonl(*(line(str(each), max_tokens=1) for each in range(40))))
        while not writes:
            await asyncio.sleep(0.01)
        await client.batches.cancel(batch.id)
        batch = await until_ended(client, batch.id)
        await asyncio.gather(*writes)
        output = await contents(client, batch.output_file_id)
        assert 0 < len(output) == batch.request_counts.completed < 40
        async with asyncio.timeout(10):
            while await app.state.batches.store.parts("", name_of(batch)):
                await asyncio.sleep(0.01)  # they go once the record says that the batch has ended


async def test_a_batch_lives_while_its_check_waits_for_other_keys_files(make_app):
    app = make_app()
    store, is_free = app.state.batches.store, Event()
    long = store.files.storage.long
    async with official_of(app) as client, running(app):
        file = await client.files.create(file=("f", jsonl(line("x"))), purpose="batch")
        others = [asyncio.create_task(long.run(str(each), is_free.wait)) for each in range(4)]
        try:
            batch = await created_from(client, file.id)
            while (await store.lease(name_of(batch))).beat < 4:
                await asyncio.sleep(0.01)
            assert (await client.batches.retrieve(batch.id)).status == "validating"
        finally:
            is_free.set()  # Python's end would wait for the threads
        assert (await until_ended(client, batch.id)).status == "completed"
        assert all(await asyncio.gather(*others))


async def test_uploads_of_all_keys_share_the_room_on_the_disk(make_app, monkeypatch):
    monkeypatch.setattr(files, "_UPLOADED_FILES", 1)
    app = make_app(keys=({"key": "a"}, {"key": "b"}), file_bytes=60_000)
    may_end = asyncio.Event()

    async def slow() -> Any:
        yield b"--x\r\ncontent-disposition: form-data; name=file; filename=f\r\n\r\n" + bytes(
            58_000
        )
        await may_end.wait()
        yield b'\r\n--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'

    headers = {"content-type": "multipart/form-data; boundary=x"}
    async with client_of(app, headers=bearer("a")) as a, official_of(app, "b") as b:
        upload = asyncio.create_task(a.post("/v1/files", content=slow(), headers=headers))
        content = jsonl(line("x", user="x" * 58_000))

        async def until_refused() -> None:
            while True:  # until the other's has begun
                await b.files.create(file=("f", content), purpose="batch")

        with pytest.raises(openai.InternalServerError, match="too many uploads") as full:
            await until_refused()
        assert (full.value.status_code, full.value.body["code"]) == (503, "busy")
        may_end.set()
        assert (await upload).status_code == 200
        await b.files.create(file=("f", content), purpose="batch")
