"""The grammars that requests ask for."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_serve.api.errors import ApiError
from mars_serve.api.incoming.structure import json_schema_grammar, structure_of
from mars_serve.api.output_forms import MAX_GRAMMAR_LENGTH
from mars_serve.api.protocol import ChatCompletionRequest, CompletionRequest
from mars_serve.engine.decoding_options import GrammarKind

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def body_of(**fields: Any) -> CompletionRequest:
    return CompletionRequest(model="mars", prompt="x", **fields)


def chat_of(**fields: Any) -> ChatCompletionRequest:
    messages = [{"role": "user", "content": "x"}]
    return ChatCompletionRequest(model="mars", messages=messages, **fields)


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
            "json_schema",
            {},
        ),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"'),
        ({"structured_outputs": {"choice": ["a", "b.c"]}}, "regex", r"a|b\.c"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": True}, "json_schema", {}),
        ({"guided_json": "true"}, "json_schema", {}),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"guided_choice": ["a", "b"]}, "regex", "a|b"),
    ],
)
@pytest.mark.parametrize("make", [body_of, chat_of])
def test_every_way_to_give_a_grammar_is_understood(make, fields, kind, text):
    structure = structure_of(make(**fields))
    assert [structure.field] == list(fields)
    assert structure.grammar.kind == GrammarKind(kind)
    found = structure.grammar.text
    assert (json.loads(found) if kind == "json_schema" else found) == text


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"response_format": None, "guided_json": None}],
)
def test_plain_text_has_no_grammar(fields):
    assert structure_of(chat_of(**fields)) is None


OLD = {"minimum": 0, "exclusiveMinimum": True, "maximum": 9, "exclusiveMaximum": False}
NEW = {"exclusiveMinimum": 0, "maximum": 9}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (OLD, NEW),
        ({"exclusiveMaximum": True}, {}),  # it says nothing without a bound
        ({"properties": {"a": {"items": OLD}}}, {"properties": {"a": {"items": NEW}}}),
        ({"anyOf": [OLD, {"$defs": {"b": OLD}}]}, {"anyOf": [NEW, {"$defs": {"b": NEW}}]}),
        ({"dependencies": {"const": OLD}}, {"dependencies": {"const": NEW}}),
        *[(kept, kept) for kept in (NEW, {"const": OLD}, {"enum": [OLD]}, {"properties": OLD})],
    ],
)
def test_bounds_of_draft_4_become_those_of_later_drafts(given, expected):
    for schema in (given, json.dumps(given)):
        assert json.loads(structure_of(body_of(guided_json=schema)).grammar.text) == expected


def test_an_empty_schema_still_requires_json():
    assert structure_of(chat_of(guided_json={})).grammar.text == "{}"


@given(choices=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5))
def test_a_choice_matches_its_alternatives_and_nothing_else(choices):
    pattern = re.compile(structure_of(body_of(guided_choice=choices)).grammar.text)
    assert all(pattern.fullmatch(choice) for choice in choices)
    others = {choice[:-1] for choice in choices} | {choice + "a" for choice in choices}
    assert not any(pattern.fullmatch(other) for other in others - set(choices))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured_outputs": {}}, "^structured_outputs: 0 of .* give exactly one"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "^structured_outputs: 2 of .* give exactly one",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "guided_regex": "a"},
            "^guided_regex: structured_outputs already gives a grammar",
        ),
        (
            {"response_format": {"type": "json_object"}, "guided_json": {}},
            "^guided_json: response_format already",
        ),
        ({"guided_json": False}, "^guided_json: no JSON satisfies the schema false"),
        ({"guided_json": {"const": float("nan")}}, "^guided_json: .* not finite"),
        ({"guided_json": {"const": "a" * MAX_GRAMMAR_LENGTH}}, "^guided_json: .* shorten it to"),
        ({"guided_choice": ["a" * 1000] * 100}, "^guided_choice: .* shorten them to"),
    ],
)
def test_incomplete_or_contradictory_grammars_are_refused(fields, message):
    with pytest.raises(ApiError, match=message) as refusal:
        structure_of(chat_of(**fields))
    assert (refusal.value.status, refusal.value.param) == (400, message[1:].partition(":")[0])


def test_a_schema_nested_too_deeply_is_refused():
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(ApiError, match=r"^guided_json: .* nested too deeply"):
        json_schema_grammar("guided_json", schema)
