"""Bounds on JSON from clients, checked before anything is built from it.

The time and memory that JSON takes to parse depend on the number of its values rather than on its
bytes, and those of its validation on the number of its mistakes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError, to_json

_OPENING, _CLOSING = b"[{", b"]}"
_SEPARATORS = b",:"
_LONG_NUMBER = re.compile(rb"[0-9]{400}")  # the longest float has 309 digits before its point
_DEPTH_OF = np.zeros(256, np.int8)
_DEPTH_OF[list(_OPENING)] = 1
_DEPTH_OF[list(_CLOSING)] = -1
_COUNTS = np.zeros(256, np.uint8)
_COUNTS[list(_OPENING + _SEPARATORS)] = 1
_STEP = 2**17
"""Bytes that are measured at once."""
_QUOTE = ord('"')


@dataclass
class JsonSize:
    """The size of a JSON text beside its strings; it is exact for valid JSON."""

    depth: int = 0
    num_values: int = 0
    """Number of separators and opening brackets: about the number of names and values."""
    has_long_number: bool = False
    """Whether a number has so many digits that reading it takes long."""


def json_size_of(text: bytes, max_values: int | None = None) -> JsonSize:
    """Measure a JSON text in UTF-8, up to where it has more than ``max_values``.

    It goes in small steps, so that in a thread it never holds up other threads.
    """
    found, level, in_string, start = JsonSize(), 0, False, 0
    while start < len(text) and (max_values is None or found.num_values <= max_values):
        end = start + _STEP
        piece = text[start:end]
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        end += num_backslashes % 2  # an escape sequence must not be cut in two
        codes, in_string = _outside_strings(text[start:end], in_string)
        steps = _DEPTH_OF[codes]
        levels = level + steps[steps != 0].cumsum(dtype=np.int64)
        if len(levels):
            level = int(levels[-1])
            found.depth = max(found.depth, int(levels.max()))
        found.num_values += int(_COUNTS[codes].sum(dtype=np.int64))
        found.has_long_number |= _LONG_NUMBER.search(codes.tobytes()) is not None
        start = end
    return found


def most_depth(text: bytes) -> int:
    """Return an upper bound of `JsonSize.depth` that takes next to no time."""
    return sum(text.count(code) for code in _OPENING)


def _outside_strings(text: bytes, in_string: bool) -> tuple[NDArray[np.uint8], bool]:
    """Return the bytes of a piece of JSON that belong to no string, and whether it ends in one.

    Args:
        text: the piece; it does not end within an escape sequence.
        in_string: whether it begins within a string.
    """
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")  # now every quote begins or ends one
    codes = np.frombuffer(plain, np.uint8)
    is_quote = codes == _QUOTE
    is_inside = np.logical_xor.accumulate(is_quote) ^ in_string
    ends_inside = bool(is_inside[-1]) if len(codes) else in_string
    return codes[~(is_inside | is_quote)], ends_inside


def json_length(value: Any) -> int:
    """Return about the length of a value as JSON, several times as fast as `json` would write it.

    Values that cannot be written count nothing; `json` says more about them.
    """
    try:
        return len(to_json(value))
    except ValueError:  # half a surrogate pair
        return 0


def at_most(num_members: int) -> BeforeValidator:
    """Return a validator that refuses larger objects before it looks at their members.

    Pydantic reports a mistake in every member before it counts them.
    """

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > num_members:
            raise PydanticCustomError(
                "too_many_members",
                "Object should have at most {most} members, not {given}",
                {"most": num_members, "given": len(value)},
            )
        return value

    return BeforeValidator(check)
