from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mars_platform.errors import UserError
from mars_serve.api.text_threads import TextThreads
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import ServeSettings
from mars_serve.http.middleware.authentication import ADMIN_PATHS, PUBLIC_PATHS
from mars_serve.http.middleware.security import add_security
from mars_serve.http.page_files import page_files
from rest import asgi, rest_requests
from rest.api_keys import bearer, key_entry
from rest.rest_requests import CHAT, COMPLETIONS
from rest.rest_server import app_of, client_of

COMPLETION = {**rest_requests.COMPLETION, "max_tokens": 2}
BODIES = {path: {**body, "max_tokens": 2} for path, body in rest_requests.BODIES.items()}
PLAIN, ADMIN, FLEX = "key-plain", "key-admin", "key-flex"
HOLDERS = {"none": None, "wrong": "key-wrong", "flex": FLEX, "plain": PLAIN, "admin": ADMIN}


ENTRIES = [key_entry(PLAIN), key_entry(ADMIN, admin=True), key_entry(FLEX, tiers=["flex"])]


@pytest.fixture(scope="module")
def keyed(models: list[ServedModel]) -> FastAPI:
    return app_of(*models, keys={"entries": ENTRIES})


async def call(
    app: FastAPI,
    path: str,
    method: str = "GET",
    *,
    key: str | None = None,
    headers: list[tuple[bytes, bytes]] | None = None,
    **options: Any,
) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of a response to a request with a raw path."""
    start, *parts = await asgi.call(app, method, path, headers or bearer(key), **options)
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], found, b"".join(part["body"] for part in parts)


# Who may do what


def routes_of(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Yield method and path of every route of the application."""
    for route in app.routes:
        path = getattr(route, "path", None)
        if path is not None:
            yield from ((method, path) for method in route.methods)
    for path, methods in app.openapi()["paths"].items():
        yield from ((method.upper(), path) for method in methods)


def expected(method: str, path: str, who: str) -> set[int]:
    if path in PUBLIC_PATHS and method in ("GET", "HEAD"):
        return {200}
    if who in ("none", "wrong"):
        return {401}
    if path.startswith("/admin") or path in ADMIN_PATHS:
        return {200, 400, 422} if who == "admin" else {403}
    if path in BODIES:
        return {403} if who == "flex" else {200}
    return {200, 400, 404, 422}  # required fields are missing


@pytest.mark.parametrize("who", HOLDERS)
async def test_every_route_is_open_only_to_keys_that_may_use_it(keyed, who):
    routes = set(routes_of(keyed))
    assert {("POST", COMPLETIONS), ("GET", "/metrics"), ("GET", "/health")} <= routes
    async with client_of(keyed, headers=bearer(HOLDERS[who])) as client:
        for method, path in routes:
            body = {**BODIES[path], "service_tier": "default"} if path in BODIES else {}
            # an open dashboard would stream for long
            query = {"since_s": "no number"} if path == "/admin/dashboard/events" else None
            response = await client.request(method, path, json=body, params=query)
            assert response.status_code in expected(method, path, who), (method, path)
            if response.status_code == 401:
                assert response.headers["www-authenticate"] == "Bearer"
                kind = "" if method == "HEAD" else response.json()["error"]["type"]
                assert kind in ("", "authentication_error")
            if response.status_code == 403:
                assert response.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize(
    "path",
    [
        "/admin",
        "/admin/",
        "/admin/threshold",
        "/admin/threshold/",
        "/admin/nothing",
        "//admin/threshold",
        "/./admin/threshold",
        "/health/../admin/threshold",
        "/ADMIN/threshold",
        "/Admin",
        "/%61dmin/threshold",
        "/%2e/admin",
        "/%2fadmin/threshold",
        "/x/%2e%2e/admin/threshold",
        "\\admin\\threshold",
        "/\\admin",
        "/v1/load_lora_adapter",
        "/v1//x/../UNLOAD_lora_adapter/",
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD", "OPTIONS", "POST", "TRACE"])
async def test_no_spelling_gets_around_the_admin_key(keyed, path, method):
    assert (await call(keyed, path, method))[0] == 401
    assert (await call(keyed, path, method, key=PLAIN))[0] == 403


@pytest.mark.parametrize(
    "path",
    [
        "/health/",
        "//health",
        "/Health",
        "/health/.",
        "/health%20",
        "/healthy",
        "/health/../v1/models",
        "/openapi.json",
        "/version",
        "",
        "//",
        "/?/",
        "/docs",
        "/pages",
        "/metrics",
        "/nothing",
        "/v1/models",
    ],
)
async def test_a_path_that_is_not_public_needs_a_key(keyed, path):
    assert (await call(keyed, path))[0] == 401
    assert (await call(keyed, path, key=PLAIN))[0] in (200, 404)


async def test_public_paths_are_public_for_reading_only(keyed):
    for path, method in itertools.product(("/health", "/ping"), ("GET", "HEAD")):
        assert (await call(keyed, path, method))[0] == 200
    for method in ("POST", "OPTIONS", "DELETE"):
        assert (await call(keyed, "/health", method))[0] == 401
        assert (await call(keyed, "/health", method, key=PLAIN))[0] == 405


async def test_paths_are_checked_below_the_prefix_of_a_mount(keyed):
    root = "/mars"
    assert (await call(keyed, "/mars/health", root_path=root))[0] == 200
    assert (await call(keyed, "/mars/v1/models", root_path=root))[0] == 401
    assert (await call(keyed, "/mars/admin/x", root_path=root, key=PLAIN))[0] == 403
    assert (await call(keyed, "/marsh/health", root_path=root))[0] == 401


async def test_websockets_are_refused():
    sent = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    app = FastAPI()
    app.websocket("/v1/live")(lambda socket: socket.accept())
    add_security(app, ServeSettings(models=[{"name": "a", "path": "a"}]), {}, TextThreads(0))
    await app({"type": "websocket", "path": "/v1/live", "headers": []}, None, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_the_openapi_document_says_which_paths_need_a_key(keyed, app):
    async with client_of(keyed, headers=bearer(PLAIN)) as client:
        document = (await client.get("/openapi.json")).json()
    assert document["security"] == [{"key": []}]
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    without = {
        path
        for path, item in document["paths"].items()
        if item.get("get", {}).get("security") == []
    }
    assert without == {"/health", "/ping", "/ready"}
    assert without | page_files().keys() == PUBLIC_PATHS
    assert "security" not in app.openapi()


# How a key is given


@pytest.mark.parametrize(
    ("values", "is_let_in"),
    [
        ([f"Bearer {PLAIN}"], True),
        ([f"bearer {PLAIN}"], True),
        ([f" BEARER   {PLAIN}  "], True),
        ([], False),
        ([""], False),
        (["Bearer"], False),
        (["Bearer "], False),
        ([PLAIN], False),
        ([f"Basic {PLAIN}"], False),
        ([f"Bearer{PLAIN}"], False),
        ([f"Bearer {PLAIN} x"], False),
        ([f"Bearer {PLAIN},Bearer {ADMIN}"], False),
        ([f"Bearer {PLAIN}", f"Bearer {PLAIN}"], False),
        (["Bearer x", f"Bearer {PLAIN}"], False),
        ([f"Bearer {PLAIN.upper()}"], False),
    ],
)
async def test_a_key_counts_only_in_one_bearer_header(keyed, values, is_let_in):
    headers = [(b"authorization", value.encode()) for value in values]
    status, found, body = await call(keyed, "/v1/models", headers=headers)
    assert status == (200 if is_let_in else 401)
    if not is_let_in:
        assert found["www-authenticate"] == "Bearer"
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert "Authorization: Bearer" in error["message"]


async def test_a_key_in_any_other_header_or_parameter_does_not_count(keyed):
    for name in (b"api-key", b"x-api-key", b"proxy-authorization", b"cookie"):
        headers = [(name, f"Bearer {PLAIN}".encode()), (name, PLAIN.encode())]
        assert (await call(keyed, "/v1/models", headers=headers))[0] == 401
    assert (await call(keyed, "/v1/models", query_string=f"api_key={PLAIN}".encode()))[0] == 401


@settings(max_examples=100)
@given(value=st.binary(max_size=80), scheme=st.sampled_from([b"", b"Bearer ", b"Basic "]))
async def test_no_header_value_breaks_authentication(keyed, value, scheme):
    headers = [(b"authorization", scheme + value)]
    status, _, _ = await call(keyed, "/v1/models", headers=headers)
    assert status == (401 if value.isascii() else 400)


async def test_no_log_and_no_response_contains_a_key(keyed, caplog):
    caplog.set_level(logging.DEBUG)
    secrets = ["canary-wrong", ADMIN]
    for secret in secrets:
        for path in ("/v1/models", "/nothing", "/admin/threshold"):
            _, headers, body = await call(keyed, path, key=secret)
            assert secret not in str(headers) + body.decode()
    logged = caplog.text + "".join(str(vars(record)) for record in caplog.records)
    assert "canary-wrong" not in logged
    assert f"Bearer {ADMIN}" not in logged  # the key's name is the same text


async def test_a_changed_key_file_takes_effect_without_a_restart(models, tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [key_entry("old")]}), encoding="utf-8")
    app = app_of(*models, keys={"file": path, "reload_s": 1e-9})
    assert (await call(app, "/v1/models", key="old"))[0] == 200
    path.write_text(json.dumps({"keys": [key_entry("new-one")]}), encoding="utf-8")
    assert (await call(app, "/v1/models", key="new-one"))[0] == 200
    assert (await call(app, "/v1/models", key="old"))[0] == 401


async def test_readiness_without_an_administrators_key_tells_nothing_else(keyed):
    for key in (None, "key-wrong", PLAIN):
        status, _, body = await call(keyed, "/ready", key=key)
        assert (status, json.loads(body)) == (200, {"status": "ready"})
    status, _, body = await call(keyed, "/ready", key=ADMIN)
    assert (status, json.loads(body)["models"].keys()) == (200, {"mars", "plain"})


# Without keys


async def test_an_open_server_has_admin_paths_only_on_loopback(models, app):
    reachable = app_of(*models, host="192.0.2.1", insecure=True)
    for each, status in ((app, 404), (reachable, 403)):
        assert (await call(each, "/v1/models", key="anything"))[0] == 200
        assert (await call(each, "/v1/models"))[0] == 200
        assert (await call(each, "/admin/nothing"))[0] == status


def test_a_process_without_its_drivers_keys_does_not_open_the_server(models, monkeypatch):
    monkeypatch.setenv("MARSRAY_API_KEYS", json.dumps({"keys": [key_entry(PLAIN)]}))
    made = ServeSettings(models=[models[0].settings], host="192.0.2.1")
    captured = made.model_copy(update={"keys": made.keys.captured()})
    add_security(FastAPI(), made, {}, TextThreads(0))
    monkeypatch.delenv("MARSRAY_API_KEYS")
    with pytest.raises(UserError, match=r"^keys: "):
        add_security(FastAPI(), made, {}, TextThreads(0))
    add_security(FastAPI(), captured, {}, TextThreads(0))


# Bodies


async def test_a_body_that_does_not_arrive_in_time_is_given_up(models):
    app = app_of(*models, limits={"body_wait_s": 0.05})
    sent = list[Any]()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async with asyncio.timeout(30):
        await app(asgi.scope_of("POST", COMPLETIONS), receive, send)
    assert sent[0]["status"] == 408
    error = json.loads(sent[1]["body"])["error"]
    assert error["code"] == "request_timeout"
    assert error["message"].startswith("body: it did not arrive within 0.05 s")


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
FIELDS = ["prompt", "messages", "stop", "n", "logit_bias", "tools", "tool_choice", "stream"]
FIELDS += ["response_format", "guided_json", "stream_options", "metadata", "chat_template_kwargs"]


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(
    path=st.sampled_from([COMPLETIONS, CHAT]),
    fields=st.dictionaries(st.sampled_from(FIELDS), NESTED, max_size=2),
)
async def test_no_body_breaks_the_server(app, path, fields):
    body = json.dumps({**BODIES[path], **fields}).encode()
    json_type = [(b"content-type", b"application/json")]
    status, _, content = await call(app, path, "POST", headers=json_type, chunks=(body,))
    assert status in (200, 400, 422), content


@settings(max_examples=100)
@given(body=st.binary(max_size=60) | st.text('[]{}":,\\0a', max_size=60).map(str.encode))
async def test_no_bytes_break_the_server(app, body):
    json_type = [(b"content-type", b"application/json")]
    status, _, _ = await call(app, COMPLETIONS, "POST", headers=json_type, chunks=(body,))
    assert status in (400, 422)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x-api-key", PLAIN)], 200),
        ([("x-api-key", PLAIN), ("authorization", f"Bearer {PLAIN}")], 200),
        ([("authorization", f"Bearer {PLAIN}")], 200),
        ([("x-api-key", "nobody")], 401),
        ([("x-api-key", PLAIN), ("x-api-key", PLAIN)], 401),
        ([("x-api-key", PLAIN), ("authorization", "Bearer nobody")], 401),
        ([("x-api-key", "nobody"), ("authorization", f"Bearer {PLAIN}")], 401),
        ([("x-api-key", PLAIN), ("authorization", f"Basic {PLAIN}")], 401),
        ([("x-api-key", "")], 401),
    ],
)
async def test_anthropics_clients_give_their_key_in_a_header_of_their_own(keyed, headers, status):
    body = {**BODIES[CHAT], "max_tokens": 1}
    async with client_of(keyed) as client:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            assert (await client.post(path, json=body, headers=headers)).status_code == status
        only = [each for each in headers if each[0] == "x-api-key"]
        assert (await client.post(CHAT, json=body, headers=only)).status_code == 401
