"""Responses in the background, and the bounds of what is stored, over engines that give passes."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic_core import to_json

from mars_platform.checkpoint.directory import Checkpoint
from mars_serve.api.keys import Caller
from mars_serve.api.text_threads import LARGE
from mars_serve.config.settings import KeySettings, StorageSettings
from mars_serve.engine.ipc.client import EngineDied
from mars_serve.http import stored_responses
from mars_serve.http.stored_responses import StoredResponse
from mars_serve.storage.objects import ObjectStorage, TenantThreads, new_id
from rest.api_keys import bearer, key_entry
from rest.asgi import scope_of
from rest.replaying import ReplayingBackend
from rest.rest_server import BrokenBackend, Client, app_of, client_of, served

PATH = "/v1/responses"
BODY = {"model": "mars", "input": "7?", "max_output_tokens": 8, "background": True}
KEYS = KeySettings(entries=[key_entry("a", requests_per_minute=4), key_entry("b")])
RUNNING = ("queued", "in_progress")


class Hanging(ReplayingBackend):
    """A backend that does not answer before it is told to."""

    def __init__(self) -> None:
        super().__init__([[50]])
        self.is_asked, self.goes_on = asyncio.Event(), asyncio.Event()

    async def complete(self, request: Any) -> Any:
        self.is_asked.set()
        await self.goes_on.wait()
        return await super().complete(request)


MakeApp = Callable[..., FastAPI]


@pytest.fixture
def make_app(mars: Checkpoint, tmp_path: Path) -> MakeApp:
    """Make an application with a storage: ``make_app(backend, directory, **settings)``."""

    def make(backend: Any = None, directory: str = "kept", **settings: Any) -> FastAPI:
        kept = StorageSettings(path=str(tmp_path / directory))
        model = served("mars", mars, backend or ReplayingBackend([[50], [51]]))
        app = app_of(model, **{"storage": kept, **settings})
        app.state.responses.beat_s = 0.01
        return app

    return make


async def ended(client: Client, name: str) -> dict[str, Any]:
    """Return a response once it has ended."""
    async with asyncio.timeout(20):
        while (found := (await client.get(f"{PATH}/{name}")).json())["status"] in RUNNING:
            await asyncio.sleep(0.01)
    return found


def kinds_in(directory: Path) -> Counter[str]:
    """Return the kinds of the objects in a storage."""
    return Counter(path.parent.name for path in directory.rglob("*") if path.is_file())


async def begun(client: Client, **fields: Any) -> str:
    name: str = (await client.answer(PATH, {**BODY, **fields}))["id"]
    return name


async def test_it_counts_once_and_names_unknown_fields(make_app, tmp_path):
    app = make_app(keys=KEYS)
    client = client_of(app, headers=bearer("a"))
    response = await client.post(PATH, json={**BODY, "odd": 1})
    assert response.headers["X-Marsray-Unknown-Fields"] == "odd"
    found = await ended(client, response.json()["id"])
    assert (found["status"], found["created_at"]) == ("completed", response.json()["created_at"])
    assert found["background"]
    assert found["store"]
    again = await client.post(PATH, json={**BODY, "background": False})
    assert again.headers["x-ratelimit-remaining-requests"] == "2"
    counted = [
        sample.value
        for family in app.state.telemetry.collect()
        for sample in family.samples
        if sample.name == "marsray_requests_total"
    ]
    assert sum(counted) == 2
    assert kinds_in(tmp_path) == {"responses": 2}


async def test_one_key_has_some_at_a_time_and_no_more_bytes_than_are_free(make_app, monkeypatch):
    app = make_app(Hanging(), keys=KeySettings(entries=[key_entry("a"), key_entry("b")]))
    async with app.router.lifespan_context(app):
        first, second = (client_of(app, headers=bearer(key)) for key in "ab")
        answers = await asyncio.gather(*(first.post(PATH, json=BODY) for _ in range(40)))
        assert Counter(each.status_code for each in answers) == {200: 32, 429: 8}
        refused = next(each for each in answers if each.status_code == 429)
        assert refused.json()["error"]["code"] == "background_full"
        assert int(refused.headers["retry-after"]) >= 5
        large = {"metadata": dict.fromkeys("abcdefgh", "x" * 512)}
        own = len(json.dumps({**BODY, **large}))
        monkeypatch.setattr(stored_responses, "_ROOM_RUNNING", _taken(app) + 2 * own + 2000)
        await begun(second, **large)
        error = await second.refusal(PATH, {**BODY, **large}, 429, "background")
        assert "1 of this key's and 33 in all" in error
        monkeypatch.setattr(stored_responses, "_MOST_RUNNING", 33)
        assert await second.refusal(PATH, BODY, 429, "background")


def _taken(app: FastAPI) -> int:
    return sum(size for _, size in app.state.responses._sizes.values())


async def test_a_server_that_ends_says_that_its_responses_failed(make_app, tmp_path):
    app = make_app(Hanging())
    async with app.router.lifespan_context(app):
        name = await begun(client_of(app))
    found = (await client_of(make_app()).get(f"{PATH}/{name}")).json()
    assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
    assert "was ended; send the request again" in found["error"]["message"]
    assert kinds_in(tmp_path) == {"responses": 1}


async def test_one_whose_process_was_killed_has_failed_or_was_cancelled(
    make_app, tmp_path, monkeypatch
):
    monkeypatch.setattr(stored_responses, "_CANCEL_S", 0.05)
    first = client_of(make_app(Hanging()))
    one, two = [f"{PATH}/{await begun(first)}" for _ in range(2)]
    ignored = shutil.ignore_patterns(".*")
    shutil.copytree(tmp_path / "kept", tmp_path / "left", ignore=ignored)  # as a kill leaves it
    second = make_app(directory="left")
    client, kept = client_of(second), second.state.responses
    assert (await client.post(f"{one}/cancel")).json()["status"] == "in_progress"
    assert (await client.get(two)).json()["status"] == "in_progress"
    kept.dead_s = 0  # and it has been silent since
    assert [(await client.get(each)).json()["status"] for each in (one, two)] == [
        "cancelled",
        "failed",
    ]
    assert kinds_in(tmp_path / "left") == {"responses": 2}


async def test_one_whose_process_lives_goes_on_for_others(make_app, tmp_path):
    name = await begun(client_of(make_app(Hanging())))
    other = make_app()
    other.state.responses.dead_s = 0
    (beat,) = tmp_path.rglob(f"response_beats/{name.removeprefix('resp_')}")
    for _ in range(3):
        found = await client_of(other).get(f"{PATH}/{name}")
        assert found.json()["status"] == "in_progress"
        before = beat.read_bytes()
        async with asyncio.timeout(20):
            while beat.read_bytes() == before:
                await asyncio.sleep(0.005)


async def test_a_key_that_is_gone_or_a_deadline_ends_it(make_app):
    app = make_app(backend := Hanging())
    name = await begun(client_of(app))
    await backend.is_asked.wait()

    async def nobody(_: str) -> Caller | None:
        return None

    app.state.responses.caller_of = nobody
    found = await ended(client_of(app), name)
    assert found["status"] == "failed"
    assert "no longer one of this server's" in found["error"]["message"]
    full = client_of(make_app(BrokenBackend(EngineDied("gone"))))
    found = await ended(full, await begun(full, deadline_ms=5000))
    assert (found["status"], found["error"]["message"]) == (
        "failed",
        "the replica has failed; try again shortly",
    )
    name = await begun(full)
    await asyncio.sleep(0.1)
    assert (await full.get(f"{PATH}/{name}")).json()["status"] == "in_progress"


class DisturbedThreads(TenantThreads):
    """Threads of a storage in which something else comes before one of the calls."""

    def __init__(self) -> None:
        super().__init__("storage", 32, 8)
        self.left = 10**6
        """Calls before it comes."""
        self.act: Callable[[], Awaitable[Any]]

    async def run(self, tenant: str, work: Callable[..., Any], *arguments: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            await self.act()
        return await super().run(tenant, work, *arguments)


def disturbed_storage(path: Path) -> tuple[ObjectStorage, DisturbedThreads]:
    """Return a storage in a directory, and its threads for short calls."""
    storage = ObjectStorage(StorageSettings(path=str(path)))
    storage.short = threads = DisturbedThreads()
    return storage, threads


@pytest.mark.parametrize("act", ["delete", "cancel"])
@pytest.mark.parametrize("is_hanging", [False, True])
async def test_what_was_deleted_or_cancelled_stays_so_whenever_it_was(
    make_app, tmp_path, act, is_hanging
):
    backend = Hanging() if is_hanging else None
    storage, threads = disturbed_storage(tmp_path / "kept")
    other, app = client_of(make_app(backend)), make_app(backend)
    app.state.responses.storage = storage
    tasks = app.state.responses._tasks
    for place in range(1, 12):
        name = await begun(client_of(app))
        path, acts = f"{PATH}/{name}", list[asyncio.Task[Any]]()

        async def disturb(path: str = path, acts: list[asyncio.Task[Any]] = acts) -> None:
            sent = other.delete(path) if act == "delete" else other.post(f"{path}/cancel")
            acts.append(asyncio.create_task(sent))
            await asyncio.wait(acts, timeout=0.03)  # a cancellation waits for the response to end

        threads.act, threads.left = disturb, place
        async with asyncio.timeout(20):
            while tasks:
                await asyncio.sleep(0.005)
            if not acts:  # it ended before
                await disturb()
            (answer,) = await asyncio.gather(*acts)
        threads.left = 10**6
        assert answer.status_code == 200, answer.text
        last = await other.get(path)
        if act == "delete":
            assert last.status_code == 404, place
        else:
            assert last.json() == answer.json()
            expected = {"cancelled"} if backend else {"cancelled", "completed"}
            assert last.json()["status"] in expected, place
    assert kinds_in(tmp_path) == ({} if act == "delete" else {"responses": 11})


@pytest.mark.parametrize("act", ["delete", "cancel"])
async def test_one_that_ends_while_it_is_deleted_or_cancelled_leaves_no_mark(
    make_app, tmp_path, act
):
    app, other = make_app(backend := Hanging()), make_app()
    storage, threads = disturbed_storage(tmp_path / "kept")
    other.state.responses.storage = storage
    client, tasks = client_of(other), app.state.responses._tasks

    async def end() -> None:
        backend.goes_on.set()
        await asyncio.gather(*tasks)

    for place in range(1, 7):
        backend.goes_on.clear()
        path = f"{PATH}/{await begun(client_of(app))}"
        threads.act, threads.left = end, place
        sent = client.delete(path) if act == "delete" else client.post(f"{path}/cancel")
        assert (await sent).status_code == 200
        threads.left = 10**6
        await end()
    assert kinds_in(tmp_path) == ({} if act == "delete" else {"responses": 6})


async def test_a_full_storage_takes_no_answer_of_the_background(make_app, tmp_path, monkeypatch):
    kept = StorageSettings(path=str(tmp_path / "kept"), bytes_per_key=2 * 2**20)
    app = make_app(backend := Hanging(), storage=kept)
    monkeypatch.setattr(stored_responses, "_ROOM_BYTES", 100)
    client = client_of(app)
    storage = app.state.responses.storage
    queued = await begun(client)
    await storage.put("", "files", new_id(), bytes(3 * 2**20), "exceed")
    backend.goes_on.set()
    assert (await ended(client, queued))["status"] == "completed"


async def test_what_is_stored_of_a_conversation_is_bounded(make_app):
    app = make_app(limits={"body_bytes": 50_000})
    client, kept = client_of(app), app.state.responses
    plain = {**BODY, "background": None}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x" * 9000}],
               "content": [{"type": "reasoning_text", "text": "y"}],
               "encrypted_content": "z" * 9000}  # fmt: skip
    first = await client.answer(PATH, {**plain, "input": [thought]})
    (item,) = (await client.get(f"{PATH}/{first['id']}/input_items")).json()["data"]
    assert (item["summary"], item["content"][0]["text"]) == ([], "y")
    assert item["encrypted_content"] is None
    second = await client.answer(PATH, {**plain, "previous_response_id": first["id"]})
    answered, _ = (await client.get(f"{PATH}/{second['id']}/input_items")).json()["data"][:0:-1]
    assert answered["encrypted_content"] is None
    items = (await client.get(f"{PATH}/{second['id']}/input_items?order=asc")).json()["data"]
    assert [each["type"] for each in items] == ["reasoning", "message", "message"]
    first["output"][0]["content"][0]["logprobs"] = [{"token": "x"}]
    (before,) = StoredResponse.of(first, b"[]").conversation
    assert before["content"][0]["logprobs"] == []
    plain["truncation"] = "auto"
    many = [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 1000}]
    assert (await client.answer(PATH, {**plain, "input": many}))["store"]
    many = [{"role": "assistant", "content": [{"type": "output_text", "text": ""}] * 1000}]
    assert not (await client.answer(PATH, {**plain, "input": many}))["store"]
    error = await client.refusal(PATH, {**plain, "input": many, "store": True}, 400, "store")
    assert "50000 bytes" in error
    named = [{"type": "item_reference", "id": f"msg_{new_id()}_0"} for _ in range(17)]
    error = await client.refusal(PATH, {**plain, "input": named}, 400, "input")
    assert "items of 17 responses are named; name those of 16" in error
    kept.limits = kept.limits.model_copy(update={"body_bytes": 100})
    error = await client.refusal(PATH, {**plain, "previous_response_id": first["id"]}, 400, "input")
    assert "4 times limits.body_bytes" in error


async def test_what_a_request_goes_on_from_counts_as_a_part_of_its_body(make_app):
    app, caller = make_app(), Caller("")
    client, kept = client_of(app), app.state.responses
    stored = await client.answer(PATH, {**BODY, "background": None})
    name = new_id()
    item = {"type": "message", "id": "msg_1", "role": "user", "content": "x" * LARGE}
    await kept.keep(caller, name, stored, to_json([item]))
    body = {**BODY, "background": None, "previous_response_id": f"resp_{name}"}
    threads = kept.threads
    assert "cannot fit" in await client.refusal(PATH, body, 400, "input")
    with threads.load(caller) as other:
        threads.add(other, threads._room - LARGE)
        assert await client.refusal(PATH, body, 503, None)
        assert (await client.get(f"{PATH}/resp_{name}")).status_code == 503
    assert (await client.get(f"{PATH}/resp_{name}")).json() == stored
    assert not threads._taken


async def test_a_slow_reader_of_a_stored_response_counts_until_it_has_all(make_app):
    app = make_app()
    taken, is_read = app.state.responses.threads._taken, asyncio.Event()
    stored = await client_of(app).answer(PATH, {**BODY, "background": None})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await is_read.wait()

    path = f"{PATH}/{stored['id']}"
    reading = asyncio.create_task(app(scope_of("GET", path), asyncio.Event().wait, send))
    async with asyncio.timeout(20):
        while not taken:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert taken[""] > len(json.dumps(stored["output"]))
        is_read.set()
        await reading
    assert not taken
