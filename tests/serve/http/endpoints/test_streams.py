from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import pytest

from mars_serve.engine.ipc.client import EngineDied
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from rest import asgi
from rest.rest_requests import (
    BODIES,
    CHAT,
    COMPLETION,
    COMPLETIONS,
    CONVERSATION,
    text_of,
)
from rest.rest_server import BrokenBackend, app_of, served

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("threshold", [0.02, 0.05, 1.0])
@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_has_the_same_text_and_figures_as_a_response(client, path, threshold):
    body = {**BODIES[path], "max_tokens": 60, "confidence_threshold": threshold}
    whole = await client.answer(path, body)
    events = await client.events(path, body)
    choices = [event["choices"][0] for event in events]
    assert "".join(text_of(choice) for choice in choices) == text_of(whole["choices"][0])
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(events) - 1) + [whole["choices"][0]["finish_reason"]]
    assert {event["id"] for event in events} == {events[0]["id"]}
    *_, last = events
    assert {key: last["mars"][key] for key in whole["mars"]} == whole["mars"]
    assert len(events) == whole["mars"]["forward_passes"]
    counts = [event["mars"]["tokens"] for event in events]
    assert sum(counts) == whole["usage"]["completion_tokens"]
    assert (max(counts) > 1) == (threshold < 1)
    assert all("confidence_threshold" not in event["mars"] for event in events[:-1])


async def test_the_events_of_each_endpoint_have_openais_shape(client):
    completion = await client.events(COMPLETIONS, COMPLETION)
    assert {event["object"] for event in completion} == {"text_completion"}
    chat = await client.events(CHAT, CONVERSATION)
    assert {event["object"] for event in chat} == {"chat.completion.chunk"}
    roles = [event["choices"][0]["delta"].get("role") for event in chat]
    assert roles == ["assistant"] + [None] * (len(chat) - 1)


@pytest.mark.parametrize("path", BODIES)
async def test_include_usage_adds_one_event(client, path):
    whole = await client.answer(path, BODIES[path])
    without = await client.events(path, BODIES[path])
    body = {**BODIES[path], "stream_options": {"include_usage": True}}
    *events, last = await client.events(path, body)
    assert len(events) == len(without)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events)
    assert not any("usage" in event for event in without)


async def test_an_error_within_a_stream_is_its_last_event(client_over):
    backend = BrokenBackend(EngineDied("dead"), num_outputs=2)
    async with client_over(backend) as client:
        response = await client.post(COMPLETIONS, json={**COMPLETION, "stream": True})
    assert response.status_code == 200
    *events, last, nothing = response.text.split("\n\n")
    assert (len(events), nothing) == (2, "")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "not_ready")


async def test_a_stream_forbids_caching_and_buffering(client):
    response = await client.post(COMPLETIONS, json={**COMPLETION, "stream": True})
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


async def test_each_event_may_report_the_usage_so_far(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await client.events(COMPLETIONS, {**COMPLETION, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == [*range(1, 25), 24]


class GatedBackend:
    """A backend whose streams give one token, and then wait until they are closed."""

    def __init__(self) -> None:
        self.num_open = self.num_closed = 0

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        self.num_open += 1
        try:
            yield StepOutput(request.id, [50], None)
            await asyncio.Event().wait()
        finally:
            self.num_open -= 1
            self.num_closed += 1


@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_disconnects_while_an_event_is_sent_closes_the_backend(mars, n):
    """The client disconnects while an event is being sent, not while one is awaited."""
    backend = GatedBackend()
    app = app_of(served("mars", mars, backend))
    body = json.dumps({**COMPLETION, "stream": True, "n": n}).encode()
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        return await asyncio.Future()

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            raise OSError("the client has left")

    with suppress(Exception):
        await app(asgi.scope_of("POST", COMPLETIONS, JSON), receive, send)
    assert (backend.num_open, backend.num_closed) == (0, n)
