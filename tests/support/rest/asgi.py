"""Calls of an ASGI application with raw paths, raw headers, or a client that disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import ASGIApp, Message

Headers = Mapping[str, str] | Sequence[tuple[bytes, bytes]]


def scope_of(method: str, path: str, headers: Headers = (), **fields: Any) -> dict[str, Any]:
    """Return the scope of an HTTP request whose path and headers are sent unchanged."""
    if isinstance(headers, Mapping):
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    else:
        pairs = list(headers)
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": pairs,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        **fields,
    }


async def call(
    app: ASGIApp,
    method: str,
    path: str,
    headers: Headers = (),
    *,
    chunks: Sequence[bytes] = (b"",),
    leave_after: int | None = None,
    **fields: Any,
) -> list[Message]:
    """Send a request and return the messages of its response.

    Args:
        app: The application.
        method: HTTP method.
        path: Path of the request.
        headers: Headers of the request.
        chunks: The body in pieces.
        leave_after: Number of messages after which the client disconnects; sending then fails.
        fields: Further fields of the scope.
    """
    num_chunks, sent, has_left = len(chunks), list[Message](), asyncio.Event()
    incoming = [
        {"type": "http.request", "body": chunk, "more_body": index + 1 < num_chunks}
        for index, chunk in enumerate(chunks)
    ]

    async def receive() -> Message:
        if incoming:
            return incoming.pop(0)
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if has_left.is_set():
            raise OSError("the client has left")
        sent.append(message)
        if len(sent) == leave_after:
            has_left.set()

    await app(scope_of(method, path, headers, **fields), receive, send)
    return sent
