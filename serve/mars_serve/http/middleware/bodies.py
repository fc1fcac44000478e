"""Reads request bodies and refuses those that no endpoint can accept.

This middleware runs after authentication, so that only key holders can make the server read a body.
"""

import asyncio
import json
from contextlib import suppress

from pydantic_core import PydanticSerializationError, from_json, to_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_serve.api.bounds import STEP, json_size_of, most_depth
from mars_serve.api.errors import ApiError, clipped, invalid_value
from mars_serve.api.text_threads import Load, TextThreads, beside
from mars_serve.http.middleware.authentication import path_within

UPLOADS = "/v1/files"
"""Path to which files are sent, which its endpoint reads and checks in pieces."""
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")  # methods whose body is not read
_MAX_DEPTH = 100
"""Largest nesting depth of JSON. Templates and grammars recurse into values, and a Python or native
stack that overflows may end the process."""
_SURROGATES = (rb"\ud", rb"\uD", b"\xed")
"""Beginnings of halves of surrogate pairs, and of some other characters, in JSON."""
_MAX_NAME = 64  # longest field name that a message quotes


class BodyMiddleware:
    """Passes on requests whose body is JSON within the limits.

    Raises `ApiError`: 408 for a body that takes too long, 413 for too many bytes or values, 415 for
    an unsupported encoding or type, 422 for JSON that is nested too deeply or not UTF-8, 400 for
    half a character in a field, 503 if other bodies take all room.
    """

    def __init__(
        self, app: ASGIApp, threads: TextThreads, max_bytes: int, max_values: int, wait_s: float
    ) -> None:
        self._app = app
        self._threads = threads
        self._max_bytes = max_bytes
        self._max_values = max_values
        self._wait_s = wait_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request with its body read and checked; its state has the body's `Load`."""
        is_upload = scope["type"] == "http" and path_within(scope) == UPLOADS
        if scope["type"] != "http" or scope["method"] in _WITHOUT_BODY or is_upload:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        self._check_encoding(headers)
        with self._threads.load(scope["state"]["caller"]) as load:
            try:
                async with asyncio.timeout(self._wait_s):
                    body = await self._read(headers, receive, load)
            except ClientDisconnect:
                return
            except TimeoutError as error:
                reason = (
                    f"it did not arrive within {self._wait_s:g} s; send it faster, or send less"
                )
                raise ApiError(408, f"body: {reason}", code="request_timeout") from error
            if body:
                _check_type(headers)
                _check_unicode(body)
                await self._threads.begin(load)
                if load.is_large or most_depth(body) > _MAX_DEPTH:
                    await self._check_structure(body, load)
                if await beside(load, lambda: _may_have_surrogates(body)):
                    await beside(load, lambda: _check_surrogates(body))
            scope["state"]["load"] = load
            await self._app(scope, _replayed(body, receive), send)

    def _check_encoding(self, headers: Headers) -> None:
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise ApiError(
                415,
                "Content-Encoding: this server reads no compressed bodies; send plain JSON",
                code="unsupported_encoding",
            )

    async def _read(self, headers: Headers, receive: Receive, load: Load) -> bytes:
        """Return the body; the HTTP server discards the rest of one that is too large."""
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_bytes:
            raise self._too_large()
        parts, is_more = list[bytes](), True
        while is_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            parts.append(message.get("body", b""))
            self._threads.add(load, len(parts[-1]))
            if load.size > self._max_bytes:
                raise self._too_large()
            is_more = message.get("more_body", False)
        return b"".join(parts)

    async def _check_structure(self, body: bytes, load: Load) -> None:
        most = self._max_values if load.is_large else None
        found = await beside(load, lambda: json_size_of(body, most))
        if found.depth > _MAX_DEPTH:
            reason = f"nested more than {_MAX_DEPTH} levels deep; send a flatter one"
            raise ApiError(422, f"body: {reason}", code="unparsable")
        if not load.is_large:
            return
        if found.num_values > self._max_values:
            reason = f"more than the {self._max_values} names and values that this server takes"
            remedy = "send less, and long prompts as text instead of token ids"
            raise ApiError(413, f"body: {reason}; {remedy}", code="body_too_large")
        if found.has_many_digits:
            reason = "its numbers have too many digits; shorten them, or send them as text"
            raise ApiError(422, f"body: {reason}", code="unparsable")

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"body: more than the {self._max_bytes} bytes that this server takes; send less",
            code="body_too_large",
        )


def _check_type(headers: Headers) -> None:
    """Refuse types other than JSON, which a web page could make a browser send unasked."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and "+json" in kind):
        raise ApiError(
            415,
            "Content-Type: this server reads JSON only; send application/json",
            code="unsupported_content_type",
        )


def _check_unicode(body: bytes) -> None:
    if not json.detect_encoding(body).startswith("utf-8"):
        raise ApiError(422, "body: it is not UTF-8, as JSON must be", code="unparsable")


def _may_have_surrogates(body: bytes) -> bool:
    """Look for beginnings of surrogates, in small steps that hold up no other thread."""
    pieces = (body[start : start + STEP + 2] for start in range(0, len(body), STEP))
    return any(each in piece for piece in pieces for each in _SURROGATES)


def _check_surrogates(body: bytes) -> None:
    """Refuse halves of surrogate pairs, which JSON can name and no text in UTF-8 can hold."""
    with suppress(ValueError):
        from_json(body)  # fast, but says too little and refuses a byte order mark, too
        return
    with suppress(ValueError):  # what is no JSON is the endpoint's to refuse
        content = json.loads(body)
        for name, value in content.items() if isinstance(content, dict) else ():
            try:
                to_json({name: value})
            except PydanticSerializationError as error:
                field = clipped(name, _MAX_NAME).encode("utf-8", "replace").decode()
                reason = "it has half of a surrogate pair; send whole characters"
                raise invalid_value(field, reason) from error


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that yields the body first, then the connection's messages."""
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
