"""Finds the grammar that a request body asks for; the engine compiles it."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mars_serve.api.bounds import json_length
from mars_serve.api.errors import invalid_value
from mars_serve.api.json_schema import current_schema
from mars_serve.api.output_forms import (
    MAX_GRAMMAR_LENGTH,
    SchemaFormat,
    StructuredOutputs,
)
from mars_serve.api.protocol import GenerationRequest
from mars_serve.engine.decoding_options import GrammarKind, GrammarSpec

_ANY_OBJECT = GrammarSpec(
    GrammarKind.LARK,
    r"""start: object
object: "{" w (pair ("," w pair)*)? "}"
pair: STRING w ":" w value w
array: "[" w (value w ("," w value w)*)? "]"
value: object | array | STRING | NUMBER | "true" | "false" | "null"
w: WS?
WS: /[ \t\n\r]{1,20}/
STRING: "\"" (GAP? CHARACTER)* GAP? "\""
GAP: /( |\\[bfnrt]){1,256}/
CHARACTER: /[^ \\"\x00-\x1f\x7f]|\\(["\\\/]|u[0-9a-fA-F]{4})/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
""",
)
"""Any JSON object. An unsure model may write nothing but white space, so its runs are bounded, in
strings, too, where they may be the indentation of a program."""
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
    form = body.response_format
    if isinstance(form, SchemaFormat):
        grammar = json_schema_grammar("response_format", form.json_schema.schema_)
        found.append(Structure("response_format", grammar))
    elif form is not None and form.type == "json_object":
        found.append(Structure("response_format", _ANY_OBJECT))
    if body.structured_outputs is not None:
        grammar = _structured_grammar(body.structured_outputs)
        found.append(Structure("structured_outputs", grammar))
    for kind, make in _MAKERS.items():
        value = getattr(body, f"guided_{kind}", None)
        if value is not None:
            found.append(Structure(f"guided_{kind}", make(f"guided_{kind}", value)))
    if len(found) > 1:
        first, second = found[0].field, found[1].field
        raise invalid_value(second, f"{first} already gives a grammar; leave one of them out")
    return found[0] if found else None


def json_schema_grammar(field: str, schema: dict[str, Any] | bool | str) -> GrammarSpec:
    """Return the grammar for a JSON schema, given as an object, as a boolean or as text.

    Raises:
        ApiError: status 400: the schema cannot be written as JSON, is too long, or is false.
    """
    if isinstance(schema, str):
        text = schema
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError):  # the engine says what is wrong with it
            return GrammarSpec(GrammarKind.JSON_SCHEMA, text)
    if schema is False:
        raise invalid_value(field, "no JSON satisfies the schema false; give another")
    schema = {} if schema is True else schema
    _check_length(field, "schema has", json_length(schema))
    try:
        text = json.dumps(current_schema(schema), allow_nan=False)
    except ValueError as error:  # NaN and infinity, which Python's parser accepts
        raise invalid_value(field, "the schema has a number that is not finite") from error
    except RecursionError as error:
        raise invalid_value(field, "the schema is nested too deeply; make it flatter") from error
    _check_length(field, "schema has", len(text))
    return GrammarSpec(GrammarKind.JSON_SCHEMA, text)


def _structured_grammar(wanted: StructuredOutputs) -> GrammarSpec:
    fields = wanted.model_dump(by_alias=True, exclude_none=True)
    given = {kind: value for kind, value in fields.items() if value is not False}
    name = "structured_outputs"
    if len(given) != 1:
        names = "json, json_object, regex, grammar and choice"
        raise invalid_value(name, f"{len(given)} of {names} are given; give exactly one")
    ((kind, value),) = given.items()
    return _MAKERS[kind](name, value)


def _choice_grammar(field: str, alternatives: list[str]) -> GrammarSpec:
    _check_length(field, "choices have", sum(map(len, alternatives)))
    text = "|".join(_REGEX_META.sub(r"\\\1", each) for each in alternatives)
    _check_length(field, "choices have", len(text))
    return GrammarSpec(GrammarKind.REGEX, text)


def _check_length(field: str, subject: str, length: int) -> None:
    if length > MAX_GRAMMAR_LENGTH:
        them = "them" if subject.startswith("choices") else "it"
        reason = f"the {subject} {length} characters; shorten {them} to {MAX_GRAMMAR_LENGTH}"
        raise invalid_value(field, reason)


_MAKERS: dict[str, Callable[[str, Any], GrammarSpec]] = {
    "json": json_schema_grammar,
    "json_object": lambda *_: _ANY_OBJECT,
    "regex": lambda _, text: GrammarSpec(GrammarKind.REGEX, text),
    "grammar": lambda _, text: GrammarSpec(GrammarKind.LARK, text),
    "choice": _choice_grammar,
}
"""Functions that make a grammar from a field's name and value, by kind of structured output."""
