from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from mars_platform import reference
from mars_platform.checkpoint import Checkpoint, load_model, read_checkpoint
from mars_serve.api import ServedModel, create_app
from mars_serve.engine.engine import Engine
from mars_serve.engine.loop import EngineDied, EngineLoop, QueueFull
from mars_serve.engine.request import EngineStatus, Request, StepOutput
from mars_serve.engine.settings import EngineSettings
from mars_serve.settings import ModelSettings
from mars_serve.text import TextStream, decode, encode

CREATED = 1_700_000_000
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "What is 3 plus 4?"
MESSAGES = [{"role": "user", "content": PROMPT}]
COMPLETION = {"model": "mars", "prompt": PROMPT, "max_tokens": 24}
CONVERSATION = {"model": "mars", "messages": MESSAGES, "max_tokens": 24}
BODIES = {COMPLETIONS: COMPLETION, CHAT: CONVERSATION}
ENGINE = EngineSettings(page_size=8, num_pages=128, max_batch=4, max_positions=65)


class LoopBackend:
    """Backend over an engine in this process."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop

    async def complete(self, request: Request) -> list[StepOutput]:
        return [output async for output in self.loop.stream(request)]

    async def stream(self, request: Request) -> AsyncIterator[StepOutput]:
        async for output in self.loop.stream(request):
            yield output

    async def status(self) -> EngineStatus:
        return self.loop.status()


class BrokenBackend:
    """Backend that gives a token or none, and then fails."""

    def __init__(self, error: Exception, num_outputs: int = 0) -> None:
        self.error = error
        self.num_outputs = num_outputs

    async def complete(self, request: Request) -> list[StepOutput]:
        raise self.error

    async def stream(self, request: Request) -> AsyncIterator[StepOutput]:
        for _ in range(self.num_outputs):
            yield StepOutput(request.id, [50], None)
        raise self.error

    async def status(self) -> EngineStatus:
        raise self.error


def serve(name: str, checkpoint: Checkpoint, backend: Any, **settings: Any) -> ServedModel:
    entry = ModelSettings(name=name, path=str(checkpoint.path), engine=ENGINE, **settings)
    return ServedModel(entry, checkpoint, backend, CREATED)


@pytest.fixture(scope="session")
def mars(mars_dir: Path) -> Checkpoint:
    return read_checkpoint(mars_dir)


@pytest.fixture(scope="session")
def tokenizer(mars: Checkpoint) -> PreTrainedTokenizerBase:
    return mars.tokenizer


@pytest.fixture(scope="session")
def loops(mars: Checkpoint, plain_dir: Path) -> Iterator[dict[str, EngineLoop]]:
    checkpoints = {"mars": mars, "plain": read_checkpoint(plain_dir)}
    loops = {name: EngineLoop(Engine(each, ENGINE)) for name, each in checkpoints.items()}
    yield loops
    for loop in loops.values():
        loop.stop()


@pytest.fixture(scope="session")
def app(loops: dict[str, EngineLoop]) -> FastAPI:
    models = {
        name: serve(name, loop.engine.checkpoint, LoopBackend(loop)) for name, loop in loops.items()
    }
    return create_app(models)


def client_of(app: FastAPI) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://server")


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(app) as client:
        yield client


@pytest.fixture
async def official(client: httpx2.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="none", base_url="http://server/v1", http_client=client, max_retries=0
    )


async def post(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def events_of(
    client: httpx2.AsyncClient, path: str, body: dict[str, Any]
) -> list[dict[str, Any]]:
    """Events of a streamed response, without the final [DONE], which must be there."""
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, nothing = response.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(choice: dict[str, Any]) -> str:
    part = choice.get("message") or choice.get("delta") or choice
    return part.get("content", part.get("text"))


def oracle(
    checkpoint: Checkpoint, prompt: list[int], max_tokens: int, threshold: float
) -> reference.Decoded:
    return reference.decode(
        load_model(checkpoint.path),
        prompt,
        checkpoint.special,
        max_tokens=max_tokens,
        threshold=threshold,
        num_masks=4,
        mask_token_id=checkpoint.metadata.mask_token_id,
    )


# What the server has


async def test_models_are_listed(client: httpx2.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    mars, plain = listed["data"]
    assert mars == {
        "id": "mars",
        "object": "model",
        "created": CREATED,
        "owned_by": "marsray",
        "max_model_len": 256,
        "mars": {"modes": ["threshold", "ar"], "block_size": 4},
    }
    assert plain["id"] == "plain"
    assert plain["mars"] == {"modes": ["ar"], "block_size": None}


async def test_official_client_lists_models(official: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in official.models.list()] == ["mars", "plain"]


async def test_health(client: httpx2.AsyncClient) -> None:
    response = await client.get("/health")
    assert response.status_code == 200
    idle = dict.fromkeys(["num_requests", "num_running", "num_waiting"], 0)
    idle |= {"num_pages": 128, "num_free_pages": 128, "num_reused_tokens": 0, "num_preemptions": 0}
    assert response.json() == {"status": "ok", "models": {"mars": idle, "plain": idle}}


# Completions


@pytest.mark.parametrize("threshold", [0.05, 0.9, 1.0])
@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
async def test_completion(
    official: openai.AsyncOpenAI, mars: Checkpoint, threshold: float, as_ids: bool
) -> None:
    ids = encode(mars.tokenizer, PROMPT, add_special_tokens=True)
    expected = oracle(mars, ids, 24, threshold)
    response = await official.completions.create(
        model="mars",
        prompt=ids if as_ids else PROMPT,
        max_tokens=24,
        temperature=0,
        extra_body={"confidence_threshold": threshold},
    )
    assert response.id.startswith("cmpl-")
    assert (response.object, response.model) == ("text_completion", "mars")
    assert [choice.text for choice in response.choices] == [decode(mars.tokenizer, expected.tokens)]
    assert response.choices[0].finish_reason == "length"
    assert response.usage.prompt_tokens == len(ids)
    assert response.usage.completion_tokens == len(expected.tokens) == 24
    assert response.usage.total_tokens == len(ids) + 24
    assert response.mars == {
        "mode": "threshold",
        "confidence_threshold": threshold,
        "forward_passes": len(expected.passes),
        "tokens_per_forward": round(24 / len(expected.passes), 4),
    }


async def test_low_threshold_takes_fewer_passes(client: httpx2.AsyncClient) -> None:
    low = await post(client, COMPLETIONS, {**COMPLETION, "confidence_threshold": 0.05})
    high = await post(client, COMPLETIONS, {**COMPLETION, "confidence_threshold": 1})
    assert low["mars"]["forward_passes"] < high["mars"]["forward_passes"] == 24


async def test_completion_has_16_tokens_unless_told(client: httpx2.AsyncClient) -> None:
    body = await post(client, COMPLETIONS, {"model": "mars", "prompt": PROMPT})
    assert body["usage"]["completion_tokens"] == 16


async def test_chat(official: openai.AsyncOpenAI, mars: Checkpoint) -> None:
    rendered = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    ids = encode(mars.tokenizer, rendered, add_special_tokens=False)
    expected = oracle(mars, ids, 24, 0.05)
    response = await official.chat.completions.create(
        model="mars",
        messages=MESSAGES,
        max_completion_tokens=24,
        extra_body={"confidence_threshold": 0.05},
    )
    assert response.id.startswith("chatcmpl-")
    assert response.object == "chat.completion"
    (choice,) = response.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == decode(mars.tokenizer, expected.tokens)
    assert choice.finish_reason == "length"
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (len(ids), 24)
    assert response.mars["forward_passes"] == len(expected.passes)


async def test_chat_goes_on_to_the_models_limit(client: httpx2.AsyncClient) -> None:
    body = await post(client, CHAT, {"model": "mars", "messages": MESSAGES})
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    if body["choices"][0]["finish_reason"] == "length":
        assert usage["total_tokens"] == 256
    else:
        assert usage["total_tokens"] < 256


async def test_an_end_token_counts_and_stops(mars: Checkpoint) -> None:
    ids = encode(mars.tokenizer, PROMPT, add_special_tokens=True)
    tokens = oracle(mars, ids, 24, 1.0).tokens
    index = next(i for i in range(4, 24) if tokens[i] not in tokens[:i])
    special = replace(mars.special, eos=frozenset({tokens[index]}))
    ending = replace(mars, special=special)
    loop = EngineLoop(Engine(ending, ENGINE))
    try:
        app = create_app({"mars": serve("mars", ending, LoopBackend(loop))})
        async with client_of(app) as client:
            body = await post(client, COMPLETIONS, {**COMPLETION, "mode": "ar"})
    finally:
        loop.stop()
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == index + 1


async def test_requests_at_once_do_not_mix(client: httpx2.AsyncClient) -> None:
    bodies = [
        {**COMPLETION, "prompt": f"What is {i} plus", "confidence_threshold": 0.05}
        for i in range(8)
    ]
    together = await asyncio.gather(*(post(client, COMPLETIONS, body) for body in bodies))
    alone = [await post(client, COMPLETIONS, body) for body in bodies]
    assert [each["choices"] for each in together] == [each["choices"] for each in alone]
    assert len({each["id"] for each in together}) == 8


# Streaming


@pytest.mark.parametrize("threshold", [0.02, 0.05, 1.0])
@pytest.mark.parametrize("path", BODIES)
async def test_stream_gives_the_same_text(
    client: httpx2.AsyncClient, path: str, threshold: float
) -> None:
    body = {**BODIES[path], "max_tokens": 60, "confidence_threshold": threshold}
    whole = await post(client, path, body)
    events = await events_of(client, path, body)
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


async def test_stream_shapes(client: httpx2.AsyncClient) -> None:
    completion = await events_of(client, COMPLETIONS, COMPLETION)
    assert {event["object"] for event in completion} == {"text_completion"}
    chat = await events_of(client, CHAT, CONVERSATION)
    assert {event["object"] for event in chat} == {"chat.completion.chunk"}
    roles = [event["choices"][0]["delta"].get("role") for event in chat]
    assert roles == ["assistant"] + [None] * (len(chat) - 1)


@pytest.mark.parametrize("path", BODIES)
async def test_include_usage_adds_one_event(client: httpx2.AsyncClient, path: str) -> None:
    whole = await post(client, path, BODIES[path])
    without = await events_of(client, path, BODIES[path])
    body = {**BODIES[path], "stream_options": {"include_usage": True}}
    *events, last = await events_of(client, path, body)
    assert len(events) == len(without)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert not any(event.get("usage") for event in [*events, *without])


async def test_official_client_streams(official: openai.AsyncOpenAI) -> None:
    options = {"model": "mars", "extra_body": {"confidence_threshold": 0.05}, "max_tokens": 24}
    whole = await official.chat.completions.create(messages=MESSAGES, **options)
    stream = await official.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **options
    )
    *chunks, usage = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].mars["forward_passes"] == len(chunks) == whole.mars["forward_passes"]
    assert usage.usage == whole.usage
    parts = await official.completions.create(prompt=PROMPT, stream=True, **options)
    texts = [chunk.choices[0].text async for chunk in parts]
    complete = await official.completions.create(prompt=PROMPT, **options)
    assert "".join(texts) == complete.choices[0].text


async def test_leaving_a_stream_frees_its_pages(
    app: FastAPI, loops: dict[str, EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loops["mars"].engine
    monkeypatch.setattr(engine, "step", _slowed(engine.step))
    gone = asyncio.Event()
    body = json.dumps({**COMPLETION, "max_tokens": 200, "stream": True, "mode": "ar"}).encode()
    incoming = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in incoming:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            gone.set()

    await asyncio.wait_for(app(_scope(COMPLETIONS), receive, send), timeout=5)
    assert gone.is_set()
    for _ in range(200):
        if not engine.has_work:
            break
        await asyncio.sleep(0.01)
    assert not engine.has_work
    assert engine.status().num_free_pages == ENGINE.num_pages


def _slowed(step: Callable[[], list[StepOutput]]) -> Callable[[], list[StepOutput]]:
    """The same step, so slow that 200 of them outlast the test."""

    def slow() -> list[StepOutput]:
        time.sleep(0.05)
        return step()

    return slow


def _scope(path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }


# Mode and threshold


@pytest.mark.parametrize(
    ("fields", "mode", "threshold"),
    [
        ({}, "threshold", 0.95),
        ({"confidence_threshold": 0.9}, "threshold", 0.9),
        ({"confidence_threshold": 0.1, "min_confidence_threshold": 0.6}, "threshold", 0.6),
        ({"confidence_threshold": 0.9, "min_confidence_threshold": 0.6}, "threshold", 0.9),
        ({"min_confidence_threshold": 0.99}, "threshold", 0.99),
        ({"confidence_threshold": 1}, "threshold", 1.0),
        ({"mode": "threshold"}, "threshold", 0.95),
        ({"mode": "ar"}, "ar", 1.0),
        ({"mode": "ar", "confidence_threshold": 0.2}, "ar", 1.0),
        ({"model": "plain"}, "ar", 1.0),
        ({"model": "plain", "mode": "ar"}, "ar", 1.0),
        ({"model": "plain", "confidence_threshold": 1}, "ar", 1.0),
    ],
)
async def test_effective_mode_and_threshold(
    client: httpx2.AsyncClient, fields: dict[str, Any], mode: str, threshold: float
) -> None:
    summary = (await post(client, COMPLETIONS, {**COMPLETION, **fields}))["mars"]
    assert (summary["mode"], summary["confidence_threshold"]) == (mode, threshold)
    if threshold == 1:
        assert summary["forward_passes"] == 24


async def test_settings_of_the_model_are_the_defaults(
    loops: dict[str, EngineLoop], mars: Checkpoint
) -> None:
    backend = LoopBackend(loops["mars"])
    models = {
        "low": serve("low", mars, backend, confidence_threshold=0.05),
        "ar": serve("ar", mars, backend, mode="ar"),
    }
    async with client_of(create_app(models)) as client:
        low = await post(client, COMPLETIONS, {**COMPLETION, "model": "low"})
        ar = await post(client, COMPLETIONS, {**COMPLETION, "model": "ar"})
        asked = await post(client, COMPLETIONS, {**COMPLETION, "model": "ar", "mode": "threshold"})
    assert low["mars"]["confidence_threshold"] == 0.05
    assert (ar["mars"]["mode"], ar["mars"]["confidence_threshold"]) == ("ar", 1.0)
    assert (asked["mars"]["mode"], asked["mars"]["confidence_threshold"]) == ("threshold", 0.95)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "top_p": 1, "n": 1, "stop": [], "logprobs": None, "echo": False},
        {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "best_of": 1},
        {"user": "someone", "seed": 3, "not_a_field": True},
    ],
)
async def test_neutral_fields_are_taken(client: httpx2.AsyncClient, fields: dict[str, Any]) -> None:
    plain = await post(client, COMPLETIONS, COMPLETION)
    assert (await post(client, COMPLETIONS, {**COMPLETION, **fields}))["choices"] == plain[
        "choices"
    ]


# Errors


def assert_error(response: httpx2.Response, status: int, param: str | None) -> str:
    """The response is an error in OpenAI's shape; returns its message."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert error["param"] == param
    assert param is None or param in error["message"]
    return error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        (COMPLETIONS, {"confidence_threshold": 0}, 400, "confidence_threshold"),
        (COMPLETIONS, {"confidence_threshold": 1.5}, 400, "confidence_threshold"),
        (COMPLETIONS, {"confidence_threshold": -0.1}, 400, "confidence_threshold"),
        (COMPLETIONS, {"confidence_threshold": "x"}, 400, "confidence_threshold"),
        (COMPLETIONS, {"min_confidence_threshold": 0}, 400, "min_confidence_threshold"),
        (COMPLETIONS, {"min_confidence_threshold": 2}, 400, "min_confidence_threshold"),
        (COMPLETIONS, {"mode": "fast"}, 400, "mode"),
        (COMPLETIONS, {"model": "absent"}, 404, "model"),
        (COMPLETIONS, {"model": None}, 400, "model"),
        (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt"),
        (COMPLETIONS, {"prompt": None}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [5, 100_000]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, 400, "prompt"),
        (COMPLETIONS, {"max_tokens": 0}, 400, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 500}, 400, "max_tokens"),
        (COMPLETIONS, {"temperature": 0.7}, 400, "temperature"),
        (COMPLETIONS, {"top_p": 0.5}, 400, "top_p"),
        (COMPLETIONS, {"n": 2}, 400, "n"),
        (COMPLETIONS, {"best_of": 2}, 400, "best_of"),
        (COMPLETIONS, {"stop": "."}, 400, "stop"),
        (COMPLETIONS, {"stop": ["."]}, 400, "stop"),
        (COMPLETIONS, {"logprobs": 0}, 400, "logprobs"),
        (COMPLETIONS, {"logprobs": 5}, 400, "logprobs"),
        (COMPLETIONS, {"echo": True}, 400, "echo"),
        (COMPLETIONS, {"suffix": "end"}, 400, "suffix"),
        (COMPLETIONS, {"logit_bias": {"5": 1}}, 400, "logit_bias"),
        (COMPLETIONS, {"model": "plain", "mode": "threshold"}, 400, "mode"),
        (
            COMPLETIONS,
            {"model": "plain", "confidence_threshold": 0.5},
            400,
            "confidence_threshold",
        ),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": ""}]}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "messages"),
        (CHAT, {"max_completion_tokens": 500}, 400, "max_completion_tokens"),
        (CHAT, {"model": "absent"}, 404, "model"),
        (CHAT, {"logprobs": True}, 400, "logprobs"),
        (CHAT, {"tools": [{"type": "function"}]}, 400, "tools"),
        (CHAT, {"response_format": {"type": "json_object"}}, 400, "response_format"),
        (CHAT, {"confidence_threshold": 1.01}, 400, "confidence_threshold"),
    ],
)
async def test_errors(
    client: httpx2.AsyncClient,
    path: str,
    fields: dict[str, Any],
    status: int,
    param: str,
    stream: bool,
) -> None:
    body = {**BODIES[path], **fields, "stream": stream}
    assert_error(await client.post(path, json=body), status, param)


@pytest.mark.parametrize(
    ("path", "missing"), [(COMPLETIONS, "prompt"), (COMPLETIONS, "model"), (CHAT, "messages")]
)
async def test_missing_fields(client: httpx2.AsyncClient, path: str, missing: str) -> None:
    body = {key: value for key, value in BODIES[path].items() if key != missing}
    assert_error(await client.post(path, json=body), 400, missing)


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b'"text"', b"\xff{}"])
@pytest.mark.parametrize("path", BODIES)
async def test_bodies_that_are_no_json_object(
    client: httpx2.AsyncClient, path: str, content: bytes
) -> None:
    headers = {"content-type": "application/json"}
    response = await client.post(path, content=content, headers=headers)
    assert_error(response, 422, None)


async def test_threshold_that_is_no_number(client: httpx2.AsyncClient) -> None:
    content = json.dumps({**COMPLETION, "confidence_threshold": float("nan")})
    headers = {"content-type": "application/json"}
    response = await client.post(COMPLETIONS, content=content, headers=headers)
    assert_error(response, 400, "confidence_threshold")


@pytest.mark.parametrize("path", BODIES)
async def test_a_prompt_too_long_is_refused_with_numbers(
    client: httpx2.AsyncClient, tokenizer: PreTrainedTokenizerBase, path: str
) -> None:
    long = "plus " * 300
    body = {**COMPLETION, "prompt": long}
    if path == CHAT:
        body = {**CONVERSATION, "messages": [{"role": "user", "content": long}]}
    response = await client.post(path, json=body)
    message = assert_error(response, 400, "max_tokens")
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "256" in message
    if path == COMPLETIONS:
        num_prompt = len(encode(tokenizer, long, add_special_tokens=True))
        assert f"{num_prompt} prompt tokens" in message
        assert str(num_prompt + 24) in message


async def test_unknown_model_names_the_known_ones(client: httpx2.AsyncClient) -> None:
    response = await client.post(COMPLETIONS, json={**COMPLETION, "model": "absent"})
    message = assert_error(response, 404, "model")
    assert all(name in message for name in ("absent", "mars", "plain"))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("POST", "/", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", CHAT, 405),
        ("POST", "/v1/models", 405),
    ],
)
async def test_paths_and_methods(
    client: httpx2.AsyncClient, method: str, path: str, status: int
) -> None:
    message = assert_error(await client.request(method, path), status, None)
    assert message.startswith(f"{method} {path}: ")


async def test_official_client_raises_its_own_errors(official: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await official.completions.create(model="mars", prompt=PROMPT, temperature=0.7)
    assert refusal.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await official.completions.create(model="absent", prompt=PROMPT)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFull("full"), 503, "queue_full"),
        (EngineDied("dead"), 503, "not_ready"),
        (RuntimeError("secret"), 500, "internal_error"),
    ],
)
async def test_backend_errors(
    mars: Checkpoint, error: Exception, status: int, code: str, stream: bool
) -> None:
    app = create_app({"mars": serve("mars", mars, BrokenBackend(error))})
    async with client_of(app) as client:
        response = await client.post(COMPLETIONS, json={**COMPLETION, "stream": stream})
    message = assert_error(response, status, None)
    assert response.json()["error"]["code"] == code
    assert ("retry-after" in response.headers) == (status == 503)
    assert "secret" not in message


async def test_an_error_amid_a_stream_is_its_last_event(mars: Checkpoint) -> None:
    backend = BrokenBackend(EngineDied("dead"), num_outputs=2)
    async with client_of(create_app({"mars": serve("mars", mars, backend)})) as client:
        response = await client.post(COMPLETIONS, json={**COMPLETION, "stream": True})
    assert response.status_code == 200
    *events, last, nothing = response.text.split("\n\n")
    assert (len(events), nothing) == (2, "")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "not_ready")


async def test_health_of_a_dead_replica(mars: Checkpoint) -> None:
    app = create_app({"mars": serve("mars", mars, BrokenBackend(EngineDied("dead")))})
    async with client_of(app) as client:
        response = await client.get("/health")
    message = assert_error(response, 503, None)
    assert "mars" in message


# Text

MULTIBYTE = "aé漢😀"


def push_all(tokenizer: PreTrainedTokenizerBase, groups: list[list[int]]) -> list[str]:
    stream = TextStream(tokenizer)
    last = len(groups) - 1
    return [stream.push(group, last=index == last) for index, group in enumerate(groups)]


def grouped(tokens: list[int], cuts: tuple[bool, ...]) -> list[list[int]]:
    """Split ``tokens`` after each place where ``cuts`` is true."""
    groups = [tokens[:1]]
    for token, cut in zip(tokens[1:], cuts, strict=True):
        if cut:
            groups.append([])
        groups[-1].append(token)
    return groups


def test_every_grouping_gives_whole_characters(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = encode(tokenizer, MULTIBYTE, add_special_tokens=False)
    assert len(tokens) == 10, "one token a byte"
    for cuts in product([False, True], repeat=len(tokens) - 1):
        parts = push_all(tokenizer, grouped(tokens, cuts))
        assert "".join(parts) == MULTIBYTE
        assert not any("\ufffd" in part for part in parts)


def test_characters_come_as_soon_as_they_are_whole(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = encode(tokenizer, MULTIBYTE, add_special_tokens=False)
    parts = push_all(tokenizer, [[token] for token in tokens])
    assert parts == ["a", "", "é", "", "", "漢", "", "", "", "😀"]


@pytest.mark.parametrize("length", [2, 4, 5, 7, 8, 9])
def test_output_that_ends_inside_a_character(
    tokenizer: PreTrainedTokenizerBase, length: int
) -> None:
    tokens = encode(tokenizer, MULTIBYTE, add_special_tokens=False)[:length]
    whole = decode(tokenizer, tokens)
    assert whole.endswith("\ufffd")
    *before, last = push_all(tokenizer, [[token] for token in tokens])
    assert "".join([*before, last]) == whole
    assert not any("\ufffd" in part for part in before)


def test_special_tokens_are_not_text(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = encode(tokenizer, "漢<|im_end|>", add_special_tokens=False)
    assert tokens[-1] == tokenizer.eos_token_id
    assert push_all(tokenizer, [tokens[:1], tokens[1:]]) == ["", "漢"]


@given(data=st.data())
def test_any_tokens_in_any_groups_join_to_the_decoded_whole(
    tokenizer: PreTrainedTokenizerBase, data: st.DataObject
) -> None:
    ids = st.integers(0, len(tokenizer) - 1)
    groups = data.draw(st.lists(st.lists(ids, min_size=1, max_size=5), min_size=1, max_size=12))
    whole = decode(tokenizer, [token for group in groups for token in group])
    assert "".join(push_all(tokenizer, groups)) == whole
