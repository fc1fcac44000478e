"""The lines of a batch's input and output.

Source: OpenAI API reference, "Batch": the objects of request input and output.
"""

from codecs import BOM_UTF8
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json, to_json

from mars_serve.api.bounds import json_size_of, most_depth
from mars_serve.api.errors import clipped
from mars_serve.storage.objects import new_id

MOST_LINES = 100_000
_MOST_ERRORS = 100
"""Most errors in lines that a batch tells of."""
_MAX_DEPTH = 100
_CHECKED_BYTES = 2**16
"""Size in bytes of lines whose structure is looked over before they are parsed."""
_MOST_SHOWN = 64  # characters of a client's text in a message


class LineProblem(Exception):
    """Raised for a line that is no request; it has the error's code and field."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class _Content(BaseModel):
    model_config = ConfigDict(extra="ignore")

    custom_id: str = Field(min_length=1, max_length=512)
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One request of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]


def parse_line(content: bytes, max_bytes: int, max_values: int) -> Line:
    """Return the request in a line of a file.

    Raises:
        LineProblem: there is none, or one that is too large.
    """
    if len(content) > max_bytes:
        reason = f"the line has more than the {max_bytes} bytes that this server takes"
        raise LineProblem("body_too_large", reason)
    if most_depth(content) > _MAX_DEPTH or len(content) > _CHECKED_BYTES:
        found = json_size_of(content, max_values)
        if found.depth > _MAX_DEPTH or found.num_values > max_values or found.has_many_digits:
            reason = "the line is nested too deeply, or has too many values or digits"
            raise LineProblem("body_too_large", reason)
    try:
        parsed = _Content.model_validate(from_json(content))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        raise LineProblem("invalid_value", f"{param or 'line'}: {first['msg']}", param) from None
    except ValueError as error:
        reason = f"the line is no JSON ({clipped(str(error), _MOST_SHOWN)})"
        raise LineProblem("invalid_json_line", reason) from None
    return Line(parsed.custom_id, parsed.url, parsed.body)


def numbered_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield number, from 1, and content of the lines of a file that are not blank.

    Of a line that is too long the beginning is yielded, one byte more than ``max_bytes``.
    """
    number = 0
    while line := file.readline(max_bytes + 2):
        number += 1
        content = (line.removeprefix(BOM_UTF8) if number == 1 else line).rstrip(b"\r\n")
        while not line.endswith(b"\n") and (line := file.readline(max_bytes + 2)):
            pass
        if content.strip():
            yield number, content


@dataclass(frozen=True)
class LineError:
    """An error in the input of a batch."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


def check_lines(
    file: BinaryIO, endpoint: str, max_bytes: int, max_values: int
) -> tuple[int, list[LineError]]:
    """Check all lines of a batch's input.

    Returns:
        The number of requests, and the first errors in them.
    """
    seen, errors, number = set[bytes](), list[LineError](), 0
    for number, (line, content) in enumerate(numbered_lines(file, max_bytes), start=1):
        if number > MOST_LINES:
            reason = f"the file has more than {MOST_LINES} lines; divide it"
            return number, [LineError("too_many_lines", reason)]
        try:
            parsed = parse_line(content, max_bytes, max_values)
            _check_line(parsed, endpoint, seen)
        except LineProblem as problem:
            errors.append(LineError(problem.code, str(problem), line, problem.param))
            if len(errors) == _MOST_ERRORS:
                break
    if not number:
        errors = [LineError("empty_file", "the file has no lines; send some requests")]
    return number, errors


def _check_line(line: Line, endpoint: str, seen: set[bytes]) -> None:
    digest = blake2b(line.custom_id.encode(), digest_size=16).digest()
    if digest in seen:
        shown = clipped(line.custom_id, _MOST_SHOWN)
        reason = f"custom_id: an earlier line has {shown!r} as well; give each its own"
        raise LineProblem("duplicate_custom_id", reason, "custom_id")
    seen.add(digest)
    if line.url != endpoint:
        shown = clipped(line.url, _MOST_SHOWN)
        reason = f"url: it is {shown!r}, and the batch's endpoint is {endpoint}"
        raise LineProblem("mismatched_url", reason, "url")
    for field in ("stream", "background"):
        if line.body.get(field):
            reason = f"{field}: answers of a batch are whole; leave it out"
            raise LineProblem("invalid_value", reason, field)


def custom_id_of(number: int, content: bytes) -> str:
    """Return the custom_id in a line, or one that says its number where a long line is cut."""
    with suppress(ValueError, KeyError, TypeError):
        return str(from_json(content, allow_partial=True)["custom_id"])
    return f"line {number}"


def request_body(line: Line, tiers: Collection[str]) -> bytes:
    """Return the body of a line's request, in tier flex where it names none and may have it.

    A response of a batch is in its file, and stored beside that only if the line says so.
    """
    body = {"store": False, **line.body} if line.url == "/v1/responses" else line.body
    if body.get("service_tier") is None and "flex" in tiers:
        body = {**body, "service_tier": "flex"}
    return to_json(body, inf_nan_mode="constants")


def answer_line(custom_id: str, status: int, request_id: str | None, content: bytes) -> bytes:
    """Return the line of an output or error file that answers a request, without its end."""
    try:
        body = from_json(content)
    except ValueError:
        body = None
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _output_line(custom_id, response, None)


def unanswered_line(custom_id: str, code: str, message: str) -> bytes:
    """Return the line of an error file for a request that was not made."""
    return _output_line(custom_id, None, {"code": code, "message": message})


def _output_line(
    custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None
) -> bytes:
    line = {"id": f"batch_req_{new_id()}", "custom_id": custom_id}
    return to_json({**line, "response": response, "error": error}, inf_nan_mode="constants")
