"""Writes the grammar of outputs with tool calls whose arguments satisfy the tools' schemas.

The grammar is in llguidance's dialect of Lark. A tag that is a single token appears as that token:
spelled out, the grammar would force other tokens than the model writes.

Source: llguidance, "Grammar syntax": special tokens, lazy lexemes and inline JSON schemas.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mars_serve.api.bounds import json_length
from mars_serve.api.errors import invalid_value, shown
from mars_serve.api.json_schema import current_schema
from mars_serve.api.messages import NO_PARAMETERS, FunctionDefinition
from mars_serve.api.tools.formats import LLAMA_TAG, PROBE_ID, CallFormat, Family

MAX_SCHEMAS_LENGTH = 2**18
"""Most characters of all schemas that the calls of one request must satisfy."""
# White space as templates render objects: it costs few tokens and cannot repeat endlessly.
_AS_RENDERED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT = {"type": "object"}
# Keywords with which a schema may allow further properties.
_OTHER_PROPERTIES = {"$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties"}
_TEXT = r"TEXT: /(.|\n)+/"
_TEXT_NO_OBJECT = r"TEXT: /[ \t\r\n]*[^{ \t\r\n](.|\n)*/"  # an object would be read as a call


@dataclass(frozen=True)
class CallGrammar:
    """Writes the grammar of the calls that one request allows."""

    form: CallFormat
    tags: Mapping[str, int]
    """Ids of the tags that are single tokens."""
    is_parallel: bool
    """Whether the output may contain several calls."""
    is_forced: bool
    """Whether the output must consist of calls; otherwise it may be text with or without calls."""

    def text(self, functions: Sequence[FunctionDefinition]) -> str:
        """Return the grammar. If calls are optional, only strict functions' schemas are enforced.

        Raises:
            ApiError: status 400: a schema does not describe an object, or is not valid JSON, or
                the schemas are too long together.
        """
        schemas = [each.parameters for each in functions if self.is_forced or each.strict]
        if (length := json_length(schemas)) > MAX_SCHEMAS_LENGTH:
            reason = f"the schemas that calls must satisfy have {length} characters together"
            raise invalid_value("tools", f"{reason}; shorten them to {MAX_SCHEMAS_LENGTH}")
        names = [f"call_{index}" for index in range(len(functions))]
        lines = [f"start: {self._start()}", f"call: {' | '.join(names)}", *self._text_rules()]
        for index, function in enumerate(functions):
            opening, middle = self._literal(self.form.opening), self._literal(self.form.middle)
            name, closing = json.dumps(function.name), self._literal(self.form.closing)
            lines.append(f"call_{index}: {opening} {name} {middle} arguments_{index} {closing}")
            schema = function if self.is_forced or function.strict else None
            lines.append(f"arguments_{index}: %json {_schema_text(schema)}")
        return "\n".join(lines)

    def _start(self) -> str:
        form, trigger = self.form, self.form.begin
        # Where text is allowed, separators of calls that each have a tag are part of that text.
        has_list = self.is_forced or form.family is Family.MISTRAL_LIST
        separator = form.separator if self.is_parallel and has_list else None
        more = "" if separator is None else f"({self._literal(separator)} call)*"
        calls = f"{self._literal(form.first)} call {more} {self._literal(form.final)}"
        if self.is_forced:
            return calls
        if trigger is None:
            tag = f"{self._literal(LLAMA_TAG)}?" if LLAMA_TAG in self.tags else ""
            return f"({tag} {calls} | TEXT)?"
        return f"({calls}){'*' if self.is_parallel else '?'} TEXT?"

    def _text_rules(self) -> list[str]:
        trigger = self.form.begin
        if trigger is None:
            return [] if self.is_forced else [_TEXT_NO_OBJECT]
        token = self._token(trigger)
        if self.is_forced:
            return [f"begin: {token}"]
        if trigger in self.tags:
            return [f"begin: TEXT? {token}", _TEXT]
        return [rf"begin[lazy]: /(.|\n)*{re.escape(trigger)}/", _TEXT]

    def _literal(self, text: str) -> str:
        parts = "|".join(re.escape(part) for part in (*self.form.tags, PROBE_ID))
        return " ".join(self._part(part) for part in re.split(f"({parts})", text) if part)

    def _part(self, part: str) -> str:
        if part == PROBE_ID:
            return "/[a-zA-Z0-9]{9}/"
        return "begin" if part == self.form.begin else self._token(part)

    def _token(self, text: str) -> str:
        return f"<[{self.tags[text]}]>" if text in self.tags else json.dumps(text)


def _schema_text(function: FunctionDefinition | None) -> str:
    """Return the JSON schema of a function's arguments; without a function, of any object."""
    schema = _ANY_OBJECT if function is None else _schema_of(function)
    try:
        return json.dumps({"x-guidance": _AS_RENDERED, **current_schema(schema)}, allow_nan=False)
    except ValueError as error:  # NaN and infinity, which Python's parser accepts
        reason = "a schema has a number that is not finite; use finite ones"
        raise invalid_value("tools", reason) from error
    except RecursionError as error:
        raise invalid_value("tools", "a schema is nested too deeply; make it flatter") from error


def _schema_of(function: FunctionDefinition) -> dict[str, Any]:
    """Return a function's schema; if it names properties, it allows no others."""
    schema = NO_PARAMETERS if function.parameters is None else function.parameters
    kind = schema.get("type", "object")
    if kind != "object":
        reason = f"the parameters of {function.name!r} are of type {shown(kind)}; use 'object'"
        raise invalid_value("tools", reason)
    is_closed = "properties" in schema and not _OTHER_PROPERTIES & schema.keys()
    closing = {"additionalProperties": False} if is_closed else {}
    return {"type": "object", **closing, **schema}
