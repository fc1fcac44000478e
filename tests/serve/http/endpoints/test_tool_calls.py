from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from decoding.local_engine_client import LocalEngineClient
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.method.mode import Mode
from rest.rest_requests import CHAT
from rest.rest_server import SingleEngineBackend

TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n<tools>' }}
{%- for tool in tools %}{{ tool.function.name }}{% endfor %}{{ '</tools><|im_end|>\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""A template that is short enough for the small model's context."""
MESSAGES = [{"role": "user", "content": "7?"}]


def tool(name: str, *choices: str) -> dict[str, Any]:
    """Return a tool whose only argument has a few short values."""
    parameters = {
        "type": "object",
        "properties": {"a": {"enum": list(choices)}},
        "required": ["a"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("add", "x", "yes"), tool("take", "no")]
BODY = {"model": "mars", "messages": MESSAGES, "max_tokens": 90, "tools": TOOLS}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "x"}}\n</tool_call>'


@pytest.fixture(scope="module")
def trained(mars: Checkpoint) -> Iterator[Checkpoint]:
    """Return the checkpoint with a chat template that supports tools."""
    tokenizer = mars.tokenizer
    before, tokenizer.chat_template = tokenizer.chat_template, TEMPLATE
    yield replace(mars, tokenizer=tokenizer)
    tokenizer.chat_template = before


@pytest.fixture
def client(trained: Checkpoint, loops: dict[str, LocalEngineClient], client_over: Any) -> Any:
    return client_over(SingleEngineBackend(loops["mars"]), trained)


def check(call: dict[str, Any]) -> None:
    """Check a forced call, which is valid by construction."""
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    allowed = {"add": ["x", "yes"], "take": ["no"]}[call["function"]["name"]]
    arguments = json.loads(call["function"]["arguments"])
    assert list(arguments) == ["a"]
    assert arguments["a"] in allowed


def joined(events: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Return a stream's content and calls as clients assemble them."""
    content, calls = "", list[dict[str, Any]]()
    for event in events:
        delta = event["choices"][0]["delta"]
        content += delta.get("content") or ""
        for part in delta.get("tool_calls", []):
            if part["index"] == len(calls):
                calls.append({**part, "function": dict(part["function"])})
            else:
                assert set(part) == {"index", "function"}
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    for index, call in enumerate(calls):
        assert call.pop("index") == index
    return content, calls


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_required_call_is_returned_whole_and_streamed(client, mode):
    body = {**BODY, "tool_choice": "required", "parallel_tool_calls": False, "mode": mode}
    (choice,) = (await client.answer(CHAT, body))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    check(call)
    events = await client.events(CHAT, body)
    content, (streamed,) = joined(events)
    assert content == ""
    assert streamed["function"] == call["function"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert "role" in events[0]["choices"][0]["delta"]


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        (f"So: {CALL}", "So:", 1),
        (f"{CALL}\n{CALL}", None, 2),
        ("no call", "no call", 0),
    ],
)
async def test_calls_within_text_are_separated_from_content(client, text, content, num_calls):
    body = {**BODY, "guided_grammar": f"start: {json.dumps(text)}"}
    body |= {"confidence_threshold": 0.05, "max_tokens": 150}
    (choice,) = (await client.answer(CHAT, body))["choices"]
    message = choice["message"]
    assert (message["content"] or "").strip() == (content or "")
    assert (message["content"] is None) == (content is None)
    assert choice["finish_reason"] == ("tool_calls" if num_calls else "stop")
    found = message.get("tool_calls", [])
    assert [each["function"] for each in found] == [
        {"name": "add", "arguments": '{"a": "x"}'}
    ] * num_calls
    assert len({each["id"] for each in found}) == num_calls
    streamed, calls = joined(await client.events(CHAT, body))
    assert streamed == (message["content"] or "")
    assert [each["function"] for each in calls] == [each["function"] for each in found]


@pytest.mark.parametrize(
    ("cut", "reason", "calls"),
    [
        ({"max_tokens": 4}, "length", []),
        ({"stop": "take"}, "stop", []),
        ({"stop": '"a"'}, "stop", ["{"]),
        ({"stop": "no"}, "stop", ['{"a": "']),
        ({"stop": "</tool_call>"}, "tool_calls", ['{"a": "no"}']),
    ],
)
async def test_a_call_that_is_cut_is_not_finished(client, cut, reason, calls):
    choice = {"type": "function", "function": {"name": "take"}}
    body = {**BODY, "tool_choice": choice, "parallel_tool_calls": False, **cut}
    (whole,) = (await client.answer(CHAT, body))["choices"]
    assert (whole["finish_reason"], whole["stop_reason"]) == (reason, cut.get("stop"))
    assert whole["message"]["content"] is None
    found = whole["message"].get("tool_calls", [])
    assert [each["function"] for each in found] == [
        {"name": "take", "arguments": each} for each in calls
    ]
    events = await client.events(CHAT, body)
    assert all(event["choices"][0]["delta"].get("content") is None for event in events)
    streamed = joined(events)[1]
    assert [each["function"] for each in streamed] == [each["function"] for each in found]
    last = events[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == (reason, cut.get("stop"))


async def test_tool_choice_none_leaves_calls_in_the_text(client):
    body = {**BODY, "guided_grammar": f"start: {json.dumps(CALL)}", "tool_choice": "none"}
    (choice,) = (await client.answer(CHAT, body))["choices"]
    assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tools"),
    ],
)
async def test_unusable_tools_are_refused_by_field(client, fields, param):
    await client.refusal(CHAT, {**BODY, **fields}, 400, param)


async def test_a_tool_whose_schema_fails_in_use_is_refused_by_field(client):
    """Its argument is a pattern that has too many states."""
    large = tool("add", "x")
    large["function"]["parameters"]["properties"]["a"] = {"pattern": "^x{1000000}$"}
    body = {**BODY, "tools": [large], "tool_choice": "required"}
    for _ in range(4):
        message = await client.refusal(CHAT, body, 400, "tools")
        assert message.startswith("tools: it failed while the output was written")
    assert (await client.answer(CHAT, {**BODY, "max_tokens": 4}))["choices"]


async def test_calls_are_read_from_a_text_without_other_special_tokens(client):
    body = {**BODY, "skip_special_tokens": False}
    message = await client.refusal(CHAT, body, 400, "skip_special_tokens")
    assert "set tool_choice to none" in message
    await client.answer(CHAT, {**body, "tool_choice": "none", "max_tokens": 1})


async def test_a_required_call_needs_the_end_token(client):
    body = {**BODY, "tool_choice": "required", "ignore_eos": True}
    await client.refusal(CHAT, body, 400, "ignore_eos")


async def test_a_call_in_an_echoed_message_is_text(client):
    messages = [*MESSAGES, {"role": "assistant", "content": CALL}]
    fields = {"continue_final_message": True, "echo": True, "max_tokens": 1}
    answer = await client.answer(CHAT, {**BODY, "messages": messages, **fields})
    message = answer["choices"][0]["message"]
    assert message["content"].startswith(CALL)
    assert "tool_calls" not in message
