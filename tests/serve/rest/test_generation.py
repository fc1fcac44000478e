from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from fastapi import FastAPI
from ray.exceptions import RayTaskError
from transformers import PreTrainedTokenizerBase

from mars_platform import reference
from mars_platform.checkpoint import Checkpoint, load_model, read_checkpoint
from mars_platform.errors import UserError
from mars_platform.mode import Mode
from mars_serve.api import ServedModel, create_app
from mars_serve.engine.engine import Engine
from mars_serve.engine.loop import EngineDied, EngineLoop, QueueFull
from mars_serve.engine.request import EngineStatus, Request, StepOutput
from mars_serve.engine.settings import EngineSettings
from mars_serve.settings import ModelSettings
from mars_serve.text import OutputText, StopRules, TokenBytes, decode, encode

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
        "mars": {"modes": ["threshold", "exact", "ar"], "block_size": 4},
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
    await until_idle(engine)
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


# Several outputs


@pytest.mark.parametrize("path", BODIES)
async def test_several_choices(client: httpx2.AsyncClient, path: str) -> None:
    one = await post(client, path, BODIES[path])
    several = await post(client, path, {**BODIES[path], "n": 3, "best_of": 3})
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert [{**choice, "index": 0} for choice in several["choices"]] == one["choices"] * 3
    usage = several["usage"]
    assert usage["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert several["mars"] == {
        **one["mars"],
        "forward_passes": 3 * one["mars"]["forward_passes"],
    }


@pytest.mark.parametrize("path", BODIES)
async def test_streams_of_several_choices_interleave(client: httpx2.AsyncClient, path: str) -> None:
    body = {**BODIES[path], "n": 3, "confidence_threshold": 0.05}
    whole = await post(client, path, body)
    body["stream_options"] = {"include_usage": True}
    *events, last = await events_of(client, path, body)
    assert last["usage"] == whole["usage"]
    for index in range(3):
        mine = [event for event in events if event["choices"][0]["index"] == index]
        choices = [event["choices"][0] for event in mine]
        text = "".join(text_of(choice) for choice in choices)
        assert text == text_of(whole["choices"][index])
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1]["mars"]["forward_passes"] == len(mine)
        if path == CHAT:
            assert ["role" in choice["delta"] for choice in choices] == [True] + [False] * (
                len(mine) - 1
            )
    order = [event["choices"][0]["index"] for event in events]
    assert order != sorted(order)


async def test_a_choice_that_cannot_be_queued_ends_the_others(
    mars: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ENGINE.model_copy(update={"max_requests": 2})
    loop = EngineLoop(Engine(mars, settings))
    ended, cancel = list[str](), loop.engine.cancel
    monkeypatch.setattr(loop.engine, "cancel", lambda name: (ended.append(name), cancel(name)))
    try:
        app = create_app({"mars": serve("mars", mars, LoopBackend(loop))})
        for stream in (False, True):
            async with client_of(app) as client:
                body = {**COMPLETION, "n": 3, "max_tokens": 200, "mode": "ar", "stream": stream}
                response = await client.post(COMPLETIONS, json=body)
            assert_error(response, 503, None)
            assert response.json()["error"]["code"] == "queue_full"
            await until_idle(loop.engine)
    finally:
        loop.stop()
    assert len(ended) == 4, "two of each request had been queued"


async def until_idle(engine: Engine) -> None:
    for _ in range(200):
        if not engine.has_work:
            break
        await asyncio.sleep(0.01)
    assert not engine.has_work


# Stop strings


async def tokens_of(checkpoint: Checkpoint, path: str, threshold: float) -> list[int]:
    text = PROMPT
    if path == CHAT:
        text = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    prompt = encode(checkpoint.tokenizer, text, add_special_tokens=path == COMPLETIONS)
    return oracle(checkpoint, prompt, 24, threshold).tokens


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("threshold", [0.05, 1.0])
@pytest.mark.parametrize("path", BODIES)
async def test_stop_string(
    client: httpx2.AsyncClient,
    loops: dict[str, EngineLoop],
    mars: Checkpoint,
    path: str,
    threshold: float,
    include: bool,
) -> None:
    tokens = await tokens_of(mars, path, threshold)
    text = decode(mars.tokenizer, tokens)
    middle = len(text) // 2
    stop = text[middle : middle + 3]  # over token boundaries: most tokens are one character
    rules = StopRules((stop,), in_output=include)
    expected = OutputText(mars.tokenizer, rules).push(tokens, last=True)
    assert expected.is_stopped
    assert expected.num_tokens < 24
    body = {**BODIES[path], "confidence_threshold": threshold, "stop": [stop, "not there"]}
    body["include_stop_str_in_output"] = include
    whole = await post(client, path, body)
    (choice,) = whole["choices"]
    assert (text_of(choice), choice["finish_reason"]) == (expected.text, "stop")
    assert whole["usage"]["completion_tokens"] == expected.num_tokens
    events = await events_of(client, path, body)
    choices = [event["choices"][0] for event in events]
    assert "".join(text_of(each) for each in choices) == expected.text
    assert [each["finish_reason"] for each in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert sum(event["mars"]["tokens"] for event in events) == expected.num_tokens
    assert events[-1]["mars"]["forward_passes"] == whole["mars"]["forward_passes"] == len(events)
    await until_idle(loops["mars"].engine)


async def test_a_stop_string_cancels_at_the_engine(
    loops: dict[str, EngineLoop], client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loops["mars"].engine
    ended, cancel = list[str](), engine.cancel
    monkeypatch.setattr(engine, "cancel", lambda name: (ended.append(name), cancel(name)))
    plain = await post(client, COMPLETIONS, {**COMPLETION, "mode": "ar"})
    stop = plain["choices"][0]["text"][:2]
    for stream in (False, True):
        body = {**COMPLETION, "mode": "ar", "max_tokens": 200, "stop": stop, "stream": stream}
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        await until_idle(engine)
        assert engine.status().num_free_pages == ENGINE.num_pages
    assert len(ended) == 2


async def test_a_stop_string_that_never_comes_changes_nothing(client: httpx2.AsyncClient) -> None:
    plain = await post(client, COMPLETIONS, COMPLETION)
    start = plain["choices"][0]["text"][-1]
    stopped = await post(client, COMPLETIONS, {**COMPLETION, "stop": start + "\x07never"})
    assert stopped["choices"] == plain["choices"]
    events = await events_of(client, COMPLETIONS, {**COMPLETION, "stop": start + "\x07never"})
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == plain["choices"][0]["text"]


async def test_stop_token_ids(client: httpx2.AsyncClient, mars: Checkpoint) -> None:
    tokens = await tokens_of(mars, COMPLETIONS, 0.05)
    index = next(i for i in range(4, 24) if tokens[i] not in tokens[:i])
    for include, kept in ((False, tokens[:index]), (True, tokens[: index + 1])):
        body = {**COMPLETION, "confidence_threshold": 0.05, "stop_token_ids": [tokens[index]]}
        body["include_stop_str_in_output"] = include
        whole = await post(client, COMPLETIONS, body)
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert whole["choices"][0]["text"] == decode(mars.tokenizer, kept)
        assert whole["usage"]["completion_tokens"] == index + 1


# Sampling


SAMPLED = {"temperature": 1, "seed": 11}


@pytest.mark.parametrize("path", BODIES)
async def test_a_seed_repeats_the_output(client: httpx2.AsyncClient, path: str) -> None:
    body = {**BODIES[path], **SAMPLED}
    first, again = await post(client, path, body), await post(client, path, body)
    other = await post(client, path, {**body, "seed": 12})
    greedy = await post(client, path, BODIES[path])
    assert first["choices"] == again["choices"]
    texts = {text_of(each["choices"][0]) for each in (first, other, greedy)}
    assert len(texts) == 3
    events = await events_of(client, path, body)
    streamed = "".join(text_of(event["choices"][0]) for event in events)
    assert streamed == text_of(first["choices"][0])


async def test_choices_have_consecutive_seeds(client: httpx2.AsyncClient) -> None:
    body = {**COMPLETION, **SAMPLED}
    several = await post(client, COMPLETIONS, {**body, "n": 3})
    texts = [choice["text"] for choice in several["choices"]]
    alone = [
        (await post(client, COMPLETIONS, {**body, "seed": 11 + index}))["choices"][0]["text"]
        for index in range(3)
    ]
    assert texts == alone
    assert len(set(texts)) == 3


async def test_outputs_without_a_seed_differ(client: httpx2.AsyncClient) -> None:
    bodies = [post(client, COMPLETIONS, {**COMPLETION, "temperature": 1}) for _ in range(4)]
    texts = {each["choices"][0]["text"] for each in await asyncio.gather(*bodies)}
    assert len(texts) == 4


@pytest.mark.parametrize(
    "fields", [{}, SAMPLED, {**SAMPLED, "top_p": 0.9, "frequency_penalty": 1.0}]
)
async def test_mode_exact_gives_what_ar_gives(
    client: httpx2.AsyncClient, fields: dict[str, Any]
) -> None:
    exact = await post(client, COMPLETIONS, {**COMPLETION, **fields, "mode": "exact"})
    ar = await post(client, COMPLETIONS, {**COMPLETION, **fields, "mode": "ar"})
    assert exact["choices"] == ar["choices"]
    assert (exact["mars"]["mode"], exact["mars"]["confidence_threshold"]) == ("exact", 1.0)


@pytest.mark.parametrize(
    "fields",
    [
        {**SAMPLED, "top_k": 1},
        {**SAMPLED, "top_p": 1e-6},
        {**SAMPLED, "min_p": 1.0},
        {**SAMPLED, "temperature": 1e-4},
    ],
)
async def test_narrow_sampling_is_greedy(
    client: httpx2.AsyncClient, fields: dict[str, Any]
) -> None:
    greedy = await post(client, COMPLETIONS, {**COMPLETION, "mode": "ar"})
    narrow = await post(client, COMPLETIONS, {**COMPLETION, "mode": "ar", **fields})
    assert narrow["choices"] == greedy["choices"]


@pytest.mark.parametrize("mode", list(Mode))
async def test_logit_bias(client: httpx2.AsyncClient, mars: Checkpoint, mode: Mode) -> None:
    (token,) = encode(mars.tokenizer, "a", add_special_tokens=False)
    body = {**COMPLETION, "mode": mode, "logit_bias": {str(token): 100}}
    assert (await post(client, COMPLETIONS, body))["choices"][0]["text"] == "a" * 24


@pytest.mark.parametrize("mode", list(Mode))
async def test_penalties_change_the_output(client: httpx2.AsyncClient, mode: Mode) -> None:
    body = {**COMPLETION, "mode": mode}
    plain = await post(client, COMPLETIONS, body)
    for field, value in [
        ("frequency_penalty", 2),
        ("presence_penalty", 2),
        ("repetition_penalty", 5),
    ]:
        changed = await post(client, COMPLETIONS, {**body, field: value})
        assert changed["choices"] != plain["choices"], field


async def test_min_tokens_keep_end_tokens_away(
    client: httpx2.AsyncClient, mars: Checkpoint
) -> None:
    (end,) = mars.special.eos
    body = {**COMPLETION, "logit_bias": {str(end): 100}}
    at_once = await post(client, COMPLETIONS, body)
    assert at_once["usage"]["completion_tokens"] == 1
    later = await post(client, COMPLETIONS, {**body, "min_tokens": 5})
    assert later["usage"]["completion_tokens"] == 6
    assert {each["choices"][0]["finish_reason"] for each in (at_once, later)} == {"stop"}


async def test_calibration_that_the_model_does_not_have(client: httpx2.AsyncClient) -> None:
    response = await client.post(COMPLETIONS, json={**COMPLETION, "calibrated": True})
    assert_error(response, 400, "calibrated")


# Log-probabilities


@torch.inference_mode()
def raw_logprobs(checkpoint: Checkpoint, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Of the token at each place of an output: [tokens, vocabulary]."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = load_model(checkpoint.path)(input_ids=ids, use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


async def test_log_probabilities_of_a_completion(
    official: openai.AsyncOpenAI, mars: Checkpoint
) -> None:
    prompt = encode(mars.tokenizer, PROMPT, add_special_tokens=True)
    tokens, names = oracle(mars, prompt, 24, 1.0).tokens, TokenBytes(mars.tokenizer)
    expected = raw_logprobs(mars, prompt, tokens)
    extra = {"extra_body": {"mode": "ar"}}
    for num_top in (0, 3):
        response = await official.completions.create(
            model="mars", prompt=prompt, max_tokens=24, logprobs=num_top, **extra
        )
        found = response.choices[0].logprobs
        assert found.tokens == [names.name_of(token) for token in tokens]
        values = [float(expected[i, token]) for i, token in enumerate(tokens)]
        assert found.token_logprobs == pytest.approx(values, abs=1e-4)
        assert found.from_mask == [False] * 24
        text = response.choices[0].text
        assert found.text_offset == sorted(found.text_offset)
        assert found.text_offset[0] == 0
        is_whole = [not name.startswith("bytes:") for name in found.tokens]
        places = zip(found.tokens, found.text_offset, is_whole, [True, *is_whole], strict=False)
        checked = [text.startswith(name, at) for name, at, whole, after in places if whole & after]
        assert all(checked)
        assert len(checked) > 4
        for i, top in enumerate(found.top_logprobs):
            assert max(1, num_top) <= len(top) <= num_top + 1
            assert top[found.tokens[i]] == found.token_logprobs[i]
            likeliest = expected[i].topk(num_top).values.tolist()
            assert sorted(top.values(), reverse=True)[:num_top] == pytest.approx(
                likeliest, abs=1e-4
            )


async def test_log_probabilities_of_a_chat(official: openai.AsyncOpenAI, mars: Checkpoint) -> None:
    options: dict[str, Any] = {"model": "mars", "messages": MESSAGES, "max_tokens": 24}
    options |= {"logprobs": True, "top_logprobs": 4, "extra_body": {"confidence_threshold": 0.05}}
    response = await official.chat.completions.create(**options)
    content = response.choices[0].logprobs.content
    assert len(content) == 24
    spoken = b"".join(bytes(each.bytes) for each in content)
    assert spoken.decode(errors="replace") == response.choices[0].message.content
    for each in content:
        assert len(each.top_logprobs) == 4
        assert each.logprob <= 0
        assert sum(top.logprob == each.logprob for top in each.top_logprobs) >= (not each.from_mask)
    assert any(each.from_mask for each in content)
    assert not content[0].from_mask, "the first token of a pass is not from a mask"
    stream = await official.chat.completions.create(stream=True, **options)
    streamed, passes = [], []
    async for chunk in stream:
        part = chunk.choices[0].logprobs.content
        streamed += part
        passes.append([each.from_mask for each in part])
    assert streamed == content
    assert all(part == [False] + [True] * (len(part) - 1) for part in passes)


async def test_log_probabilities_end_with_the_stop_string(client: httpx2.AsyncClient) -> None:
    body = {**COMPLETION, "confidence_threshold": 0.02, "logprobs": 1}
    plain = (await post(client, COMPLETIONS, body))["choices"][0]
    stop = plain["text"][3:5]
    whole = await post(client, COMPLETIONS, {**body, "stop": stop})
    num_tokens = whole["usage"]["completion_tokens"]
    assert num_tokens < 24
    for field, values in whole["choices"][0]["logprobs"].items():
        assert values == plain["logprobs"][field][:num_tokens], field


async def test_no_log_probabilities_unless_asked_for(client: httpx2.AsyncClient) -> None:
    for path, body in BODIES.items():
        assert (await post(client, path, body))["choices"][0]["logprobs"] is None


# Structured output


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_grammar": 'start: "a" "b"'}, "ab"),
        ({"guided_json": {"enum": [1, "x", None]}}, '1|"x"|null'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 5}}}},
            "5",
        ),
    ],
)
@pytest.mark.parametrize("path", BODIES)
async def test_structure(
    client: httpx2.AsyncClient, path: str, fields: dict[str, Any], pattern: str, mode: Mode
) -> None:
    body = {**BODIES[path], **fields, "mode": mode, **SAMPLED}
    choice = (await post(client, path, body))["choices"][0]
    assert re.fullmatch(pattern, text_of(choice).strip())
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_regex", "("),
        ("guided_grammar", "start: nothing"),
        ("guided_json", '{"type": '),
        ("guided_json", {"type": "thing"}),
        ("structured_outputs", {"regex": "("}),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}},
        ),
    ],
)
async def test_structure_that_does_not_compile(
    client: httpx2.AsyncClient, field: str, value: Any, stream: bool
) -> None:
    response = await client.post(COMPLETIONS, json={**COMPLETION, field: value, "stream": stream})
    assert assert_error(response, 400, field).startswith(f"{field}: ")


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
        (COMPLETIONS, {"echo": True}, 400, "echo"),
        (COMPLETIONS, {"suffix": "end"}, 400, "suffix"),
        (COMPLETIONS, {"logprobs": 6}, 400, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, 400, "logprobs"),
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
        (CHAT, {"logprobs": 1}, 400, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, 400, "top_logprobs"),
        (CHAT, {"tools": [{"type": "function"}]}, 400, "tools"),
        (CHAT, {"tool_choice": "required"}, 400, "tool_choice"),
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


TOO_MANY = 2**63


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, 2.1, "0.5", True, float("nan")]),
        ("top_p", [0, 1.1, float("inf")]),
        ("top_k", [-2, 2**31, 1.5]),
        ("min_p", [-0.1, 1.1]),
        ("seed", [TOO_MANY, -TOO_MANY - 1, 0.5, "x"]),
        ("repetition_penalty", [0, -1, 101]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1]),
        (
            "logit_bias",
            [
                {"a": 1},
                {"-1": 1},
                {"5": 100.5},
                {"5": None},
                {"100000": 1},
                [5],
                {str(each): 1 for each in range(1025)},
            ],
        ),
        ("min_tokens", [-1, 25]),
        ("stop", ["", [""], [5], ["x"] * 17, "x" * 257, {}]),
        ("stop_token_ids", [[-1], [100_000], ["a"], 5, [5] * 1025]),
        ("include_stop_str_in_output", ["maybe"]),
        ("n", [0, 17, 1.5]),
        ("best_of", [2]),
        ("mode", ["fast"]),
        ("confidence", ["hope"]),
        ("calibrated", ["maybe"]),
        ("service_tier", ["priority"]),
        ("response_format", [{"type": "yaml"}, {"type": "json_schema"}, {}, "json"]),
        ("structured_outputs", [{}, {"jsn": {}}, {"json": 5}, {"regex": "a", "choice": ["a"]}]),
        ("guided_json", [5, "", "x" * 65_537]),
        ("guided_regex", ["", 5]),
        ("guided_grammar", ["", 5]),
        ("guided_choice", [[], [""], "a", ["a"] * 1025]),
        ("ignore_eos", [True]),
        ("use_beam_search", [True]),
        ("length_penalty", [2]),
        ("allowed_token_ids", [[5]]),
        ("bad_words", [["x"]]),
        ("skip_special_tokens", [False]),
        ("truncate_prompt_tokens", [5]),
        ("prompt_logprobs", [0]),
    ],
)
@pytest.mark.parametrize("path", BODIES)
async def test_values_out_of_range(
    client: httpx2.AsyncClient, path: str, field: str, values: list[Any]
) -> None:
    headers = {"content-type": "application/json"}
    for value in values:
        content = json.dumps({**BODIES[path], field: value})
        message = assert_error(
            await client.post(path, content=content, headers=headers), 400, field
        )
        assert message.startswith(field), value
        assert len(message) < 400


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
        await official.completions.create(model="mars", prompt=PROMPT, temperature=2.5)
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


async def test_what_the_engine_refuses_keeps_its_words_through_ray(mars: Checkpoint) -> None:
    cause = UserError("grammar: it does not parse")
    error = RayTaskError("stream", "a remote traceback", cause).as_instanceof_cause()
    app = create_app({"mars": serve("mars", mars, BrokenBackend(error))})
    async with client_of(app) as client:
        response = await client.post(COMPLETIONS, json={**COMPLETION, "guided_regex": "a"})
    assert assert_error(response, 400, "guided_regex") == "guided_regex: it does not parse"


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
