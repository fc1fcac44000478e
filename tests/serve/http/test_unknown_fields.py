"""Unknown fields are named in a header and, once a minute for each name, in the log of requests."""

from __future__ import annotations

import json

import pytest

from mars_serve.http.middleware.records import RequestRecord, UnknownFields
from rest.api_keys import FakeClock
from rest.rest_requests import BODIES, CHAT

HEADER = "x-marsray-unknown-fields"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_response_names_the_fields_that_the_server_ignored(client, path, stream, caplog):
    caplog.set_level("INFO", "marsray.requests")
    body = {**BODIES[path], "stream": stream, "max_tokens": 2}
    name = f"of{path.replace('/', '_')}_{stream}"
    for _ in range(2):
        response = await client.post(path, json={**body, name: 1, "store": False})
        assert response.status_code == 200
        assert response.headers[HEADER] == f"{name}, store"
    plain = await client.post(path, json={**body, "ignore_eos": False, "priority": 0})
    assert HEADER not in plain.headers
    assert plain.status_code == 200
    first, second, last = (json.loads(message) for message in caplog.messages)
    assert name in first["unknown_fields"]
    assert "unknown_fields" not in {**second, **last}


async def test_an_effort_that_the_template_does_not_know_is_named(client):
    for effort in ("none", "high"):
        body = {**BODIES[CHAT], "reasoning_effort": effort, "max_tokens": 2, "heat": 1}
        response = await client.post(CHAT, json=body)
        assert response.status_code == 200
        assert response.headers[HEADER] == "heat, reasoning_effort"
    await client.refusal(
        CHAT, {**BODIES[CHAT], "reasoning_effort": "huge"}, 400, "reasoning_effort"
    )


async def test_names_can_end_neither_the_header_nor_the_line_of_the_log(client, caplog):
    caplog.set_level("INFO", "marsray.requests")
    path, body = next(iter(BODIES.items()))
    names = ["a\r\nSet-Cookie: x=1", "é\x00", "", "n" * 1000, *(f"f{i}" for i in range(100))]
    response = await client.post(path, json={**body, **dict.fromkeys(names, 1)})
    assert response.status_code == 200
    assert "set-cookie" not in response.headers
    shown = response.headers[HEADER].split(", ")
    assert shown[:4] == ["a??Set-Cookie??x?1", "??", "", "n" * 64]
    assert shown[15:] == ["f11", "..."]
    (line,) = caplog.messages
    assert json.loads(line)["unknown_fields"] == shown[:16]


def recorded(unknown: UnknownFields, *names: str) -> list[str] | None:
    record = RequestRecord("id")
    assert unknown.report(names, record) == {"X-Marsray-Unknown-Fields": ", ".join(names)}
    return record.unknown_fields


def test_each_name_is_recorded_once_a_minute():
    clock = FakeClock()
    unknown = UnknownFields(clock)
    assert recorded(unknown, "a", "b") == ["a", "b"]
    assert recorded(unknown, "a", "b") is None
    clock.now_s += 59
    assert recorded(unknown, "a", "c") == ["c"]
    clock.now_s += 1
    assert recorded(unknown, "a", "c") == ["a"]
    assert unknown.report((), RequestRecord("id")) == {}


def test_made_up_names_do_not_flood_the_log():
    clock = FakeClock()
    unknown = UnknownFields(clock)
    found = [recorded(unknown, f"field{number}") for number in range(1000)]
    assert sum(each is not None for each in found) == 64
    clock.now_s += 60
    assert recorded(unknown, "field999") == ["field999"]
