"""Finds the grammar that a request body asks for; the engine compiles it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from mars_serve.api.errors import invalid_value
from mars_serve.api.protocol import (
    MAX_GRAMMAR_LENGTH,
    GenerationRequest,
    SchemaFormat,
    StructuredOutputs,
)
from mars_serve.engine.decoding_options import GrammarKind, GrammarSpec

_ANY_OBJECT = '{"type": "object"}'
_REGEX_META = re.compile(r"([\\.+*?()|\[\]{}^$#&~-])")


@dataclass(frozen=True)
class Structure:
    """A grammar, and the field of the body that gives it."""

    field: str
    grammar: GrammarSpec


def structure_of(body: GenerationRequest) -> Structure | None:
    """Return the grammar that a body gives in any of the supported fields, or None.

    Raises:
        ApiError: status 400: several fields give a grammar, or one is incomplete.
    """
    found = []
    if body.response_format is not None and body.response_format.type != "text":
        found.append(Structure("response_format", _response_grammar(body)))
    if body.structured_outputs is not None:
        grammar = _structured_grammar(body.structured_outputs)
        found.append(Structure("structured_outputs", grammar))
    for name, make in _GUIDED.items():
        value = getattr(body, name)
        if value is not None:
            found.append(Structure(name, make(name, value)))
    if len(found) > 1:
        first, second = found[0].field, found[1].field
        raise invalid_value(second, f"{first} already gives a grammar; leave one of them out")
    return found[0] if found else None


def json_schema_grammar(field: str, schema: dict[str, Any] | str) -> GrammarSpec:
    """Return the grammar for a JSON schema, given as an object or as text.

    Raises:
        ApiError: status 400: the schema cannot be written as JSON, or is too long.
    """
    if isinstance(schema, str):
        return GrammarSpec(GrammarKind.JSON_SCHEMA, schema)
    try:
        text = json.dumps(schema, allow_nan=False)
    except ValueError as error:  # NaN and infinity, which Python's parser accepts
        raise invalid_value(field, "the schema has a number that is not finite") from error
    except RecursionError as error:
        raise invalid_value(field, "the schema is nested too deeply; make it flatter") from error
    if len(text) > MAX_GRAMMAR_LENGTH:
        reason = f"the schema has {len(text)} characters; shorten it to {MAX_GRAMMAR_LENGTH}"
        raise invalid_value(field, reason)
    return GrammarSpec(GrammarKind.JSON_SCHEMA, text)


def _response_grammar(body: GenerationRequest) -> GrammarSpec:
    wanted = body.response_format
    assert wanted is not None
    if isinstance(wanted, SchemaFormat):
        return json_schema_grammar("response_format", wanted.json_schema.schema_)
    return GrammarSpec(GrammarKind.JSON_SCHEMA, _ANY_OBJECT)


def _structured_grammar(wanted: StructuredOutputs) -> GrammarSpec:
    name = "structured_outputs"
    found = []
    if wanted.json_ is not None:
        found.append(json_schema_grammar(name, wanted.json_))
    if wanted.json_object:
        found.append(GrammarSpec(GrammarKind.JSON_SCHEMA, _ANY_OBJECT))
    if wanted.regex is not None:
        found.append(GrammarSpec(GrammarKind.REGEX, wanted.regex))
    if wanted.grammar is not None:
        found.append(GrammarSpec(GrammarKind.LARK, wanted.grammar))
    if wanted.choice is not None:
        found.append(_choice_grammar(name, wanted.choice))
    if len(found) != 1:
        names = "json, json_object, regex, grammar and choice"
        raise invalid_value(name, f"{len(found)} of {names} are given; give exactly one")
    return found[0]


def _choice_grammar(field: str, alternatives: list[str]) -> GrammarSpec:
    text = "|".join(_REGEX_META.sub(r"\\\1", each) for each in alternatives)
    if len(text) > MAX_GRAMMAR_LENGTH:
        reason = f"the choices have {len(text)} characters; shorten them to {MAX_GRAMMAR_LENGTH}"
        raise invalid_value(field, reason)
    return GrammarSpec(GrammarKind.REGEX, text)


_GUIDED = {
    "guided_json": json_schema_grammar,
    "guided_regex": lambda _, text: GrammarSpec(GrammarKind.REGEX, text),
    "guided_grammar": lambda _, text: GrammarSpec(GrammarKind.LARK, text),
    "guided_choice": _choice_grammar,
}
