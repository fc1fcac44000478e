"""A full queue and a flood of one key, through the REST application."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from decoding.local_engine_client import LocalEngineClient
from mars_platform.data.prompt_encoding import PromptEncoder
from mars_serve.engine.ipc.client import QueueFull
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from rest import asgi
from rest.api_keys import bearer, key_entry
from rest.rest_requests import COMPLETIONS
from rest.rest_server import ENGINE, Client, SingleEngineBackend, app_of, client_of, served
from waiting import until

BODY = {"model": "mars", "prompt": "What is 3 plus 4?", "max_tokens": 2}
JSON = {"Content-Type": "application/json"}
SIZE = 8


class HeldBackend(SingleEngineBackend):
    """A backend with a queue of `SIZE` places, whose requests go on when they are let go."""

    def __init__(self, loop: LocalEngineClient) -> None:
        super().__init__(loop)
        self.num_held = self.num_asked = 0
        self.go_on = asyncio.Event()

    async def complete(self, request: Request) -> list[StepOutput]:
        return [output async for output in self.stream(request)]

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        self.num_asked += 1
        if self.num_held == SIZE:
            raise QueueFull("full")
        self.num_held += 1
        try:
            await self.go_on.wait()
            async for output in super().stream(request):
                yield output
        finally:
            self.num_held -= 1


@pytest.fixture
async def backend(mars, make_loop) -> HeldBackend:
    return HeldBackend(make_loop(mars))


def app_over(mars, backend: HeldBackend, **settings: Any) -> FastAPI:
    model = served("mars", mars, backend)
    engine = ENGINE.model_copy(update={"max_requests": SIZE})
    sized = replace(model, settings=model.settings.model_copy(update={"engine": engine}))
    return app_of(sized, **settings)


def client_over(mars, backend: HeldBackend, **settings: Any) -> Client:
    return client_of(app_over(mars, backend, **settings))


async def post(client: Client, key: str | None = None, **fields: Any) -> httpx2.Response:
    return await client.post(COMPLETIONS, json={**BODY, **fields}, headers=bearer(key))


async def flood(
    client: Client, key: str | None, num_stay: int, **fields: Any
) -> list[asyncio.Task[httpx2.Response]]:
    """Send more requests than the queue holds, and wait until only some are left to wait."""
    sent = [asyncio.create_task(post(client, key, **fields)) for _ in range(3 * SIZE)]

    async def are_refused() -> bool:
        return sum(task.done() for task in sent) == len(sent) - num_stay

    await until(are_refused, "the others are refused")
    return sent


def refusals_of(tasks: list[asyncio.Task[httpx2.Response]]) -> Counter[tuple[int, str]]:
    found = [task.result() for task in tasks if task.done()]
    return Counter((each.status_code, each.json()["error"]["code"]) for each in found)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_flood_of_one_key_leaves_room_for_another(mars, backend, stream):
    keys = {"entries": [key_entry("hog"), key_entry("other")]}
    async with client_over(mars, backend, keys=keys) as client:
        hog = await flood(client, "hog", SIZE // 2, stream=stream)
        assert refusals_of(hog) == {(429, "rate_limit_exceeded"): 3 * SIZE - SIZE // 2}
        other = asyncio.create_task(post(client, "other"))
        backend.go_on.set()
        assert (await other).status_code == 200
        assert Counter(each.status_code for each in await asyncio.gather(*hog))[200] == SIZE // 2
        refused = next(each for each in hog if each.result().status_code == 429).result()
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert "choices_per_key" in client.error_of(refused, 429, None)
        assert (await post(client, "hog")).status_code == 200, "the places are free again"


async def test_several_ingress_replicas_have_even_shares_of_the_queue(mars, backend):
    keys = {"entries": [key_entry("hog"), key_entry("other")]}
    async with client_over(mars, backend, keys=keys, proxy={"num_replicas": 2}) as client:
        hog = await flood(client, "hog", SIZE // 4)
        assert set(refusals_of(hog)) == {(429, "rate_limit_exceeded")}
        backend.go_on.set()
        await asyncio.gather(*hog)


@pytest.mark.parametrize("key", [None, "only"])
async def test_a_single_key_fills_the_queue_and_a_full_engine_is_not_asked_again(
    mars, backend, key
):
    keys = {"entries": [key_entry("only")]} if key else {}
    async with client_over(mars, backend, keys=keys) as client:
        sent = await flood(client, key, SIZE)
        assert backend.num_held == SIZE
        assert refusals_of(sent) == {(503, "queue_full"): 2 * SIZE}
        asked = backend.num_asked
        refused = await post(client, key)
        assert (refused.status_code, backend.num_asked) == (503, asked)
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        backend.go_on.set()
        assert Counter(each.status_code for each in await asyncio.gather(*sent))[200] == SIZE
        assert (await post(client, key)).status_code == 200


async def half_sent(app: FastAPI, key: str, leaves: asyncio.Event) -> None:
    """Send the beginning of a body, and hang up when told to."""
    incoming = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(_: object) -> None:
        raise AssertionError

    await app(asgi.scope_of("POST", COMPLETIONS, {**JSON, **bearer(key)}), receive, send)


async def test_a_request_has_its_place_before_its_body_is_read(mars, backend):
    keys = {"entries": [key_entry("hog"), key_entry("other")]}
    backend.go_on.set()
    app = app_over(mars, backend, keys=keys)
    leaves = asyncio.Event()
    sent = [asyncio.create_task(half_sent(app, "hog", leaves)) for _ in range(SIZE // 2)]
    async with client_of(app) as client:
        await asyncio.sleep(0)
        assert (await post(client, "hog")).status_code == 429
        assert (await post(client, "other")).status_code == 200
        leaves.set()
        await asyncio.gather(*sent)
        assert (await post(client, "hog")).status_code == 200, "the places are free again"


async def test_no_more_texts_are_tokenized_than_a_key_has_places(mars, backend, monkeypatch):
    num_read, read = 0, PromptEncoder.text

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal num_read
        num_read += 1
        return read(*args, **options)

    monkeypatch.setattr(PromptEncoder, "text", counted)
    keys = {"entries": [key_entry("hog"), key_entry("other")]}
    async with client_over(mars, backend, keys=keys) as client:
        words = [str(number) for number in range(20)]  # so many that a thread tokenizes them
        sent = await flood(client, "hog", SIZE // 2, prompt=[5], bad_words=words)
        backend.go_on.set()
        await asyncio.gather(*sent)
    assert num_read == SIZE // 2 * 2 * len(words)


FAILURES: dict[str, dict[str, Any]] = {
    "no JSON": {"content": b"{"},
    "no object": {"content": b"[]"},
    "type": {"content": b"{}", "headers": {"Content-Type": "text/plain"}},
    "value": {"json": {**BODY, "temperature": 9}},
    "model": {"json": {**BODY, "model": "none"}},
    "too long": {"json": {**BODY, "prompt": "plus " * 3000}},
    "long number": {"content": b"[" + b"9" * 2**19},
    "stream": {"json": {**BODY, "stream": True, "prompt_logprobs": 1}},
    "stop": {"json": {**BODY, "stop": ["x"] * 20}},
}


@pytest.mark.parametrize("case", FAILURES)
async def test_a_request_that_fails_keeps_no_place(mars, backend, case):
    keys = {"entries": [key_entry("hog"), key_entry("other")]}
    backend.go_on.set()
    request = FAILURES[case]
    headers = {**JSON, **bearer("hog"), **request.get("headers", {})}
    async with client_over(mars, backend, keys=keys) as client:
        for _ in range(SIZE):
            response = await client.post(COMPLETIONS, **{**request, "headers": headers})
            assert 400 <= response.status_code < 500
        assert [
            each.status_code
            for each in await asyncio.gather(*(post(client, "hog") for _ in range(SIZE // 2)))
        ] == [200] * (SIZE // 2)


async def test_a_limit_of_outputs_per_key_is_a_setting(mars, backend):
    async with client_over(mars, backend, limits={"choices_per_key": 3}) as client:
        message = await client.refusal(COMPLETIONS, {**BODY, "n": 4}, 400, "n")
        assert "4 outputs exceed the 3 that one key may have at once" in message


async def test_a_body_is_not_read_where_the_queue_has_no_place(mars, backend, monkeypatch):
    async with client_over(mars, backend) as client:
        sent = await flood(client, None, SIZE)
        monkeypatch.setattr("json.loads", None)
        refused = await client.post(COMPLETIONS, content="{}", headers=JSON)
        monkeypatch.undo()
        assert refused.status_code == 503
        assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 200
        backend.go_on.set()
        await asyncio.gather(*sent)
        assert 'model="mars",outcome="rejected_503"' in (await client.get("/metrics")).text


async def test_a_full_queue_of_one_model_is_not_in_the_way_of_another(mars, backend, make_loop):
    engine = ENGINE.model_copy(update={"max_requests": SIZE})
    models = []
    for name, each in (("mars", backend), ("other", SingleEngineBackend(make_loop(mars)))):
        model = served(name, mars, each)
        sized = model.settings.model_copy(update={"engine": engine})
        models.append(replace(model, settings=sized))
    async with client_of(app_of(*models)) as client:
        sent = await flood(client, None, SIZE)
        assert (await post(client)).status_code == 503
        assert (await post(client, model="other")).status_code == 200
        backend.go_on.set()
        await asyncio.gather(*sent)
