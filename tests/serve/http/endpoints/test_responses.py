"""Tests the Responses API over real engines and over given forward passes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from decoding.local_engine_client import LocalEngineClient
from mars_platform.checkpoint.directory import Checkpoint
from mars_serve.api import bounds
from mars_serve.api.responses.schema import ItemList, ResponseObject
from mars_serve.config.settings import StorageSettings
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.engine.ipc.client import EngineDied
from mars_serve.storage.objects import ObjectStorage, new_id
from rest.replaying import ReplayingBackend
from rest.rest_requests import SHORT_TOOL_TEMPLATE
from rest.rest_server import BrokenBackend, Client, SingleEngineBackend

PATH = "/v1/responses"
BODY = {"model": "mars", "input": "7?", "max_output_tokens": 24}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "x"}}\n</tool_call>'
TEXT = f"So: {CALL}\n{CALL} and 8"
_EVENT = TypeAdapter[Any](ResponseStreamEvent)


@pytest.fixture(scope="module")
def trained(mars: Checkpoint) -> Iterator[Checkpoint]:
    """Return the checkpoint with a chat template that supports tools."""
    tokenizer = mars.tokenizer
    before, tokenizer.chat_template = tokenizer.chat_template, SHORT_TOOL_TEMPLATE
    yield replace(mars, tokenizer=tokenizer)
    tokenizer.chat_template = before


@pytest.fixture
def storing(
    trained: Checkpoint, loops: dict[str, LocalEngineClient], client_over: Any, tmp_path: Path
) -> Client:
    backend = SingleEngineBackend(loops["mars"])
    client: Client = client_over(backend, trained, storage={"path": str(tmp_path)})
    return client


def official_of(client: Client) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="none", base_url="http://localhost/v1", http_client=client, max_retries=0
    )


async def streamed(client: Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which the official types describe."""
    response = await client.post(PATH, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    *events, nothing = response.text.split("\n\n")
    assert nothing == ""
    found = []
    for index, event in enumerate(events):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == index
        if found[-1]["type"] != "mars.pass":
            _EVENT.validate_python(found[-1])
    return found


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the output that a stream's deltas make, and check the order of the events."""
    items = list[dict[str, Any]]()
    for event in events:
        kind, _, act = event["type"].removeprefix("response.").partition(".")
        if kind == "output_item" and act == "added":
            assert all(item["status"] != "in_progress" for item in items)
            items.append({**event["item"], "text": ""})
        elif kind in ("output_text", "reasoning_text", "function_call_arguments"):
            assert event["item_id"] == items[-1]["id"]
            if act == "delta":
                items[-1]["text"] += event["delta"]
            else:
                assert items[-1]["text"] == event.get("text", event.get("arguments"))
        elif kind == "output_item":
            written = items[-1].pop("text")
            items[-1] = event["item"]
            content = items[-1].get("content")
            assert written == (content[0]["text"] if content else items[-1]["arguments"])
        if "output_index" in event:
            assert event["output_index"] == len(items) - 1
    return items


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """Return what two answers to a request have in common."""
    output = [
        {k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]
    ]
    changing = {"id", "created_at", "completed_at", "mars", "usage"}
    others = {key: value for key, value in response.items() if key not in changing}
    return {**others, "output": output, "output_tokens": response["usage"]["output_tokens"]}


async def test_whole_and_streamed_answers_are_the_same(client):
    body = {**BODY, "instructions": "Add.", "metadata": {"a": "b"}, "top_logprobs": 1}
    await client.answer(PATH, body)  # with its prompt cached, further answers round sums alike
    whole = await client.answer(PATH, body)
    ResponseObject.model_validate(whole)
    Response.model_validate(whole)
    events = await streamed(client, body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:-1] == ["output_text.done", "content_part.done", "output_item.done"]
    assert kinds[-1] == whole["status"]
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert rebuilt(events) == events[-1]["response"]["output"]
    (message,) = whole["output"]
    logprobs = message["content"][0]["logprobs"]
    assert len(logprobs) == whole["usage"]["output_tokens"]
    parts = [event["logprobs"] for event in events if event["type"].endswith("text.delta")]
    assert [each for part in parts for each in part] == logprobs[: sum(map(len, parts))]
    chat = {"model": "mars", "max_tokens": 24, "messages": [{"role": "system", "content": "Add."}]}
    chat["messages"].append({"role": "user", "content": "7?"})
    (choice,) = (answer := await client.answer("/v1/chat/completions", chat))["choices"]
    assert message["content"][0]["text"] == choice["message"]["content"]
    assert whole["usage"]["output_tokens"] == answer["usage"]["completion_tokens"]
    assert (choice["finish_reason"] == "length") == (whole["status"] == "incomplete")


@pytest.mark.parametrize("seed", range(8))
async def test_the_cut_into_passes_changes_nothing(trained, client_over, seed):
    draw = random.Random(seed)
    ids = trained.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    ends = sorted({*draw.sample(range(1, len(ids)), draw.randint(0, 12)), len(ids)})
    passes = [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    client = client_over(ReplayingBackend(passes, FinishReason.STOP), trained)
    body = {**BODY, "tools": [TOOL], "max_output_tokens": 200}
    whole, events = await client.answer(PATH, body), await streamed(client, body)
    for output in (whole["output"], rebuilt(events), events[-1]["response"]["output"]):
        texts = [item.get("arguments") or item["content"][0]["text"] for item in output]
        assert [each.strip() for each in texts] == ["So:", '{"a": "x"}', '{"a": "x"}', "and 8"]
        kinds = [item["type"] for item in output]
        assert kinds == ["message", "function_call", "function_call", "message"]
        assert {item["status"] for item in output} == {"completed"}
    assert events[-1]["type"] == "response.completed"


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
async def test_a_call_that_is_cut_is_incomplete(trained, client_over, reason):
    ids = trained.tokenizer(CALL[:45], add_special_tokens=False)["input_ids"]
    client = client_over(ReplayingBackend([ids], reason), trained)
    response = await client.answer(PATH, {**BODY, "tools": [TOOL]})
    details = {"reason": "max_output_tokens"} if reason is FinishReason.LENGTH else None
    assert response["incomplete_details"] == details
    assert [item["status"] for item in response["output"]] == ["incomplete"]


async def test_calls_of_a_namespace_bear_its_name(trained, client_over):
    text = CALL.replace("add", "mcp__x__add")
    ids = trained.tokenizer(text, add_special_tokens=False)["input_ids"]
    client = client_over(ReplayingBackend([ids]), trained)
    tools = [{"type": "namespace", "name": "mcp__x", "tools": [TOOL]}]
    response = await client.answer(PATH, {**BODY, "tools": tools})
    (call,) = response["output"]
    assert (call["namespace"], call["name"]) == ("mcp__x", "add")
    Response.model_validate(response)


async def test_an_engine_that_dies_ends_the_stream_with_an_event(client_over, tmp_path):
    broken = BrokenBackend(EngineDied("gone"), num_outputs=2)
    client = client_over(broken, storage={"path": str(tmp_path)})
    *_, last = await streamed(client, BODY)
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]
    missing = await client.get(f"{PATH}/{last['response']['id']}")
    assert missing.status_code == 404


async def test_passes_are_told_if_asked_for(client):
    events = await streamed(client, {**BODY, "return_passes": True})
    told = [event["mars"]["tokens"] for event in events if event["type"] == "mars.pass"]
    assert sum(told) == events[-1]["response"]["usage"]["output_tokens"]


async def test_the_official_client_goes_on_from_a_stored_response(storing):
    client = official_of(storing)
    first = await client.responses.create(model="mars", input="7?", max_output_tokens=8)
    assert first.store
    found = await client.responses.retrieve(first.id)
    assert found.model_dump() == first.model_dump()
    async with client.responses.stream(
        model="mars", input="8?", max_output_tokens=8, previous_response_id=first.id
    ) as stream:
        second = [event async for event in stream][-1].response
    items = (await storing.get(f"{PATH}/{second.id}/input_items?order=asc")).json()
    ItemList.model_validate(items)
    texts = [item["content"][0]["text"] for item in items["data"]]
    assert texts == ["7?", first.output_text, "8?"]
    alone = [{"role": "user", "content": "7?"}, first.output[0].model_dump()]
    alone.append({"type": "item_reference", "id": items["data"][2]["id"]})
    again = await client.responses.create(model="mars", input=alone, max_output_tokens=8)
    assert again.output_text == second.output[0].content[0].text
    assert again.usage.input_tokens == second.usage.input_tokens
    page = await client.responses.input_items.list(second.id, limit=2)
    assert [item.id for item in page.data] == [each["id"] for each in items["data"][:0:-1]]
    assert page.has_more
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id: 'resp_"):
        await client.responses.create(model="mars", input="8?", previous_response_id=first.id)


async def ended(client: Client, name: str) -> dict[str, Any]:
    """Return a response of the background once it has ended."""
    for _ in range(200):
        response: dict[str, Any] = (await client.get(f"{PATH}/{name}")).json()
        if response["status"] not in ("queued", "in_progress"):
            return response
        await asyncio.sleep(0.05)
    raise AssertionError(response)


async def test_a_response_in_the_background_is_found_once_it_has_ended(storing):
    queued = await storing.answer(PATH, {**BODY, "background": True})
    assert queued["status"] == "queued"
    ResponseObject.model_validate(queued)
    found = await ended(storing, queued["id"])
    ResponseObject.model_validate(found)
    assert found["background"]
    assert found["output"][0]["id"].startswith(queued["id"].replace("resp", "msg"))
    whole = await storing.answer(PATH, {**BODY, "store": False})
    assert found["output"][0]["content"] == whole["output"][0]["content"]
    message = await storing.refusal(
        PATH, {**BODY, "background": True, "max_output_tokens": 10**6}, 400, "max_output_tokens"
    )
    assert message


async def test_a_stream_holds_no_more_logprobs_than_a_whole_answer(client, monkeypatch):
    monkeypatch.setattr(bounds, "MAX_REPORTED", 40)
    body = {**BODY, "top_logprobs": 1, "stream": True}
    assert "log-probabilities" in await client.refusal(PATH, body, 400, "max_output_tokens")


async def test_a_key_without_room_keeps_only_what_it_must(trained, loops, client_over, tmp_path):
    kept = {"path": str(tmp_path), "bytes_per_key": 2**20}
    client = client_over(SingleEngineBackend(loops["mars"]), trained, storage=kept)
    await ObjectStorage(StorageSettings(**kept)).put("", "files", new_id(), bytes(9))
    assert (await client.answer(PATH, BODY))["store"] is False
    refused = await client.post(PATH, json={**BODY, "store": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "storage_full")


@pytest.mark.parametrize("name", ["store", "background", "previous_response_id"])
async def test_a_server_without_storage_refuses_what_needs_it(client, name):
    value = "resp_x" if name.endswith("id") else True
    message = await client.refusal(PATH, {**BODY, name: value}, 400, name)
    assert "set storage.path" in message
    assert not (await client.answer(PATH, BODY))["store"]


async def test_refusals_name_the_fields_of_the_body(client):
    items = [{"role": "user", "content": "7?"}, {"type": "web_search_call", "id": "ws"}]
    message = await client.refusal(PATH, {**BODY, "input": items}, 400, "input")
    assert message.startswith("input.1.type: Items are")
    schema = {"type": "json_schema", "name": "x", "schema": False}
    await client.refusal(PATH, {**BODY, "text": {"format": schema}}, 400, "text.format")
    most = {**BODY, "max_output_tokens": 10**6}
    message = await client.refusal(PATH, most, 400, "max_output_tokens")
    assert "lower max_output_tokens" in message
    response = await client.post(PATH, json={**BODY, "tools": [{"type": "web_search"}], "odd": 1})
    assert response.headers["X-Marsray-Unknown-Fields"] == "odd, tools.0.web_search"
