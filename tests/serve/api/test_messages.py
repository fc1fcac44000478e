"""Messages that requests may contain, and their form for chat templates."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from mars_serve.api.bounds import num_bytes_of_chat
from mars_serve.api.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Messages,
    TemplateKwargs,
    Tools,
    messages_for_template,
)

USER = {"role": "user", "content": "Rain?"}


def part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def call(arguments: str) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}


def rendered(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return messages_for_template(TypeAdapter(Messages).validate_python(list(messages)))


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", ""),
        (" Rain? ", " Rain? "),
        ([part("Rain?")], "Rain?"),
        ([part("Rain?"), part(""), part("Snow?")], "Rain?\n\nSnow?"),
    ],
)
def test_content_parts_are_joined_by_line_breaks(role, content, text):
    message = {"role": role, "content": content, "other": 1}
    assert rendered(message) == [{"role": role, "content": text}]


def test_the_name_of_a_message_is_kept():
    assert rendered({**USER, "name": "Ada"}) == [{**USER, "name": "Ada"}]


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({}, ""),
        ({"content": None, "tool_calls": None, "function_call": None, "audio": None}, ""),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "Yes.", "refusal": None}, "Yes."),
        ({"content": [{"type": "refusal", "refusal": "No."}, part("Yes.")]}, "No.\nYes."),
        ({"content": "", "tool_calls": []}, ""),
    ],
)
def test_an_assistant_message_keeps_content_or_refusal(fields, content):
    answer = {"role": "assistant", "content": content}
    assert rendered({"role": "assistant", **fields}) == [answer]


def test_thinking_has_one_name_and_counts():
    answer = {"role": "assistant", "content": "Yes."}
    for name in ("reasoning_content", "reasoning"):
        given = {**answer, name: "Wet?"}
        assert rendered(given) == [answer | {"reasoning_content": "Wet?"}]
        short, long = (
            num_bytes_of_chat(TypeAdapter(Messages).validate_python([each]), None, None)
            for each in (answer, given)
        )
        assert long - short > len("Wet?")


def test_calls_and_their_results_stay_as_they_are():
    answer = {"role": "assistant", "content": "", "tool_calls": [call('{"a": ')]}
    result = {"role": "tool", "content": "Wet.", "tool_call_id": "a", "name": "g"}
    assert rendered({**answer, "content": None}, {**result, "content": [part("Wet.")]}) == [
        answer,
        result,
    ]


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("message", "where", "named"),
    [
        ({**USER, "role": "human"}, (), "'human'"),
        ({"role": "user"}, ("user", "content"), "required"),
        ({**USER, "content": None}, ("user", "content", "text"), "valid string"),
        ({**USER, "content": "\ud800"}, ("user", "content", "text"), "unicode"),
        ({**USER, "content": []}, ("user", "content", "parts"), "at least 1 item"),
        ({**USER, "content": [IMAGE]}, ("user", "content", "parts", 0, "type"), "'text'"),
        (
            {**USER, "content": [part("")] * (MAX_PARTS + 1)},
            ("user", "content", "parts"),
            "at most",
        ),
        ({"role": "tool", "content": ""}, ("tool", "tool_call_id"), "required"),
        (
            {"role": "assistant", "tool_calls": [{**call("{}"), "type": "custom"}]},
            ("assistant", "tool_calls", 0, "type"),
            "'function'",
        ),
        (
            {"role": "assistant", "function_call": {"name": "f", "arguments": ""}},
            ("assistant", "function_call"),
            "None",
        ),
    ],
)
def test_an_invalid_message_is_refused_at_its_field(message, where, named):
    with pytest.raises(ValidationError) as caught:
        rendered(message)
    error = caught.value.errors()[0]
    assert error["loc"] == (0, *where)
    assert named.lower() in error["msg"].lower()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Messages, []),
        (Messages, [USER] * (MAX_MESSAGES + 1)),
        (Tools, [{"type": "function", "function": {"name": "f"}}] * (MAX_TOOLS + 1)),
        (TemplateKwargs, {"a": [1]}),
        (TemplateKwargs, {"a": {"b": 1}}),
        (TemplateKwargs, {"__class__": 1}),
        (TemplateKwargs, {"a b": 1}),
        (TemplateKwargs, {f"a{index}": 1 for index in range(33)}),
    ],
)
def test_lists_and_variables_beyond_the_limits_are_refused(kind, value):
    with pytest.raises(ValidationError):
        TypeAdapter(kind).validate_python(value)


def test_template_variables_keep_their_types():
    variables = {"a": True, "b": 1, "c": 1.5, "d": "1", "e": None}
    checked = TypeAdapter(TemplateKwargs).validate_python(variables)
    assert [(type(value), value) for value in checked.values()] == [
        (type(value), value) for value in variables.values()
    ]
