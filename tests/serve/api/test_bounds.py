"""Bounds on what clients send: sizes of JSON are exact, and few mistakes are reported."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from mars_serve.api import bounds
from mars_serve.api.bounds import JsonSize, json_size_of, most_depth
from mars_serve.api.errors import ApiError, shown
from mars_serve.api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from rest.rest_requests import COMPLETION, CONVERSATION

STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
TEXTS = st.text(st.sampled_from('a"\\[{,:]}é\U0001f600'), max_size=6)
VALUES = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)


@given(value=VALUES, step=st.integers(1, 9), is_escaped=st.booleans())
def test_the_size_of_json_is_exact_however_it_is_divided(value, step, is_escaped):
    text = json.dumps(value, ensure_ascii=is_escaped).encode()
    outside, level, depth = STRING.sub(b"", text), 0, 0
    for code in outside:
        level += (code in b"[{") - (code in b"]}")
        depth = max(depth, level)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "STEP", step)
        found = json_size_of(text)
    assert found.depth == depth <= most_depth(text)
    assert found.num_values == sum(outside.count(code) for code in b",:[{")


def test_numbers_with_too_many_digits_are_found_outside_strings_only():
    long = "9" * 400
    assert not json_size_of(f"[{long[1:]},{long[1:]}]".encode()).has_long_number
    assert json_size_of(f"[{long}]".encode()).has_long_number
    assert json_size_of(f"[0.{long}]".encode()).has_long_number
    assert not json_size_of(f'["{long}", 1{"0" * 308}]'.encode()).has_long_number


@pytest.mark.parametrize("digits", [19, 399])
def test_numbers_that_do_not_fit_64_bits_have_so_many_digits_together(digits):
    def size_of(num: int, digits: int) -> JsonSize:
        return json_size_of(f"[{','.join(['9' * digits] * num)}]".encode())

    few = 2**18 // digits
    assert not size_of(few - 2, digits).has_many_digits
    assert size_of(few + 10, digits).has_many_digits  # a few of them may be cut in two
    assert not size_of(few + 10, 18).has_many_digits


def test_counting_stops_where_there_are_too_many_values():
    text = b"[" + b"0," * 10**6 + b"0]"
    assert 1000 < json_size_of(text, max_values=1000).num_values < 10**6


PART = {"type": "text"}
CALL: dict[str, Any] = {"type": "function"}
NUM_BAD = 20_000
NAMES = [f"-{index}" for index in range(NUM_BAD)]
BOMBS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    **{
        f"{field} of {name}": (ChatCompletionRequest, {**CONVERSATION, field: value})
        for field, value in {
            "stop": [0],
            "stop_token_ids": [""],
            "guided_choice": [0],
            "messages": [{}],
            "tools": [{}],
        }.items()
        for name, value in (("list", value * NUM_BAD), ("object", dict.fromkeys(NAMES, value)))
    },
    **{
        f"members of {field}": (ChatCompletionRequest, {**CONVERSATION, field: members})
        for field in (
            "logit_bias", "chat_template_kwargs", "structured_outputs",
            "response_format", "tool_choice",
        )
        for members in [dict.fromkeys(NAMES, ())]
    },
    "parts": (
        ChatCompletionRequest,
        {**CONVERSATION, "messages": [{"role": "user", "content": [PART] * NUM_BAD}] * 9},
    ),
    "parts of answers": (
        ChatCompletionRequest,
        {**CONVERSATION, "messages": [{"role": "assistant", "content": [PART] * NUM_BAD}] * 9},
    ),
    "tool calls": (
        ChatCompletionRequest,
        {**CONVERSATION, "messages": [{"role": "assistant", "tool_calls": [CALL] * NUM_BAD}] * 9},
    ),
    "tools that are allowed": (
        ChatCompletionRequest,
        {
            **CONVERSATION,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{}] * NUM_BAD},
            },
        },
    ),
    "choices": (
        CompletionRequest, {**COMPLETION, "structured_outputs": {"choice": [0] * NUM_BAD}},
    ),
    "token ids": (CompletionRequest, {**COMPLETION, "prompt": [-1] * NUM_BAD}),
    "texts": (CompletionRequest, {**COMPLETION, "prompt": ["", 1] * NUM_BAD}),
    "lists of ids": (CompletionRequest, {**COMPLETION, "prompt": [[-1] * 9] * NUM_BAD}),
    "conversation to tokenize": (TokenizeRequest, {"messages": [{}] * NUM_BAD}),
    "tools to tokenize": (TokenizeRequest, {"tools": [{}] * NUM_BAD}),
    "ids to detokenize": (DetokenizeRequest, {"tokens": [-1] * NUM_BAD}),
}  # fmt: skip


@pytest.mark.parametrize("case", BOMBS)
def test_few_of_many_mistakes_are_reported(case):
    model, body = BOMBS[case]
    adapter = TypeAdapter(model)
    with pytest.raises(ValidationError) as caught:
        adapter.validate_python(body)
    assert caught.value.error_count() <= 20


def test_the_largest_object_of_biases_reports_a_bounded_number_of_mistakes():
    bias = dict.fromkeys(NAMES[:1024], "x")
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({**COMPLETION, "logit_bias": bias})
    assert caught.value.error_count() == 2 * 1024


class Unread(str):
    """A text that must not be written out."""

    def __repr__(self) -> str:
        raise AssertionError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("short", "'short'"),
        ([1, "a", None], "[1, 'a', None]"),
        ({"b": 1, "a": 2}, "{'a': 2, 'b': 1}"),
        ([0] * 8 + [Unread()], "[0, 0, 0, 0, 0, 0, 0, 0, ...]"),
    ],
)
def test_large_values_are_quoted_in_part(value, expected):
    assert shown(value) == expected


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, ["y" * 10**6] * 9, dict.fromkeys(NAMES, 0), 10**400, [[[[[[]]]]]]],
    ids=["text", "list", "object", "number", "nested"],
)
def test_quotes_are_short(value):
    assert len(shown(value)) <= 80


def test_only_the_beginning_of_a_long_message_is_encoded():
    message = ApiError(400, "\ud800" + "x" * 10**6).body()["error"]["message"]
    assert message.startswith("?xxx")
    assert len(message) <= 1000
