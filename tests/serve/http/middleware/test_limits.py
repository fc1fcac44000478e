from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from ray.exceptions import ActorDiedError, RayTaskError, WorkerCrashedError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)

from decoding.local_engine_client import LocalEngineClient
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.errors import UserError
from mars_serve.config.served import ServedModel
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution.fault_isolation import Step
from mars_serve.engine.ipc.client import (
    DeadlineMissed,
    EngineDied,
    QueueFull,
    QueueTimeout,
    RequestFailed,
)
from mars_serve.http.middleware.errors import as_api_error
from rest import asgi
from rest.api_keys import bearer, key_entry
from rest.rest_requests import CHAT, COMPLETIONS
from rest.rest_server import (
    ENGINE,
    BrokenBackend,
    SingleEngineBackend,
    app_of,
    client_of,
    served,
)
from waiting import soon

GOLDEN = {"model": "mars", "prompt": "What is 3 plus 4?", "max_tokens": 12, "mode": "exact"}
COMPLETION = {"model": "mars", "prompt": "x", "max_tokens": 2}
JSON = {"Content-Type": "application/json"}
BODY_BYTES = 4096
BROKEN = {
    "full": QueueFull("secret"),
    "late": QueueTimeout("secret"),
    "dead": EngineDied("secret"),
    "failed": RequestFailed("secret"),
    "odd": KeyError("secret"),
    "remote-full": RayTaskError("stream", "secret", QueueFull("x")).as_instanceof_cause(),
    "hopeless": DeadlineMissed("the request would wait about 7.0 s", 7.0),
}


TIERS = ["default", "flex", "priority"]
KEYS = [
    key_entry("golden", tiers=TIERS),
    key_entry("plain", tiers=["default"]),
    key_entry("one", max_concurrent=1),
    key_entry("rare", requests_per_minute=2),
    key_entry("small", tokens_per_minute=6),
]


@pytest.fixture(scope="module")
def make_app(models: list[ServedModel], mars: Checkpoint) -> Callable[[], FastAPI]:
    """Make applications whose keys have not been used yet."""
    broken = [served(name, mars, BrokenBackend(error)) for name, error in BROKEN.items()]
    return lambda: app_of(
        *models, *broken, limits={"body_bytes": BODY_BYTES}, keys={"entries": KEYS}
    )


@pytest.fixture
async def client(make_app: Callable[[], FastAPI]) -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(make_app(), headers=bearer("plain")) as client:
        yield client


@pytest.fixture
async def shared(app_of_errors: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of the application on which all errors are provoked."""
    async with client_of(app_of_errors, headers=bearer("plain")) as client:
        yield client


@pytest.fixture(scope="module")
def app_of_errors(make_app: Callable[[], FastAPI]) -> FastAPI:
    return make_app()


@pytest.fixture(scope="module")
def golden(make_app: Callable[[], FastAPI]) -> str:
    """Return the output of the golden request on a server of its own."""

    async def ask() -> str:
        async with client_of(make_app(), headers=bearer("golden")) as client:
            return await text_of(client)

    return asyncio.run(ask())


async def text_of(client: httpx2.AsyncClient) -> str:
    response = await client.post(COMPLETIONS, json=GOLDEN, headers=bearer("golden"))
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def changed(**fields: Any) -> dict[str, Any]:
    return {"json": {**COMPLETION, **fields}}


def raw(content: bytes, **headers: str) -> dict[str, Any]:
    return {"content": content, "headers": {**JSON, **headers}}


def escaped(field: str, value: Any = "\ud800") -> dict[str, Any]:
    return raw(json.dumps({**COMPLETION, field: value}).encode())


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b" " * 1000


DEEP = b"[" * 101 + b"]" * 101
HIDDEN = b'{"prompt": "a \\" b", "x": ' + DEEP + b"}"


def post(
    request: dict[str, Any], status: int, code: str | None = None, param: str | None = None
) -> tuple[Any, ...]:
    """Return a completion request with the status, code and param of its error."""
    return "POST", COMPLETIONS, request, status, code, param


MODELS = {
    "full": (503, "queue_full"),
    "late": (503, "queue_timeout"),
    "hopeless": (503, "deadline", "deadline_ms"),
    "dead": (503, "not_ready"),
    "remote-full": (503, "queue_full"),
    "failed": (500, "request_failed"),
    "odd": (500, "internal_error"),
}
ERRORS: dict[str, tuple[Any, ...]] = {
    # method, path, request, status, code, param
    "wrong key": ("GET", "/v1/models", {"headers": bearer("x")}, 401, "invalid_api_key", None),
    "no admin": ("GET", "/admin/threshold", {}, 403, "not_allowed", None),
    "tier": post(changed(service_tier="priority"), 403, "tier_not_allowed", "service_tier"),
    "path": ("GET", "/v1/nothing", {}, 404, "not_found", None),
    "slash": ("POST", COMPLETIONS + "/", changed(), 404, "not_found", None),
    "long path": ("GET", "/" + "x" * 5000, {}, 404, "not_found", None),
    "model": post(changed(model="x" * 4000), 404, "model_not_found", "model"),
    "method": ("GET", COMPLETIONS, {}, 405, "method_not_allowed", None),
    "method of health": ("PUT", "/health", changed(), 405, "method_not_allowed", None),
    "declared size": post(raw(b" " * (BODY_BYTES + 1)), 413, "body_too_large"),
    "size of chunks": post(raw(endless), 413, "body_too_large"),
    "size on any path": ("POST", "/nothing", raw(endless), 413, "body_too_large", None),
    "gzip": post(raw(b"x", **{"Content-Encoding": "gzip"}), 415, "unsupported_encoding"),
    "no JSON": post(raw(b"{"), 422, "unparsable"),
    "no object": post(raw(b"[]"), 422, "unparsable"),
    "no body": post(raw(b""), 422, "unparsable"),
    "JSON string": post(raw(b'"text"'), 422, "unparsable"),
    "no UTF-8": post(raw(b"\xff{}"), 422, "unparsable"),
    "deep": post(raw(DEEP), 422, "unparsable"),
    "deep behind a string": post(raw(HIDDEN), 422, "unparsable"),
    "deep without end": post(raw(b"[" * 4000), 422, "unparsable"),
    "UTF-16": post(raw(json.dumps(COMPLETION).encode("utf-16-le")), 422, "unparsable"),
    "long number": post(raw(b"9" * 4050), 422, "unparsable"),
    "value": post(changed(temperature=3), 400, "invalid_value", "temperature"),
    "deadline that is no number": post(
        raw(json.dumps({**COMPLETION, "deadline_ms": math.nan}).encode()), 400, None, "deadline_ms"
    ),
    "long value": post(changed(mode="x" * 4000), 400, "invalid_value", "mode"),
    **{
        f"lone surrogate in {field}": post(escaped(field), 400, "invalid_value", field)
        for field in ("mode", "prompt", "stop", "model", "user", "session_id", "metadata")
    },
    "lone surrogate in a name": post(escaped("\udc00"), 400, "invalid_value", "?"),
    "lone surrogate in bytes": post(
        raw(json.dumps(COMPLETION).encode()[:-1] + b', "user": "\xed\xa0\x80"}'), 400, None, "user"
    ),
    **{
        f"lone surrogate within {field}": ("POST", CHAT, escaped(field, value), 400, None, field)
        for field, value in {
            "messages": [{"role": "user", "content": "a", "name": "\ud800"}],
            "tools": [{"type": "function", "function": {"name": "f", "description": "\ud800a"}}],
            "response_format": {"type": "json_object", "x": ["\ud83d", "\ude00"]},
        }.items()
    },
    **{f"model is {name}": post(changed(model=name), *MODELS[name]) for name in MODELS},
}
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def check_error(
    response: httpx2.Response, status: int, code: str | None, param: str | None
) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    other = "invalid_request_error" if status < 500 else "server_error"
    assert error["type"] == TYPES.get(status, other)
    assert error["param"] == param
    assert code is None or error["code"] == code
    assert len(error["message"]) <= 1000
    assert "secret" not in response.text
    assert ("retry-after" in response.headers) == (status in (429, 503))


@pytest.mark.parametrize("case", ERRORS)
async def test_an_error_does_not_affect_a_concurrent_request(shared, golden, case):
    method, path, request, status, code, param = ERRORS[case]
    if callable(request.get("content")):
        request = {**request, "content": request["content"]()}
    beside = asyncio.create_task(text_of(shared))
    await asyncio.sleep(0)
    response = await shared.request(method, path, **request)
    check_error(response, status, code, param)
    assert await beside == golden


@pytest.mark.parametrize("text", ["\ud83d\ude00", "\\ud800", "\ud7ff", "\ue000", "한국"])
@pytest.mark.parametrize("is_ascii", [False, True])
async def test_whole_characters_are_no_halves_of_pairs(client, text, is_ascii):
    text = text.encode("utf-16", "surrogatepass").decode("utf-16")
    body = json.dumps({**COMPLETION, "user": text, "max_tokens": 1}, ensure_ascii=is_ascii)
    response = await client.post(COMPLETIONS, **raw(body.encode()))
    assert response.status_code == 200, response.text


async def test_the_response_to_a_wrong_method_names_the_right_ones(client):
    assert (await client.get(COMPLETIONS)).headers["allow"] == "POST"
    assert (await client.post("/version", json={})).headers["allow"] == "GET, HEAD"


async def test_an_unexpected_error_is_described_only_in_the_log(client, caplog):
    response = await client.post(COMPLETIONS, json={**COMPLETION, "model": "odd"})
    assert response.status_code == 500
    assert "KeyError: 'secret'" in caplog.text


async def test_a_body_of_exactly_the_largest_size_is_accepted(client):
    body = json.dumps(COMPLETION).encode()
    padded = body + b" " * (BODY_BYTES - len(body))
    for content in (padded, b"\xef\xbb\xbf" + body):
        response = await client.post(COMPLETIONS, content=content, headers=JSON)
        assert response.status_code == 200
    headers = {"Content-Type": "Application/JSON; charset=utf-8", "Content-Encoding": "identity"}
    assert (await client.post(COMPLETIONS, content=body, headers=headers)).status_code == 200


# Limits of keys


async def complete(client: httpx2.AsyncClient, key: str, **fields: Any) -> httpx2.Response:
    return await client.post(COMPLETIONS, json={**COMPLETION, **fields}, headers=bearer(key))


async def test_concurrent_requests_of_a_key_are_limited(client, golden):
    results = await asyncio.gather(
        *(complete(client, "one", stream=stream) for stream in (True, False)), text_of(client)
    )
    assert results[0].status_code == 200
    check_error(results[1], 429, "rate_limit_exceeded", None)
    assert 1 <= int(results[1].headers["retry-after"]) <= 3
    assert results[2] == golden
    assert (await complete(client, "one")).status_code == 200
    assert (await complete(client, "one", temperature=9)).status_code == 400
    assert (await complete(client, "one")).status_code == 200


async def test_requests_per_minute_of_a_key_are_limited(client, golden):
    first = await complete(client, "rare")
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert "x-ratelimit-limit-tokens" not in first.headers
    assert (await complete(client, "rare", stream=True)).status_code == 200
    refused = await complete(client, "rare")
    check_error(refused, 429, "rate_limit_exceeded", None)
    assert 28 <= int(refused.headers["retry-after"]) <= 46  # 30 s, and up to half as much again
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    message = await client.post("/v1/messages", json={}, headers=bearer("rare"))
    name = "anthropic-ratelimit-requests"
    assert message.status_code == 429
    assert [message.headers[f"{name}-{part}"] for part in ("limit", "remaining")] == ["2", "0"]
    reset = datetime.fromisoformat(message.headers[f"{name}-reset"]) - datetime.now(UTC)
    assert 50 <= reset.total_seconds() <= 61
    assert await text_of(client) == golden
    listed = await client.get("/v1/models", headers=bearer("rare"))
    assert listed.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_per_minute_of_a_key_are_limited(client, golden, stream):
    first = await complete(client, "small", prompt=[5, 6, 7], max_tokens=2, stream=stream)
    assert first.status_code == 200
    left = 3 if stream else 1  # of six; a stream sends its headers earlier
    assert int(first.headers["x-ratelimit-remaining-tokens"]) in (left - 1, left)
    again = await complete(client, "small", prompt=[5, 6, 7], max_tokens=7, stream=stream)
    assert again.status_code == 200
    refused = await complete(client, "small", stream=stream)
    check_error(refused, 429, "rate_limit_exceeded", None)
    assert 40 <= int(refused.headers["retry-after"]) <= 60  # 100 s: 10 tokens, at one per 10 s
    assert await text_of(client) == golden


async def test_a_disconnected_client_no_longer_counts_as_running(make_app):
    app = make_app()
    body = json.dumps({**COMPLETION, "max_tokens": 30, "stream": True}).encode()
    leaving = asgi.call(
        app, "POST", COMPLETIONS, {**JSON, **bearer("one")}, chunks=[body], leave_after=2
    )
    with suppress(OSError):
        await asyncio.wait_for(leaving, timeout=60)
    async with client_of(app) as client:
        assert (await complete(client, "one")).status_code == 200


class SlowEngine(Engine):
    """An engine whose outputs do not end within a test unless they are cancelled."""

    def begin_step(self) -> Step | None:
        time.sleep(0.02)
        return super().begin_step()


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream": True}, {"stop": "never"}])
async def test_tokens_are_charged_of_an_answer_that_nobody_waits_for(mars, fields):
    """The client hangs up, and Ray Serve cancels the call."""
    loop = LocalEngineClient(SlowEngine(mars, ENGINE))
    keys = {"entries": [key_entry("metered", tokens_per_minute=120)]}
    app = app_of(served("mars", mars, SingleEngineBackend(loop)), keys=keys)
    body = {"model": "mars", "prompt": [5] * 10, "max_tokens": 200, "ignore_eos": True, **fields}
    content = json.dumps(body).encode()
    headers = {**JSON, **bearer("metered")}
    try:
        call = asyncio.create_task(asgi.call(app, "POST", COMPLETIONS, headers, chunks=[content]))
        await soon(lambda: made_of(loop.engine) >= 20)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        async with client_of(app, headers=bearer("metered")) as client:
            response = await client.post("/detokenize", json={"model": "mars", "tokens": []})
        charged = 110 - int(response.headers["x-ratelimit-remaining-tokens"])
    finally:
        loop.stop()
    assert 10 <= charged <= 80, "some were given back meanwhile, at two a second"


def made_of(engine: Engine) -> int:
    """Return the output tokens of an engine's requests."""
    running = list(engine._requests.values())
    return sum(len(each.tokens) - each.num_prompt for each in running)


# Errors raised by Ray


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (WorkerCrashedError(), 503, "not_ready"),
        (ActorDiedError(), 503, "not_ready"),
        (DeploymentUnavailableError("model"), 503, "not_ready"),
        (ReplicaUnavailableError("replica"), 503, "not_ready"),
        (RequestCancelledError("id"), 503, "not_ready"),
        (BackPressureError(1, 1), 503, "queue_full"),
        (RayTaskError("f", "secret", EngineDied("x")), 503, "not_ready"),
        (RayTaskError("f", "secret", UserError("grammar: bad")), 400, "invalid_value"),
        (RayTaskError("f", "secret", ValueError("secret")), 500, "internal_error"),
    ],
)
def test_errors_raised_through_ray_get_the_status_of_their_cause(error, status, code):
    for each in (error, RayTaskError("outer", "secret", error)):
        found = as_api_error(each, "guided_regex")
        assert (found.status, found.code) == (status, code)
        assert "secret" not in str(found.body())


@pytest.mark.parametrize(
    ("message", "param", "expected"),
    [
        ("seed: 5 is odd; use 4", "seed", "seed: 5 is odd; use 4"),
        ("grammar: bad", "guided_regex", "guided_regex: bad"),
        ("the request cannot run", None, "the request cannot run"),
        ("it says: no", None, "it says: no"),
        ("stop: '\ud800' is long", "stop", "stop: '?' is long"),
    ],
)
def test_a_refusal_by_the_engine_names_the_requests_field(message, param, expected):
    error = as_api_error(UserError(message), "guided_regex")
    found = error.body()["error"]
    assert (error.status, found["param"], found["message"]) == (400, param, expected)
