"""Applies the rate limits of keys to requests that generate or convert text."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_serve.api.keys import Caller
from mars_serve.api.limits import KeyLimits
from mars_serve.http.middleware.authentication import path_within
from mars_serve.http.middleware.records import RequestRecord

_LIMITED = frozenset({"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"})


class AdmissionMiddleware:
    """Counts a request against its key's limits until its response ends, streams included.

    The endpoint writes the numbers of tokens into the request's record. Raises `ApiError` 429 if a
    limit is reached.
    """

    def __init__(self, app: ASGIApp, limits: KeyLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request within the limits of its key."""
        if not _is_limited(scope):
            await self._app(scope, receive, send)
            return
        caller: Caller = scope["state"]["caller"]
        record: RequestRecord = scope["state"]["record"]

        def num_tokens() -> int:
            return (record.prompt_tokens or 0) + (record.completion_tokens or 0)

        with self._limits.admit(caller, num_tokens) as usage:

            async def telling(message: Message) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message).update(usage.headers())
                await send(message)

            await self._app(scope, receive, telling)


def _is_limited(scope: Scope) -> bool:
    """Return whether a request generates or converts text for a key with limits."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    caller: Caller = scope["state"]["caller"]
    return path_within(scope) in _LIMITED and caller.is_limited
