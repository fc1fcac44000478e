"""The endpoints that answer conversations say the same of one output, whole and streamed, however
it is cut into passes, and the endpoint of completions says it of the same prompt.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

from pydantic_core import from_json

from decoding.local_engine_client import LocalEngineClient
from mars_serve.api.protocol import DecodingRequest
from mars_serve.engine.settings import EngineSettings
from rest.random_requests import ForeseeingEngine, draw_request, make_checkpoint
from rest.rest_requests import CHAT, COMPLETIONS
from rest.rest_server import Client, SingleEngineBackend, app_of, client_of, served

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
_SETTINGS = EngineSettings(page_size=8, num_pages=256, max_num_seqs=8, max_num_batched_tokens=512)
_NUM_REQUESTS, _AT_ONCE = 60, 4
_OWN = {"echo", "continue_final_message", "n", "include_reasoning"}
"""Fields of chats that no other dialect has, or that leave something out."""
_MET = ["calls", "reasoning", "text", "stop", "length", "tool_calls", "completion"]


async def test_all_dialects_say_the_same_of_an_output() -> None:
    checkpoint, model = make_checkpoint("byte-level")
    engine = LocalEngineClient(ForeseeingEngine(checkpoint, _SETTINGS, model=model))
    gate, seen, found = asyncio.Semaphore(_AT_ONCE), Counter[str](), list[str]()

    async def check(client: Client, seed: int, chat: dict[str, Any]) -> None:
        async with gate:
            answers = await _answers(client, chat, seed)
        expected = answers.pop(CHAT)
        found.extend(
            f"seed {seed}: {json.dumps(chat)}\n{expected}\n{name}: {answer}"
            for name, answer in answers.items()
            if answer != {key: expected[key] for key in answer}
        )
        seen.update([expected["finish"], *(key for key in _MET if expected.get(key))])
        seen["completion"] += COMPLETIONS in answers

    try:
        backend = SingleEngineBackend(engine)
        async with client_of(app_of(served("mars", checkpoint, backend))) as client:
            drawn = {
                seed: draw_request(random.Random(seed), checkpoint.tokenizer)
                for seed in range(_NUM_REQUESTS)
            }
            chats = {
                seed: {key: each[key] for key in each if key not in _LEFT_OUT}
                for seed, each in drawn.items()
                if each["path"] == CHAT and not _OWN & each.keys()
            }
            await asyncio.gather(*(check(client, *each) for each in chats.items()))
    finally:
        engine.stop()
    assert not found, f"{len(found)} differ:\n\n" + "\n\n".join(found)
    assert all(seen[name] for name in _MET), seen


_LEFT_OUT = {
    "path", "stream_options", "logprobs", "top_logprobs", "return_token_ids",
    "return_tokens_as_token_ids",
}  # fmt: skip


_BEHIND_THINKING = {"tools", "response_format", "guided_json", "structured_outputs"}
"""Fields of chats without a counterpart in completions."""


async def _answers(client: Client, chat: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return what each endpoint says, with what a chat says in mode ar as the first."""
    reference = {**chat, "mode": "ar", "cache_salt": f"{seed}/", "return_token_ids": True}
    whole = (await client.post(CHAT, json=reference)).json()
    if "error" in whole:
        return {CHAT: {"finish": "error"}}
    answers = {CHAT: _of_chat(whole)}
    for number, (path, translate, read) in enumerate(_DIALECTS):
        body = {**translate(chat), "mode": "exact"}
        for is_streamed in (False, True):
            salt = f"{seed}/{number}{is_streamed}"
            sent = {**body, "stream": is_streamed, "cache_salt": salt}
            response = await client.post(path, json=sent)
            assert response.status_code == 200, (response.text, sent)
            message = _joined(response.text) if is_streamed else response.json()
            answers[f"{path}, streamed: {is_streamed}"] = read(message)
    stops_elsewhere = "stop" in chat and answers[CHAT]["reasoning"]  # in a chat behind the thinking
    if not (_BEHIND_THINKING & chat.keys() or stops_elsewhere):
        answers[COMPLETIONS] = await _completion(client, chat, seed, whole["prompt_token_ids"])
    return answers


def _of_chat(answer: dict[str, Any]) -> dict[str, Any]:
    [choice], usage = answer["choices"], answer["usage"]
    message, stop = choice["message"], choice["stop_reason"]
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    return {
        "text": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": [(each["name"], _value(each["arguments"])) for each in calls],
        "finish": choice["finish_reason"],
        "ending": _ending(choice["finish_reason"]),
        "stop": stop if isinstance(stop, str) and choice["finish_reason"] == "stop" else None,
        "prompt": usage["prompt_tokens"],
        "output": usage["completion_tokens"],
        "thinking": usage["completion_tokens_details"]["reasoning_tokens"],
        "token_ids": choice["token_ids"],
    }


def _ending(finish: str) -> str:
    """Return what the Responses API tells of a reason to finish."""
    return "incomplete" if finish == "length" else "completed"


def _value(arguments: str) -> Any:
    """Return the arguments of a call as the Messages API has them, which models may write badly."""
    try:
        return from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {"INVALID_JSON": arguments}


def _shared(chat: dict[str, Any]) -> dict[str, Any]:
    return {name: chat[name] for name in chat if name in DecodingRequest.model_fields}


def _as_response(chat: dict[str, Any]) -> dict[str, Any]:
    """Return a chat as a body of the Responses API."""
    body = {**_shared(chat), "input": chat["messages"], "max_output_tokens": chat["max_tokens"]}
    if "response_format" in chat:
        body["text"] = {"format": chat["response_format"]}
    if "guided_json" in chat:
        form = {"type": "json_schema", "name": "x", "schema": chat["guided_json"]}
        body["text"] = {"format": form}
    if "chat_template_kwargs" in chat:
        body["reasoning"] = {"effort": "high"}
    if "tools" in chat:
        body["tools"] = [{"type": "function", **each["function"]} for each in chat["tools"]]
        choice = chat["tool_choice"]
        is_named = isinstance(choice, dict)
        named = {"type": "function", **choice["function"]} if is_named else choice
        body["tool_choice"] = named
    if "parallel_tool_calls" in chat:
        body["parallel_tool_calls"] = chat["parallel_tool_calls"]
    return body


def _of_response(answer: dict[str, Any]) -> dict[str, Any]:
    items, usage = answer["output"], answer["usage"]

    def text(kind: str) -> str:
        parts = (part for item in items if item["type"] == kind for part in item["content"])
        return "".join(part["text"] for part in parts)

    calls = [each for each in items if each["type"] == "function_call"]
    return {
        "text": text("message"),
        "reasoning": text("reasoning"),
        "calls": [(each["name"], _value(each["arguments"])) for each in calls],
        "ending": answer["status"],
        "prompt": usage["input_tokens"],
        "output": usage["output_tokens"],
        "thinking": usage["output_tokens_details"]["reasoning_tokens"],
    }


def _as_message(chat: dict[str, Any]) -> dict[str, Any]:
    """Return a chat as a body of the Messages API."""
    body = {**_shared(chat), "messages": chat["messages"], "max_tokens": chat["max_tokens"]}
    if "response_format" in chat:
        body["structured_outputs"] = {"json_object": True}
    if "guided_json" in chat:
        form = {"type": "json_schema", "schema": chat["guided_json"]}
        body["output_config"] = {"format": form}
    if "stop" in body:
        body["stop_sequences"] = body.pop("stop")
    if "chat_template_kwargs" in chat:
        body["thinking"] = {"type": "enabled"}
    if "tools" in chat:
        functions = [each["function"] for each in chat["tools"]]
        none = {"type": "object", "properties": {}}
        body["tools"] = [
            {"name": each["name"], "input_schema": each.get("parameters", none)}
            for each in functions
        ]
        choice = chat["tool_choice"]
        kind = {"required": "any"}.get(choice, choice) if isinstance(choice, str) else "tool"
        body["tool_choice"] = {"type": kind}
        if kind == "tool":
            body["tool_choice"]["name"] = choice["function"]["name"]
        if kind != "none" and chat.get("parallel_tool_calls") is False:
            body["tool_choice"]["disable_parallel_tool_use"] = True
    return body


_FINISHES = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
}


def _of_message(answer: dict[str, Any]) -> dict[str, Any]:
    blocks, usage = answer["content"], answer["usage"]

    def text(kind: str) -> str:
        return "".join(block[kind] for block in blocks if block["type"] == kind)

    calls = [block for block in blocks if block["type"] == "tool_use"]
    return {
        "text": text("text"),
        "reasoning": text("thinking"),
        "calls": [(each["name"], each["input"]) for each in calls],
        "finish": _FINISHES[answer["stop_reason"]],
        "stop": answer["stop_sequence"],
        "prompt": usage["input_tokens"] + usage["cache_read_input_tokens"],
        "output": usage["output_tokens"],
        "thinking": usage["output_tokens_details"]["thinking_tokens"],
    }


_DIALECTS = [
    (RESPONSES, _as_response, _of_response),
    (MESSAGES, _as_message, _of_message),
]


def _joined(text: str) -> dict[str, Any]:
    """Return the answer that the events of a stream make together."""
    events = [json.loads(each.partition("data: ")[2]) for each in text.split("\n\n")[:-1]]
    if events[0]["type"] == "response.created":
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        return _items_joined(events)
    assert events[-1]["type"] == "message_stop", events[-1]
    answer, end = events[0]["message"], events[-2]
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(answer["content"])
            answer["content"].append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            [_, (field, piece)] = event["delta"].items()
            block = answer["content"][event["index"]]
            field = "json" if field == "partial_json" else field
            block[field] += piece
    for block in answer["content"]:
        if block["type"] == "tool_use":
            block["input"] = _value(block["json"])
    return {**answer, **end["delta"], "usage": end["usage"]}


def _items_joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response whose items the deltas of a stream make."""
    items, last = list[dict[str, Any]](), events[-1]
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append({**event["item"], "content": [{"text": ""}], "arguments": ""})
        elif kind.endswith("text.delta"):
            assert event["item_id"] == items[event["output_index"]]["id"]
            items[event["output_index"]]["content"][0]["text"] += event["delta"]
        elif kind.endswith("arguments.delta"):
            items[event["output_index"]]["arguments"] += event["delta"]
    assert last["type"] == f"response.{last['response']['status']}"
    return {**last["response"], "output": items}


async def _completion(
    client: Client, chat: dict[str, Any], seed: int, prompt: list[int]
) -> dict[str, Any]:
    """Return what a completion of a chat's prompt says of its tokens."""
    body = {**_shared(chat), "prompt": prompt, "max_tokens": chat["max_tokens"], "mode": "ar"}
    body |= {"cache_salt": f"{seed}/", "return_token_ids": True}
    body.pop("truncate_prompt_tokens", None)
    response = await client.post(COMPLETIONS, json=body)
    [choice], usage = response.json()["choices"], response.json()["usage"]
    return {
        "token_ids": choice["token_ids"],
        "finish": choice["finish_reason"],
        "prompt": usage["prompt_tokens"],
        "output": usage["completion_tokens"],
    }
