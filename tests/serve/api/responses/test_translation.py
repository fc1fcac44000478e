"""Tests the translation of bodies of the Responses API to chats."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from mars_serve.api.errors import ApiError
from mars_serve.api.messages import messages_for_template
from mars_serve.api.responses.body import ResponsesRequest

_FUNCTION = {"type": "function", "name": "add", "parameters": {"type": "object"}}


def body_of(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"model": "mars", "input": "7?", **fields})


def turns_of(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    return messages_for_template(body_of(input=list(items), **fields).to_chat().messages)


def call(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "add", "arguments": "{}", **fields}


def result(name: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": output}


def thought(text: str, **fields: Any) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content, **fields}


def test_a_text_is_the_users_message_behind_the_instructions():
    assert messages_for_template(body_of(instructions="Be brief.").to_chat().messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "7?"},
    ]


def test_an_assistants_turn_is_one_message_with_its_results_in_the_order_of_the_calls():
    text = {"type": "output_text", "text": "So:", "annotations": [], "logprobs": []}
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
    *before, turn, first, second, last = turns_of(
        {"role": "user", "content": [{"type": "input_text", "text": "7?"}]},
        thought("Hm.", encrypted_content="xyz"),
        {**message, "content": [text]},
        call("a"),
        call("b", namespace="mcp__x"),
        result("b", [{"type": "input_text", "text": "2"}]),
        result("a", "1"),
        {"role": "assistant", "content": "8."},
    )
    assert before == [{"role": "user", "content": "7?"}]
    calls = turn.pop("tool_calls")
    assert turn == {"role": "assistant", "content": "So:", "reasoning_content": "Hm."}
    named = [(each["id"], each["function"]["name"]) for each in calls]
    assert named == [("a", "add"), ("b", "mcp__x__add")]
    assert first == {"role": "tool", "content": "1", "tool_call_id": "a"}
    assert second == {"role": "tool", "content": "2", "tool_call_id": "b"}
    assert last == {"role": "assistant", "content": "8."}


def test_instructions_and_first_messages_of_the_system_are_one_message():
    first, user, later = turns_of(
        {"role": "developer", "content": "No files."},
        {"role": "user", "content": "7?"},
        {"role": "developer", "content": "Now."},
        instructions="Be brief.",
    )
    assert first == {"role": "system", "content": "Be brief.\nNo files."}
    assert (user["role"], later["role"]) == ("user", "developer")


def test_a_summary_stands_for_thinking_that_is_not_given():
    summary = [{"type": "summary_text", "text": "Short."}]
    (turn,) = turns_of({"type": "reasoning", "summary": summary, "id": "rs_1"})
    assert turn["reasoning_content"] == "Short."


def test_options_are_those_of_a_chat():
    schema = {"type": "object", "properties": {}}
    chat = body_of(
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        max_output_tokens=5,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        truncation="auto",
        prompt_cache_key="thread",
        user="someone",
        mode="exact",
        seed=3,
    ).to_chat()
    assert chat.limit == ("max_completion_tokens", 5)
    assert (chat.reasoning_effort, chat.num_logprobs) == ("low", 0)
    assert (chat.truncate_prompt_tokens, chat.user) == (-1, "thread")
    assert (chat.mode, chat.seed) == ("exact", 3)
    assert chat.response_format.json_schema.schema_ == schema
    assert body_of(top_logprobs=2).to_chat().num_logprobs == 2


def test_tools_of_namespaces_are_functions_and_others_are_named_and_left_out():
    tools = [_FUNCTION, {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]
    tools.append({"type": "namespace", "name": "mcp__x__", "tools": [{**_FUNCTION, "name": "get"}]})
    body = body_of(tools=tools, odd=1, tool_choice={"type": "function", "name": "add"})
    assert [each.function.name for each in body.to_chat().tools] == ["add", "mcp__x__get"]
    assert body.to_chat().tool_choice.function.name == "add"
    assert body.unknown_fields == ("odd", "tools.1.web_search", "tools.2.custom")


@pytest.mark.parametrize(
    "choice",
    ["none", "required", {"type": "allowed_tools", "mode": "required", "tools": [_FUNCTION]}],
)
def test_choices_of_functions_are_those_of_a_chat(choice):
    given = body_of(tools=[_FUNCTION], tool_choice=choice).to_chat().tool_choice
    if isinstance(choice, str):
        assert given == choice
    else:
        (tool,) = given.allowed_tools.tools
        assert (given.allowed_tools.mode, tool.function.name) == ("required", "add")


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, ("input", 0, "type")),
        ({"input": ["7?"]}, ("input", 0)),
        ({"input": [{"role": "user"}]}, ("input", 0, "content")),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            ("input", 0, "content", 0, "type"),
        ),
        (
            {"input": [call("a"), result("a", [{"type": "input_file"}])]},
            ("input", 1, "output", 0, "type"),
        ),
        ({"input": [{"role": "user", "content": "x"}] * 5000}, ("input",)),
        ({"input": [{"role": "user", "content": [{}] * 1000}] * 5}, ("input",)),
        ({"tool_choice": {"type": "web_search"}}, ("tool_choice", "type")),
        ({"metadata": {str(i): "" for i in range(17)}}, ("metadata",)),
        ({"include": ["everything"]}, ("include", 0)),
    ],
)
def test_what_is_not_served_is_refused_where_it_stands(fields, where):
    with pytest.raises(ValidationError) as caught:
        body_of(**fields)
    places = caught.value.errors()[0]["loc"]
    assert tuple(each for each in places if "-" not in str(each)) == where


@pytest.mark.parametrize(
    ("fields", "beginning"),
    [
        ({"input": [result("a", "1")]}, "input[0].call_id: there is no function_call"),
        ({"input": [thought("", content=[], encrypted_content="x")]}, "input[0].encrypted_content"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id: no stored"),
        ({"input": [{"id": "msg_1"}]}, "input[0].id: no stored"),
        ({"input": []}, "input: "),
        ({"input": [call(str(i)) for i in range(129)]}, "input: "),
    ],
)
def test_items_that_make_no_conversation_are_refused(fields, beginning):
    with pytest.raises(ApiError) as caught:
        body_of(**fields).to_chat()
    assert str(caught.value).startswith(beginning)
    assert caught.value.param == "input"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ],
)
def test_fields_that_cannot_be_served_are_refused_by_name(fields, param):
    with pytest.raises(ApiError) as caught:
        body_of(**fields).refuse_unsupported()
    assert caught.value.param == param
