import json

import pytest

from mars_platform.data.conversations import parse_conversation
from mars_platform.errors import UserError

USER = {"role": "user", "content": "Count"}
ANSWER = {"role": "assistant", "content": "one"}


def called(**function):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}} | function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def refusal(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_turns_of_every_role_and_other_columns_are_kept():
    roles = ["system", "developer", "user", "tool", "assistant"]
    turns = [{"role": role, "content": "x"} for role in roles]
    parsed = parse_conversation(json.dumps({"messages": turns, "answer": "1"}))
    assert [turn.as_message() for turn in parsed.messages] == turns
    assert parsed.model_extra == {"answer": "1"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "empty line"),
        (" \t\n", "empty line"),
        ("{", "not valid JSON (Expecting property name enclosed in double quotes at column 2)"),
        ('{"messages": []} x', "not valid JSON (Extra data at column 18)"),
        ("9" * 5000, "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "a row must be an object"),
        ("null", "a row must be an object"),
        ("{}", "no conversation: filled columns are none; "),
        ('{"messages": 3}', "messages: "),
        ('{"messages": []}', "the last turn must have the role 'assistant'"),
        ('{"messages": ["hello"]}', "messages.0: "),
        ('{"messages": [{"content": "x"}]}', "messages.0.role: required, but not given"),
        ('{"messages": [{"role": "user"}]}', "messages.0.content: "),
    ],
)
def test_an_unusable_line_is_refused(text, named):
    assert named in refusal(parse_conversation, text)


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([USER], "the last turn must have the role 'assistant'"),
        ([USER, ANSWER, USER], "the last turn must have the role 'assistant'"),
        ([ANSWER], "an assistant turn needs a turn before it"),
        ([USER, {**ANSWER, "content": ""}], "messages.1.content: "),
        ([{**USER, "content": None}, ANSWER], "messages.0.content: "),
        ([{**USER, "content": 3}, ANSWER], "messages.0.content: "),
        ([USER, {**ANSWER, "content": "\ud800"}], "messages.1.content: "),
        ([{**USER, "role": "alien"}, ANSWER], "messages.0.role: "),
        ([USER, {**ANSWER, "reasoning_content": "\ud800"}], "messages.1.reasoning_content: "),
        ([USER, called(name="")], "messages.1.tool_calls.0.function.name: "),
        ([USER, called(arguments=3)], "messages.1.tool_calls.0.function.arguments.str: "),
        ([USER, called(arguments={"a": "\ud800"})], "messages.1.tool_calls.0.function.arguments"),
        ([USER, {**called(), "tool_calls": []}], "messages.1.content: "),
    ],
)
def test_unusable_messages_are_refused(messages, named):
    assert named in refusal(parse_conversation, json.dumps({"messages": messages}))


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"tools": [3]}, "tools.0: "),
        ({"tools": [{"type": "retrieval"}]}, "tools.0: "),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0: function.name: "),
        ({"tools": [{"type": "function", "function": {"name": "\ud800"}}]}, "tools.0: "),
        ({"chat_template_kwargs": {"enable thinking": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs.a"),
    ],
)
def test_unusable_tools_and_variables_are_refused(columns, named):
    assert named in refusal(parse_conversation, json.dumps({"messages": [USER, ANSWER], **columns}))


def test_a_row_of_calls_becomes_the_request_that_asks_for_its_final_turn():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    turns = [USER, called(arguments={"a": None}), {"role": "tool", "content": "", "name": "f"}]
    row = {"messages": [*turns, ANSWER], "tools": tools, "chat_template_kwargs": {"thinking": True}}
    request = parse_conversation(json.dumps(row)).request()
    assert request.pop("messages") == [
        USER,
        {**called(arguments='{"a": null}'), "content": ""},
        {**turns[2], "tool_call_id": "1"},
    ]
    assert request == {"tools": tools, "chat_template_kwargs": {"thinking": True}}
