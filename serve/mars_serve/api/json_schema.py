"""Brings JSON schemas to the form that llguidance reads."""

from typing import Any

_BOUNDS = (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum"))
_VALUES = {"const", "default", "enum", "examples"}
_DEPENDENT = {"dependencies", "dependentSchemas"}
_BY_NAME = {"$defs", "definitions", "patternProperties", "properties", *_DEPENDENT}
"""Keywords whose values hold schemas by names, which may look like keywords."""


def current_schema(schema: Any, *, by_name: bool = False) -> Any:
    """Return a schema, or an object of some by name, with the bounds that drafts have since 6.

    In draft 4, ``exclusiveMinimum`` is a boolean that belongs to ``minimum``, which llguidance
    ignores.
    """
    if isinstance(schema, list):
        return [current_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: value
        if key in _VALUES and not by_name
        else current_schema(value, by_name=key in _BY_NAME and not by_name)
        for key, value in schema.items()
    }
    for exclusive, bound in () if by_name else _BOUNDS:
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and bound in found:
            found[exclusive] = found.pop(bound)
    return found
