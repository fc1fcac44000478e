"""Bodies that are small enough to be read, but would take long or much memory to handle.

Instead of times, these tests assert what is not done: no model is validated, no template rendered
and no text tokenized for what cannot be served.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI

from mars_platform.data.prompt_encoding import PromptEncoder
from mars_serve.api import bounds
from mars_serve.config.served import ServedModel
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from rest import asgi
from rest.api_keys import bearer, key_entry
from rest.rest_requests import BODIES, CHAT, COMPLETION, COMPLETIONS, CONVERSATION
from rest.rest_server import BrokenBackend, Client, app_of, client_of

JSON = {"Content-Type": "application/json"}
MAX_LENGTH = 256
LARGE = 2**18
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
PART = {"type": "text", "text": ""}
SCHEMA = {"type": "function", "function": {"name": "f"}}
TEXT = "plus " * 1000
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": TEXT}}


class Encoders:
    """Counts the calls of encoders."""

    def __init__(self) -> None:
        self.num_calls = 0


@pytest.fixture
def encoders(monkeypatch: pytest.MonkeyPatch) -> Encoders:
    """Count what is rendered and tokenized."""
    found = Encoders()
    for name in ("chat", "text", "plain"):
        original = getattr(PromptEncoder, name)

        def counted(*args: Any, original: Any = original, **options: Any) -> Any:
            found.num_calls += 1
            return original(*args, **options)

        monkeypatch.setattr(PromptEncoder, name, counted)
    return found


def beyond(length: int, **fields: Any) -> dict[str, Any]:
    """Return a body that is padded to a length with spaces in an ignored field."""
    return {**CONVERSATION, **fields, "padding": " " * length}


TOO_MANY = {
    "parts": {"messages": [{"role": "user", "content": [PART] * 1000}] * 100},
    "names": {"metadata": {f"{index:06}": 0 for index in range(80_000)}},
    "numbers": {"metadata": [0] * 160_000},
    "lists": {"metadata": [[]] * 80_000},
    "variables": {"chat_template_kwargs": {f"-{index}": {} for index in range(60_000)}},
}


@pytest.mark.parametrize("case", TOO_MANY)
async def test_a_body_of_many_values_is_refused_unread(client, monkeypatch, case):
    def validate(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(json, "loads", validate)
    body = json.JSONEncoder().encode(beyond(LARGE, **TOO_MANY[case]))
    response = await client.post(CHAT, content=body, headers=JSON)
    monkeypatch.undo()
    assert "names and values" in client.error_of(response, 413, None)


async def test_a_large_body_of_few_values_is_read(client):
    commas = {"metadata": {"text": '",:[{\\' * 60_000, "numbers": [0] * 100_000}}
    assert (await client.post(CHAT, json=beyond(LARGE, **commas))).status_code == 200


async def test_the_number_of_values_can_be_set(models):
    body = beyond(LARGE, metadata=[0] * 2000)
    async with client_of(app_of(*models, limits={"body_values": 1000})) as client:
        assert (await client.post(CHAT, json=body)).status_code == 413
    async with client_of(app_of(*models, limits={"body_values": 3000})) as client:
        assert (await client.post(CHAT, json=body)).status_code == 200


async def test_a_long_number_in_a_large_body_is_refused(client):
    body = json.dumps(beyond(LARGE, seed=1)).replace('"seed": 1', f'"seed": {"1" * 4000}')
    response = await client.post(CHAT, content=body, headers=JSON)
    assert "too many digits" in client.error_of(response, 422, None)


async def test_many_numbers_that_do_not_fit_64_bits_are_refused_in_a_large_body(client):
    assert (await client.post(CHAT, json=beyond(LARGE, metadata=[10**17] * 20_000))).is_success
    body = beyond(LARGE, metadata=[10**18] * 20_000)
    message = await client.refusal(CHAT, body, 422, None)
    assert "numbers have too many digits; shorten them" in message


@pytest.mark.parametrize("place", [-1, -2, -3, 0])
async def test_half_of_a_pair_is_found_where_a_large_body_is_divided(client, place):
    text = json.dumps(beyond(LARGE, user="\ud800"))
    text = "{" + " " * (2**17 + place - text.index("\\ud800")) + text[1:]
    assert text.index("\\ud800") == 2**17 + place
    response = await client.post(CHAT, content=text, headers=JSON)
    assert "surrogate" in client.error_of(response, 400, "user")


@pytest.mark.parametrize("field", ["max_tokens", "min_tokens", "seed", "top_k", "n"])
async def test_a_number_of_thousands_of_digits_is_an_invalid_value(client, field):
    body = json.dumps({**COMPLETION, field: 0}).replace(f'"{field}": 0', f'"{field}": {"9" * 4300}')
    response = await client.post(COMPLETIONS, content=body, headers=JSON)
    client.error_of(response, 400, field)


@pytest.mark.parametrize("key", ["content", "tool_calls"])
async def test_pieces_of_a_conversation_are_counted_before_they_are_read(client, key):
    messages = [{"role": "assistant", key: [{}] * 1000}] * 5
    message = await client.refusal(CHAT, {**CONVERSATION, "messages": messages}, 400, "messages")
    assert "at most 4096 parts and tool calls together, not 5000" in message


async def test_arguments_of_many_values_are_refused_unread(client, monkeypatch, encoders):
    monkeypatch.setattr(bounds, "MAX_VALUES_OF_ARGUMENTS", 10)
    few, many = '{"text": "[,,,,,,,,,,,,]"}', '{"a": [[], [], [], []]}'
    calls = [{**CALL, "function": {"name": "f", "arguments": each}} for each in (few, many)]
    for chosen, status in ((calls[:1], 200), (calls, 400), ([calls[1]] * 2, 400)):
        messages = [*CONVERSATION["messages"], {"role": "assistant", "tool_calls": chosen}]
        response = await client.post(CHAT, json={**CONVERSATION, "messages": messages})
        assert response.status_code == status, response.text
    assert encoders.num_calls == 1


TOO_LONG = {
    "prompt": (COMPLETIONS, {"prompt": TEXT}, "prompt"),
    "second prompt": (COMPLETIONS, {"prompt": [TEXT, "a"]}, "prompt"),
    "characters of several bytes": (COMPLETIONS, {"prompt": "日" * 2000}, "prompt"),
    "echo": (COMPLETIONS, {"prompt": TEXT, "echo": True}, "prompt"),
    "ids": (COMPLETIONS, {"prompt": [5] * 257}, "prompt"),
    "content": (CHAT, {"messages": [{"role": "user", "content": TEXT}]}, "messages"),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [PART] * 1022}] * 4}, "messages"),
    "messages": (CHAT, {"messages": [{"role": "user", "content": ""}] * 257}, "messages"),
    "arguments": (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages"),
    "refusal": (CHAT, {"messages": [{"role": "assistant", "refusal": TEXT}]}, "messages"),
    "description": (CHAT, {"tools": [{**SCHEMA, "function": {
        "name": "f", "description": TEXT}}]}, "messages"),
    "schema": (CHAT, {"tools": [{**SCHEMA, "function": {
        "name": "f", "parameters": {"a": [TEXT]}}}]}, "messages"),
    "variables": (CHAT, {"chat_template_kwargs": {
        f"v{index}": "x" * 4096 for index in range(2)}}, "messages"),
    "text to tokenize": (TOKENIZE, {"prompt": TEXT}, "prompt"),
    "conversation to tokenize": (TOKENIZE, {
        "messages": [{"role": "user", "content": TEXT}], "prompt": None}, "messages"),
    "ids to detokenize": (DETOKENIZE, {"tokens": [5] * 257}, "tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOO_LONG)
async def test_what_cannot_fit_is_refused_before_it_is_tokenized(client, encoders, case):
    path, fields, param = TOO_LONG[case]
    body = {**BODIES.get(path, {"model": "mars"}), **fields}
    response = await client.post(path, json=body)
    message = client.error_of(response, 400, param)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert str(MAX_LENGTH) in message
    assert encoders.num_calls == 0


async def test_the_servers_own_limit_counts_for_texts_too(models, encoders):
    async with client_of(app_of(*models, limits={"prompt_tokens": 10})) as client:
        await client.refusal(COMPLETIONS, {**COMPLETION, "prompt": "a" * 161}, 400, "prompt")
        assert encoders.num_calls == 0
        await client.refusal(COMPLETIONS, {**COMPLETION, "prompt": "a" * 160}, 400, "prompt")
        assert encoders.num_calls > 0


async def test_copies_of_a_prompt_are_limited_together(client, monkeypatch):
    monkeypatch.setattr(bounds, "MAX_COPIED_TOKENS", 20)
    fits = {**COMPLETION, "prompt": [5] * 10, "n": 2}
    await client.answer(COMPLETIONS, fits)
    message = await client.refusal(COMPLETIONS, {**fits, "n": 3}, 400, "prompt")
    assert "limit of 20" in message
    await client.refusal(COMPLETIONS, {**fits, "prompt": [[5] * 10, [6]]}, 400, "prompt")
    await client.refusal(CHAT, {**CONVERSATION, "n": 8}, 400, "messages")
    await client.answer(COMPLETIONS, {**fits, "prompt": [5] * 21, "n": 1})


@pytest.mark.parametrize(
    ("path", "fields", "most"),
    [
        (COMPLETIONS, {"logprobs": 5}, 24 * 6),
        (COMPLETIONS, {"logprobs": 0, "n": 3}, 24 * 3),
        (COMPLETIONS, {"logprobs": 2, "prompt": [[5] * 9, [6] * 9], "echo": True}, 2 * 33 * 3),
        (COMPLETIONS, {"logprobs": 2, "prompt": [5] * 9, "echo": True, "stream": True}, 27),
        (CHAT, {"logprobs": True, "top_logprobs": 20}, 24 * 21),
    ],
)
async def test_log_probabilities_of_a_response_are_limited(client, monkeypatch, path, fields, most):
    body = {**BODIES[path], **fields}
    monkeypatch.setattr(bounds, "MAX_REPORTED", most)
    assert (await client.post(path, json=body)).status_code == 200
    monkeypatch.setattr(bounds, "MAX_REPORTED", most - 1)
    message = await client.refusal(path, body, 400, "max_tokens")
    assert f"limit of {most - 1} log-probabilities" in message


async def test_log_probabilities_limit_a_length_that_is_not_given(client, monkeypatch):
    monkeypatch.setattr(bounds, "MAX_REPORTED", 30)
    body = {**CONVERSATION, "max_tokens": None, "logprobs": True, "top_logprobs": 4, "n": 2}
    answer = await client.answer(CHAT, body)
    assert answer["usage"]["completion_tokens"] <= 6


@pytest.fixture
async def limited(models: list[ServedModel]) -> AsyncIterator[Client]:
    entries = [
        key_entry("rare", requests_per_minute=2),
        key_entry("small", tokens_per_minute=6),
    ]
    async with client_of(app_of(*models, keys={"entries": entries})) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [(TOKENIZE, {"prompt": "x"}), (DETOKENIZE, {"tokens": [5]})],
)
async def test_converting_counts_as_a_request_of_the_key(limited, path, body):
    for status in (200, 200, 429):
        response = await limited.post(path, json={"model": "mars", **body}, headers=bearer("rare"))
        assert response.status_code == status
        assert "x-ratelimit-remaining-requests" in response.headers


@pytest.mark.parametrize(
    ("path", "body"),
    [(TOKENIZE, {"prompt": "1 2 3 4 5 6 7 8 9"}), (DETOKENIZE, {"tokens": [5] * 9})],
)
async def test_converted_tokens_are_charged_to_the_key(limited, path, body):
    first = await limited.post(path, json={"model": "mars", **body}, headers=bearer("small"))
    assert first.status_code == 200
    assert first.headers["x-ratelimit-remaining-tokens"] == "0"
    again = await limited.post(COMPLETIONS, json=COMPLETION, headers=bearer("small"))
    assert again.status_code == 429


async def test_bodies_that_arrive_slowly_do_not_fill_the_memory(models):
    """Sixteen half-sent bodies leave no room for a further large one, but for small ones."""
    app = app_of(*models, limits={"body_bytes": 2 * LARGE})
    piece, waiting = b"[" + b"0" * (2 * LARGE - 1), asyncio.Event()
    tasks = [asyncio.create_task(half_sent(app, piece, waiting)) for _ in range(16)]
    await asyncio.sleep(0.05)
    body = json.dumps({**COMPLETION, "padding": " " * LARGE})
    async with client_of(app) as client:
        refused = await client.post(COMPLETIONS, content=body, headers=JSON)
        client.error_of(refused, 503, None)
        assert refused.headers["retry-after"]
        assert (await client.post(COMPLETIONS, json=COMPLETION)).status_code == 200
        waiting.set()
        await asyncio.gather(*tasks)
        assert (await client.post(COMPLETIONS, content=body, headers=JSON)).status_code == 200


async def half_sent(app: FastAPI, piece: bytes, waiting: asyncio.Event) -> None:
    """Send a piece of a body, wait, and disconnect."""
    incoming = [{"type": "http.request", "body": piece, "more_body": True}]

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await waiting.wait()
        return {"type": "http.disconnect"}

    async def send(_: object) -> None:
        raise AssertionError

    await app(asgi.scope_of("POST", COMPLETIONS, JSON), receive, send)


class LongBackend(BrokenBackend):
    """A backend whose outputs come all at once."""

    async def complete(self, request: Request) -> list[StepOutput]:
        last = [StepOutput(request.id, [50], FinishReason.LENGTH)]
        return [StepOutput(request.id, [50], None) for _ in range(199)] + last


async def test_other_requests_go_on_while_a_long_output_is_decoded(client_over):
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    body = {**COMPLETION, "max_tokens": 200}
    async with client_over(LongBackend(ValueError())) as client:
        await client.answer(COMPLETIONS, body)
        counting = asyncio.create_task(count())
        answer = await client.answer(COMPLETIONS, body)
        counting.cancel()
    assert answer["usage"]["completion_tokens"] == 200
    assert num_turns >= 20
