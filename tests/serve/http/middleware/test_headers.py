from __future__ import annotations

import json
from typing import Any

import pytest

from rest import asgi
from rest.api_keys import key_entry
from rest.rest_requests import COMPLETION, COMPLETIONS
from rest.rest_server import app_of

JSON = (b"content-type", b"application/json")
OWN = [b"localhost", b"LOCALHOST:8000", b"127.0.0.1:8000", b"127.8.9.1", b"[::1]", b"[::1]:80"]
FOREIGN = [b"evil.example", b"evil.example:8000", b"192.0.2.1", b"localhost.evil.example", b""]
FOREIGN += [b"127.0.0.1.evil.example", b"[2001:db8::1]", b"[", b"a:b:c", b"localhost@evil.example"]


async def call(
    app: Any, path: str, headers: list[tuple[bytes, bytes]], method: str = "GET", body: bytes = b""
) -> tuple[int, Any]:
    """Return status and body of a response."""
    start, *parts = await asgi.call(app, method, path, headers, chunks=(body,))
    return start["status"], json.loads(b"".join(part["body"] for part in parts))


@pytest.mark.parametrize(
    "name", [b"x-request-id", b"authorization", b"traceparent", b"host", b"x-anything"]
)
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing"])
async def test_a_header_that_is_not_ascii_is_named(app, name, path):
    status, body = await call(app, path, [(name, b"a\x9bb")])
    assert (status, body["error"]["code"]) == (400, "invalid_header")
    assert body["error"]["message"].startswith(f"header {name.decode()}: it is not ASCII")


async def test_a_headers_name_must_be_ascii_and_an_id_short(app):
    assert (await call(app, "/health", [(b"x-\xe9", b"a")]))[0] == 400
    assert (await call(app, "/health", [(b"x-request-id", b"a" * 128)]))[0] == 200
    status, body = await call(app, "/health", [(b"x-request-id", b"a" * 129)])
    assert (status, body["error"]["message"].split(":")[0]) == (400, "header x-request-id")


@pytest.mark.parametrize("path", ["/health", "/ready", "/admin/threshold", "/v1/models", "/x"])
async def test_a_server_without_keys_is_addressed_as_this_machine_only(app, path):
    for host in OWN:
        assert (await call(app, path, [(b"host", host)]))[0] in (200, 404)
    for host in FOREIGN:
        status, body = await call(app, path, [(b"host", host)])
        assert (status, body["error"]["code"]) == (403, "host_not_allowed"), host
        assert "allowed_hosts" in body["error"]["message"]
        both = [(b"host", b"localhost"), (b"host", host)]
        assert (await call(app, path, both))[0] == 403


@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "OPTIONS"])
async def test_a_page_of_somebody_else_is_refused(app, method):
    for origin in (b"https://evil.example", b"null", b"", b"http://192.0.2.1:8000", b"file://"):
        headers = [(b"host", b"localhost"), (b"origin", origin)]
        status, body = await call(app, "/admin/threshold", headers, method)
        assert (status, body["error"]["code"]) == (403, "host_not_allowed")


async def test_a_page_of_this_machine_may_ask(app):
    body = json.dumps({**COMPLETION, "max_tokens": 1}).encode()
    for origin in (b"http://localhost:3000", b"http://127.0.0.1", b"https://[::1]:1"):
        headers = [(b"origin", origin), (b"host", b"127.0.0.1"), JSON]
        assert (await call(app, COMPLETIONS, headers, "POST", body))[0] == 200


async def test_a_page_cannot_send_a_body_without_asking_the_browser_first(app):
    """A browser sends these types across origins at once."""
    body = json.dumps(COMPLETION).encode()
    kinds = [b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data", b""]
    for kind in kinds:
        status, answer = await call(app, COMPLETIONS, [(b"content-type", kind)], "POST", body)
        assert (status, answer["error"]["code"]) == (415, "unsupported_content_type")


@pytest.mark.parametrize("method", ["OPTIONS", "POST"])
async def test_no_answer_lets_a_page_of_another_origin_read_it(app, models, method):
    keyed = app_of(*models, keys={"entries": [key_entry("one")]})
    asked = (b"access-control-request-method", b"POST"), (b"authorization", b"Bearer one")
    for each, origin in ((app, b"http://localhost:3000"), (keyed, b"https://other.example")):
        start, *_ = await asgi.call(each, method, COMPLETIONS, [(b"origin", origin), *asked])
        assert [name for name, _ in start["headers"] if name.startswith(b"access-control")] == []


async def test_further_names_can_be_allowed(models):
    app = app_of(*models, allowed_hosts=["Box.local", "abcd"])
    for name, value in (
        (b"host", b"box.local:8000"),
        (b"host", b"BOX.LOCAL"),
        (b"origin", b"http://box.local"),
        (b"origin", b"chrome-extension://abcd"),
    ):
        assert (await call(app, "/health", [(name, value)]))[0] == 200
    assert (await call(app, "/health", [(b"host", b"other.local")]))[0] == 403


async def test_with_keys_or_on_the_network_the_name_does_not_matter(models):
    keyed = app_of(*models, keys={"entries": [key_entry("one")]})
    reachable = app_of(*models, host="192.0.2.1", insecure=True)
    for app in (keyed, reachable):
        headers = [(b"host", b"any.example"), (b"origin", b"https://other.example")]
        assert (await call(app, "/health", headers))[0] == 200
