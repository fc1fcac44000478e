"""Bodies are read as the standard library reads them, and seldom by it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st

from mars_serve.http.endpoints.json_route import JsonRoute
from rest import asgi

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)
APP = FastAPI()
APP.router.route_class = JsonRoute


@APP.post("/")
async def endpoint(body: list[Any], request: Request) -> dict[str, str]:
    return {"repr": repr(body), "by": type(request).__name__}


async def sent(body: bytes) -> tuple[int, Any]:
    start, *parts = await asgi.call(
        APP, "POST", "/", {"Content-Type": "application/json"}, chunks=[body]
    )
    return start["status"], json.loads(b"".join(part["body"] for part in parts))


@given(value=VALUES, is_escaped=st.booleans())
async def test_values_are_those_of_the_standard_library(value: Any, is_escaped: bool) -> None:
    text = json.dumps([value], ensure_ascii=is_escaped).encode("utf-8", "surrogatepass")
    status, answer = await sent(text)
    assert (status, answer["repr"]) == (200, repr(json.loads(text)))


@pytest.mark.parametrize("body", [b"\xef\xbb\xbf[1]", b'["\\ud800"]', b"[1e999, -Infinity]"])
async def test_what_only_the_standard_library_takes_is_taken(body: bytes) -> None:
    assert (await sent(body))[1]["repr"] == repr(json.loads(body))


@pytest.mark.parametrize("body", [b"[1,]", b"[1] 2", b"[01]", b'["\x01"]', b"{"])
async def test_errors_are_those_of_the_standard_library(body: bytes) -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads(body)
    status, answer = await sent(body)
    assert (status, answer["detail"][0]["ctx"]["error"]) == (422, caught.value.msg)


async def test_valid_json_is_not_read_by_the_standard_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(json, "loads", lambda _: pytest.fail("the slow parser was called"))
        messages = await asgi.call(
            APP, "POST", "/", {"Content-Type": "application/json"}, chunks=[b"[1, 2.5]"]
        )
    assert messages[0]["status"] == 200
