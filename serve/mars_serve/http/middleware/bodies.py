"""Reads request bodies and refuses those that no endpoint can accept.

This middleware runs after authentication, so that only key holders can make the server read a body.
"""

from __future__ import annotations

import asyncio
import json
import re

import numpy as np
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_serve.api.errors import ApiError

_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")  # methods whose body is not read
_MAX_DEPTH = 100
"""Largest nesting depth of JSON. Templates and grammars recurse into values, and a Python or native
stack that overflows may end the process."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_DEPTH_OF = np.zeros(256, np.int8)
_DEPTH_OF[[ord("["), ord("{")]] = 1
_DEPTH_OF[[ord("]"), ord("}")]] = -1


class BodyMiddleware:
    """Passes on requests whose body is JSON within the limits.

    Raises `ApiError`: 408 for a body that takes too long, 413 for too many bytes, 415 for an
    unsupported encoding or type, 422 for JSON that is nested too deeply or not UTF-8.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, wait_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._wait_s = wait_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request with its body read and checked."""
        if scope["type"] != "http" or scope["method"] in _WITHOUT_BODY:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        self._check_encoding(headers)
        try:
            async with asyncio.timeout(self._wait_s):
                body = await self._read(headers, receive)
        except ClientDisconnect:
            return
        except TimeoutError as error:
            reason = f"it did not arrive within {self._wait_s:g} s; send it faster, or send less"
            raise ApiError(408, f"body: {reason}", code="request_timeout") from error
        if body:
            _check_type(headers)
            _check_json(body)
        await self._app(scope, _replayed(body, receive), send)

    def _check_encoding(self, headers: Headers) -> None:
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise ApiError(
                415,
                "Content-Encoding: this server reads no compressed bodies; send plain JSON",
                code="unsupported_encoding",
            )

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        """Return the body; the HTTP server discards the rest of one that is too large."""
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_bytes:
            raise self._too_large()
        parts, num_bytes, is_more = [], 0, True
        while is_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            if num_bytes > self._max_bytes:
                raise self._too_large()
            is_more = message.get("more_body", False)
        return b"".join(parts)

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


def _check_json(body: bytes) -> None:
    if not json.detect_encoding(body).startswith("utf-8"):
        raise ApiError(422, "body: it is not UTF-8, as JSON must be", code="unparsable")
    if _depth(body) > _MAX_DEPTH:
        raise ApiError(
            422,
            f"body: nested more than {_MAX_DEPTH} levels deep; send a flatter one",
            code="unparsable",
        )


def _depth(body: bytes) -> int:
    """Return the nesting depth; it is exact for valid JSON."""
    if body.count(b"[") + body.count(b"{") <= _MAX_DEPTH:
        return 0  # few brackets cannot nest deeply, and hardly any request has more
    steps = _DEPTH_OF[np.frombuffer(_STRING.sub(b"", body), np.uint8)]
    return int(steps.cumsum(dtype=np.int32).max(initial=0))


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
