"""Anthropic's Messages API: translation of bodies, blocks and events of answers, and errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from chat_families import tokenizer_of
from mars_platform.checkpoint.directory import Checkpoint
from mars_serve.api.anthropic.body import MessagesRequest
from mars_serve.api.anthropic.schema import Message, MessagesError
from mars_serve.engine.decoding_options import FinishReason
from rest.replaying import ReplayingBackend
from rest.rest_server import BrokenBackend, Client

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOKENIZER = tokenizer_of("qwen")
TOOL = {"name": "get", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "7?"}
BODY = {"model": "mars", "max_tokens": 20, "messages": [USER]}
CALL = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
"""Text of a call in the model's format."""


def encoded(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.fixture(scope="module")
def thinker(mars: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose tokenizer marks thinking and calls by tokens."""
    return replace(mars, tokenizer=TOKENIZER)


@pytest.fixture
def replaying(thinker: Checkpoint, client_over: Any) -> Any:
    """Make a client of a model whose passes are given: ``replaying(passes, finish_reason)``."""
    return lambda *given: client_over(ReplayingBackend(*given), thinker)


async def streamed(client: Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names are their types."""
    response = await client.post(MESSAGES, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    events = []
    for entry in response.text.removesuffix("\n\n").split("\n\n"):
        name, _, content = entry.partition("\n")
        events.append(json.loads(content.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def message_of(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of a stream, and check the order of its events."""
    start, *middle, end, stop = events
    assert (start["type"], end["type"], stop["type"]) == (
        "message_start",
        "message_delta",
        "message_stop",
    )
    message: dict[str, Any] = start["message"]
    content, inputs, is_open = message["content"], dict[int, str](), False
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(content)
                is_open = True
                content.append(event["content_block"])
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(content) - 1
                _, (field, text) = event["delta"].items()
                if field == "partial_json":
                    inputs[event["index"]] = inputs.get(event["index"], "") + text
                else:
                    content[-1][field] += text
            case "content_block_stop":
                assert is_open
                is_open = False
    assert not is_open
    for index, text in inputs.items():
        content[index]["input"] = from_json(text, allow_partial=True)
    return message | end["delta"] | {"usage": end["usage"], "mars": end["mars"]}


def compared(message: dict[str, Any]) -> Any:
    """Return what a whole and a streamed message share: all but random ids."""
    blocks = [{k: v for k, v in each.items() if k != "id"} for each in message["content"]]
    return {**message, "id": None, "content": blocks}


def shared(message: dict[str, Any]) -> Any:
    """Return what the passes of an output may not change."""
    texts = [
        "".join(block.get(field, "") for block in message["content"])
        for field in ("text", "thinking")
    ]
    inputs = [block["input"] for block in message["content"] if "input" in block]
    return texts, inputs, message["stop_reason"], message["usage"]["output_tokens"]


def kinds(message: dict[str, Any]) -> list[str]:
    return [block["type"] for block in message["content"]]


# --- answers --------------------------------------------------------------------------------------


async def both(client: Client, body: dict[str, Any]) -> dict[str, Any]:
    """Return a message, which is the same whole and streamed."""
    whole = await client.answer(MESSAGES, body)
    Message.model_validate(whole)
    events = await streamed(client, body)
    assert compared(message_of(events)) == compared(whole)
    return whole


async def test_a_pass_of_thinking_text_and_calls_gives_blocks_in_order(replaying):
    tokens = encoded(f"<think>hm</think>So: {CALL}\n{CALL} and {CALL}")
    for passes in ([tokens], [[token] for token in tokens]):
        message = await both(replaying(passes), {**BODY, "tools": [TOOL]})
        thinking, text, *calls = message["content"]
        assert (thinking["thinking"], text["text"]) == ("hm", "So:")
        assert thinking["signature"]
        assert kinds(message)[2:] == ["tool_use", "tool_use", "text", "tool_use"]
        assert [call["input"] for call in calls if call["type"] == "tool_use"] == [{"a": 1}] * 3
        ids = {call["id"] for call in calls if call["type"] == "tool_use"}
        assert len(ids) == 3
        assert all(each.startswith("toolu_") for each in ids)
        assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


async def test_each_block_of_thinking_is_signed_by_itself(replaying):
    tokens = encoded("<think>hm</think>a<think>hm</think>b")
    message = await both(replaying([[token] for token in tokens]), BODY)
    assert kinds(message) == ["thinking", "text"] * 2
    first, _, second, _ = message["content"]
    assert first == second
    assert first["signature"]


OUTPUTS = ["a ", "<think>", "</think>", CALL, '<tool_call>\n{"name": "get", "arg', "é😀", "\n"]


def divided(pieces: Sequence[str], cuts: Sequence[int]) -> list[list[int]]:
    tokens = [token for piece in pieces for token in encoded(piece)]
    inner = sorted({cut for cut in cuts if cut < len(tokens)})
    return [tokens[a:b] for a, b in zip([0, *inner], [*inner, len(tokens)], strict=True)]


@pytest.fixture(scope="module")
def backend() -> ReplayingBackend:
    return ReplayingBackend([])


@pytest.fixture(scope="module")
def exchanged(backend: ReplayingBackend, thinker: Checkpoint, client_over: Any) -> Client:
    """Return a client of a model whose passes are those of the backend at the time."""
    return client_over(backend, thinker)


@settings(max_examples=40, deadline=None, phases=set(Phase) - {Phase.explain})
@given(
    pieces=st.lists(st.sampled_from(OUTPUTS), min_size=1, max_size=6),
    cuts=st.lists(st.integers(1, 200), max_size=5),
)
async def test_blocks_do_not_depend_on_the_passes(exchanged, backend, pieces, cuts):
    body, found = {**BODY, "tools": [TOOL]}, []
    for cut in (cuts, range(1, 200)):
        backend.passes = divided(pieces, cut)
        message = message_of(await streamed(exchanged, body))
        whole = await exchanged.answer(MESSAGES, body)
        found += [shared(message), shared(whole)]
    assert all(each == found[0] for each in found[1:])


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"a": [1, 2', {"a": [1, 2]}),
        ('{"path": "~", "text": "so', {"path": "~"}),
        ("{", {}),
        ('{"a": nought', {"INVALID_JSON": '{"a": nought'}),
        ('{"a": NaN', {"INVALID_JSON": '{"a": NaN'}),
    ],
)
async def test_input_that_is_cut_is_an_object_all_the_same(replaying, arguments, value):
    tokens = encoded(f'<tool_call>\n{{"name": "get", "arguments": {arguments}')
    client = replaying([tokens], FinishReason.LENGTH)
    message = await client.answer(MESSAGES, {**BODY, "tools": [TOOL]})
    assert message["content"][0]["input"] == value
    assert message["stop_reason"] == "max_tokens"
    turns = [USER, {"role": "assistant", "content": message["content"]}]
    chat = MessagesRequest.model_validate({**BODY, "messages": turns}).to_chat()
    sent = chat.messages[1].tool_calls[0].function.arguments
    assert sent == (value.get("INVALID_JSON") or json.dumps(value, separators=(",", ":")))


async def test_reasons_for_the_end(replaying):
    body = {**BODY, "stop_sequences": ["think", "z"]}
    stopped = await both(replaying([encoded("I think so")]), body)
    assert stopped["content"] == [{"type": "text", "text": "I "}]
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "think")
    ended = await both(replaying([encoded("three")]), BODY)
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)
    long = replaying([encoded("three")], FinishReason.LENGTH)
    assert (await both(long, BODY))["stop_reason"] == "max_tokens"
    full = await both(long, {**BODY, "max_tokens": 10**6})
    assert full["stop_reason"] == "model_context_window_exceeded"
    nothing = await both(replaying([[]]), BODY)
    assert (nothing["content"], nothing["stop_reason"]) == ([], "end_turn")


async def test_thinking_that_is_omitted_leaves_a_signature(replaying):
    client = replaying([encoded("<think>secret</think>7")])
    body = {**BODY, "thinking": {"type": "adaptive", "display": "omitted"}}
    message = await both(client, body)
    assert kinds(message) == ["thinking", "text"]
    assert message["content"][0]["thinking"] == ""
    assert message["content"][0]["signature"]
    past = {"role": "assistant", "content": message["content"]}
    await client.answer(MESSAGES, {**BODY, "messages": [USER, past, USER]})
    assert "secret" not in json.dumps(await streamed(client, body))
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0


async def test_passes_are_reported_with_events_or_by_pings(client):
    body = {**BODY, "return_passes": True, "confidence_threshold": 0.1}
    events = await streamed(client, body)
    told = [event["mars"] for event in events if "mars" in event]
    end = told.pop()
    assert sum(each["tokens"] for each in told) == events[-2]["usage"]["output_tokens"]
    assert len(told) == end["forward_passes"]
    assert all(each["pass"]["accepted"] for each in told)
    plain = await streamed(client, {**BODY, "confidence_threshold": 0.1})
    assert all("mars" not in event for event in plain[:-2])


# --- usage and counts -----------------------------------------------------------------------------


async def test_counts_agree_with_the_usage_and_name_cached_tokens(client):
    body = {**BODY, "system": "Count well, and then count again.", "max_tokens": 4}
    counted = (await client.answer(COUNT, body))["input_tokens"]
    cached = list[int]()
    for message in (await client.answer(MESSAGES, body), message_of(await streamed(client, body))):
        usage = message["usage"]
        cached.append(usage["cache_read_input_tokens"])
        assert usage["cache_creation_input_tokens"] == 0
        assert usage["input_tokens"] + cached[-1] == counted
        assert usage["output_tokens"] == 4
    assert cached[0] < cached[1], "pages of the first prompt are found again"


async def test_a_prompt_that_is_too_long_is_counted_and_not_answered(client):
    body = {**BODY, "messages": [{"role": "user", "content": "Count! " * 150}]}
    assert (await client.answer(COUNT, body))["input_tokens"] > 256
    message = await refusal(client, body, 400, "invalid_request_error")
    assert message.startswith("prompt is too long: messages"), "Claude Code looks for these words"


@pytest.mark.parametrize(
    ("asked", "named"),
    [(None, None), ("standard_only", "standard"), ("flex", "flex"), ("priority", "priority")],
)
async def test_tiers(client, asked, named):
    message = await client.answer(MESSAGES, {**BODY, "service_tier": asked, "max_tokens": 1})
    assert message["usage"].get("service_tier") == named


# --- bodies ---------------------------------------------------------------------------------------


def prompt_of(**fields: Any) -> list[dict[str, Any]]:
    chat = MessagesRequest.model_validate({**BODY, **fields}).to_chat()
    return [
        {
            "role": each.role,
            "content": [part.text for part in each.content or []],
            **each.model_dump(exclude={"role", "content"}, exclude_none=True),
        }
        for each in chat.messages
    ]


def block(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def test_turns_become_messages():
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    answer = [
        block("thinking", thinking="hm", signature="from elsewhere"),
        block("redacted_thinking", data="..."),
        block("text", text="I look.", citations=None),
        block("tool_use", id="toolu_1", name="get", input={"a": "é"}, **cached),
        block("tool_use", id="toolu_2", name="get", input={}),
    ]
    results = [
        block("tool_result", tool_use_id="toolu_2", content=[block("text", text="two", **cached)]),
        block("tool_result", tool_use_id="toolu_1", is_error=True, content="one"),
        block("tool_result", tool_use_id="toolu_3"),
        block("text", text="Go on."),
    ]
    system = [
        block("text", text="x-anthropic-billing-header: cc_version=2; cch=1;"),
        block("text", text="Be brief.", **cached),
    ]
    messages = [
        USER,
        {"role": "system", "content": "New."},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": results},
        {"role": "user", "content": "Now."},
    ]
    call = {"type": "function", "function": {"name": "get", "arguments": "{}"}}
    first = {"name": "get", "arguments": '{"a":"é"}'}
    assert prompt_of(system=system, messages=messages) == [
        {"role": "system", "content": ["Be brief."]},
        {"role": "user", "content": ["7?", "<system-reminder>\nNew.\n</system-reminder>"]},
        {
            "role": "assistant",
            "content": ["I look."],
            "reasoning_content": "hm",
            "tool_calls": [{**call, "id": "toolu_1", "function": first}, {**call, "id": "toolu_2"}],
        },
        {"role": "tool", "content": ["two"], "tool_call_id": "toolu_2"},
        {"role": "tool", "content": ["Error:", "one"], "tool_call_id": "toolu_1"},
        {"role": "tool", "content": [""], "tool_call_id": "toolu_3"},
        {"role": "user", "content": ["Go on.", "Now."]},
    ]


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"stop_sequences": ["a"]}, "stop", ["a"]),
        ({"stop": "a"}, "stop", ["a"]),
        ({"seed": 0, "temperature": 0.0}, "seed", 0),
        ({"audit": False}, "audit", False),
        ({"metadata": {"user_id": "me"}}, "user", "me"),
        ({"service_tier": "standard_only"}, "service_tier", "default"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice", "required"),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, "tool_choice", "none"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "parallel_tool_calls",
            False,
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking_token_budget", 9),
        ({"thinking": {"type": "disabled", "budget_tokens": 9}}, "thinking_token_budget", None),
        (
            {"thinking_token_budget": 5, "thinking": {"type": "adaptive"}},
            "thinking_token_budget",
            5,
        ),
        (
            {"thinking": {"type": "disabled"}},
            "chat_template_kwargs",
            {"enable_thinking": False, "thinking": False},
        ),
        ({"output_config": {"effort": "max"}}, "reasoning_effort", "max"),
        ({}, "continue_final_message", None),
        (
            {"messages": [USER, {"role": "assistant", "content": "It"}]},
            "continue_final_message",
            True,
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": []}]},
            "continue_final_message",
            None,
        ),
    ],
)
def test_fields_become_those_of_a_chat(fields, name, value):
    body = MessagesRequest.model_validate({**BODY, **fields})
    body.refuse_unsupported()
    assert getattr(body.to_chat(), name) == value


async def test_a_schema_and_a_tool_bind_the_answer(client, mars):
    form = {"type": "json_schema", "schema": {"enum": ["x"]}}
    body = {**BODY, "output_config": {"format": form}, "confidence_threshold": 0.3}
    message = await client.answer(MESSAGES, body)
    assert message["content"] == [{"type": "text", "text": '"x"'}]


# --- refusals -------------------------------------------------------------------------------------


async def refusal(
    client: Client, body: dict[str, Any], status: int, kind: str, path: str = MESSAGES
) -> str:
    """Return the message of an error, which has Anthropic's shape."""
    response = await client.post(path, json=body)
    error = MessagesError.model_validate(response.json())
    assert (response.status_code, error.error.type) == (status, kind)
    assert error.request_id == response.headers["request-id"]
    return error.error.message


async def test_the_client_is_told_to_send_all_messages_itself(client):
    response = await client.post(MESSAGES, json={**BODY, "thread": {"type": "create"}})
    assert response.status_code == 400
    error = MessagesError.model_validate(response.json()).error
    assert error.message.startswith("thread: ")
    # anthropic's threads and tool runner read this, as of client version 2
    assert error.details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


IMAGE = block("image", source={"type": "url", "url": "http://x"})


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0: "),
        (
            {"messages": [{"role": "assistant", "content": [block("server_tool_use")]}]},
            "messages.0.content.0: ",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [block("tool_result", tool_use_id="a", content=[IMAGE])],
                    }
                ]
            },
            "messages.0.content.0.content.0: ",
        ),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content: "),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0: "),
        ({"system": [IMAGE]}, "system.0: "),
        ({"tools": [block("web_search_20250305", name="web_search")]}, "tools.0.type: "),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading: "),
        ({"tool_choice": {"type": "any"}}, "tool_choice: "),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "put"}}, "tool_choice: "),
        ({"thinking": {"type": "between_tools"}}, "thinking.type: "),
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"stop": "a", "stop_sequences": ["a"]}, "stop: "),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences: "),
        ({"speed": "fast"}, "speed: "),
        ({"mcp_servers": [{}]}, "mcp_servers: "),
        ({"compaction": {"type": "summary"}}, "compaction: "),
        ({"context_management": {"edits": [block("compact_20260112")]}}, "context_management."),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"a": float}}}}, ""),
    ][:-1],
)
async def test_what_is_not_served_is_refused_by_name(client, fields, where):
    message = await refusal(client, {**BODY, **fields}, 400, "invalid_request_error")
    assert message.startswith(where)


async def test_errors_have_anthropics_shape_everywhere_below_the_path(client, client_over):
    await refusal(client, {**BODY, "model": "x"}, 404, "not_found_error")
    await refusal(client, {**BODY, "model": "x"}, 404, "not_found_error", COUNT)
    await refusal(client, BODY, 404, "not_found_error", f"{MESSAGES}/batches")
    kinds = {ValueError("a"): "api_error"}
    for error, kind in kinds.items():
        await refusal(client_over(BrokenBackend(error)), BODY, 500, kind)
    broken = client_over(BrokenBackend(ValueError("a"), num_outputs=2))
    *_, last = await streamed(broken, BODY)
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


async def test_fields_without_effect_are_accepted_and_unknown_ones_named(client):
    body = {
        **BODY,
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": [block("clear_thinking_20251015", keep="all")]},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "betas": ["x"],
        "tools": [{**TOOL, "cache_control": {"type": "ephemeral"}, "nope": 1}],
        "tool_choice": {"type": "none"},
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27"}
    response = await client.post(f"{MESSAGES}?beta=true", json=body, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["x-marsray-unknown-fields"] == "betas, tools.0.nope"
