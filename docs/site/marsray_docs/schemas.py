"""Tells in words what a JSON schema accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from marsray_docs.tables import code, text

Schema = Mapping[str, Any]
_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def type_of(schema: Schema, named: Callable[[str], str]) -> str:
    """Return the type of a value.

    Args:
        schema: schema of the value.
        named: returns what to write for a schema that is referred to, from its name.
    """
    if "$ref" in schema:
        return named(schema["$ref"].rpartition("/")[2])
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(type_of(each, named) for each in schema[key]))
    if "const" in schema:
        return code(repr(schema["const"]))
    if "enum" in schema:
        return ", ".join(map(code, schema["enum"]))
    kind = str(schema.get("type", "any"))
    if kind == "array":
        kind = f"list of {type_of(schema.get('items', {}), named)}"
    return kind + _bounds(schema)


def meaning(schema: Schema) -> str:
    """Return the description of a value on one line."""
    return text(schema.get("description"))


def _bounds(schema: Schema) -> str:
    bounds = [f"{sign} {schema[key]:,}" for key, sign in _SIGNS.items() if key in schema]
    return f" {', '.join(bounds)}" if bounds else ""
