"""Refuses requests beyond a key's rate limits, or for which a queue has no place, unread."""

from collections.abc import Mapping
from contextlib import ExitStack

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_serve.api.errors import ApiError
from mars_serve.api.keys import Caller
from mars_serve.api.limits import KeyLimits, Places
from mars_serve.http.middleware.authentication import path_within
from mars_serve.http.middleware.records import RequestRecord

GENERATING = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
"""Paths of the endpoints that generate."""
_LIMITED = GENERATING | {"/tokenize", "/detokenize", "/v1/messages/count_tokens"}


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

        # one in the background was counted when it was sent
        is_new = "background" not in scope["state"]
        with self._limits.admit(caller, num_tokens, is_new=is_new) as usage:

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
    """Takes a place for each request to generate, before it is read and until its answer has ended.

    A flood that finds none costs little. The place is that of the first model which has one; the
    endpoint changes it for those of the outputs once it has read the model, in ``state.places``.
    Raises the `ApiError` of `Places.check`.
    """

    def __init__(self, app: ASGIApp, places: Mapping[str, Places]) -> None:
        self._app = app
        self._places = places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request if it may find a place."""
        with ExitStack() as held:
            if _is_post(scope) and path_within(scope) in GENERATING:
                self._enter(scope["state"]["caller"], scope["state"]["record"], held)
                scope["state"]["places"] = held
            await self._app(scope, receive, send)

    def _enter(self, caller: Caller, record: RequestRecord, held: ExitStack) -> None:
        refusals = list[ApiError]()
        for places in self._places.values():
            try:
                held.enter_context(places.take(caller, 1))
            except ApiError as error:
                refusals.append(error)
            else:
                return
        if len(refusals) == 1:  # with several models, only the body would tell which is meant
            (record.model,) = self._places
        if refusals:
            raise refusals[-1]
