"""Refuses requests beyond a key's rate limits, or for which a queue has no place, unread."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_serve.api.errors import ApiError
from mars_serve.api.keys import Caller
from mars_serve.api.limits import KeyLimits, Places
from mars_serve.http.middleware.authentication import path_within
from mars_serve.http.middleware.records import RequestRecord

_GENERATING = frozenset({"/v1/completions", "/v1/chat/completions"})
_LIMITED = _GENERATING | {"/tokenize", "/detokenize"}


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
    return (
        _is_post(scope)
        and path_within(scope) in _LIMITED
        and bool(scope["state"]["caller"].is_limited)
    )


def _is_post(scope: Scope) -> bool:
    return bool(scope["type"] == "http" and scope["method"] == "POST")


class QueueMiddleware:
    """Refuses requests to generate for which no model has a place, so that a flood costs little.

    Where another model has one, the endpoint refuses them once it has read their model. Raises the
    `ApiError` of `Places.check`.
    """

    def __init__(self, app: ASGIApp, places: Mapping[str, Places]) -> None:
        self._app = app
        self._places = places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request if it may find a place."""
        if _is_post(scope) and path_within(scope) in _GENERATING:
            self._check(scope["state"]["caller"], scope["state"]["record"])
        await self._app(scope, receive, send)

    def _check(self, caller: Caller, record: RequestRecord) -> None:
        refusals = list[ApiError]()
        for places in self._places.values():
            try:
                places.check(caller, 1)
            except ApiError as error:
                refusals.append(error)
            else:
                return
        if len(refusals) == 1:  # with several models, only the body would tell which is meant
            (record.model,) = self._places
        if refusals:
            raise refusals[-1]
