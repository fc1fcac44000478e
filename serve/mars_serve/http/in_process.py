"""Requests that the server makes of its own application, in the name of a client."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from mars_serve.api.keys import Caller

_REFUSED = (429, 503)
_FINAL = (b'"code":"storage_full"', b'"code":"deadline"')
"""Parts of refusals that waiting does not end."""
_RETRY_S = (1.0, 60.0)
"""Shortest and longest wait in seconds before a request that was refused is sent again."""


@dataclass(frozen=True)
class OwnRequests:
    """Sends requests to an application in this process, past the check of the key alone.

    All else holds for them as for the client's own: limits, places, errors and records.
    """

    app: ASGIApp

    async def post(self, path: str, body: bytes, caller: Caller, **state: Any) -> httpx.Response:
        """Send JSON and return the whole response; cancelling this cancels the request.

        The request's state has ``state``, too, which no client can set. The response's extension
        ``model`` is the name of the model, None for one that is unknown.
        """
        state["caller"] = caller

        async def named(scope: Scope, receive: Receive, send: Send) -> None:
            scope["state"] = state
            await self.app(scope, receive, send)

        transport = httpx.ASGITransport(app=named)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            headers = {"content-type": "application/json"}
            response = await client.post(path, content=body, headers=headers, timeout=None)
        response.extensions["model"] = state["record"].model
        return response


async def post_until_served(
    post: Callable[[], Awaitable[httpx.Response]], within_s: float = math.inf
) -> httpx.Response:
    """Return the response to a request, which is sent again while there is no room for it.

    Args:
        post: Sends the request.
        within_s: Seconds from now on in which it may be sent again.
    """
    end_s = time.monotonic() + within_s
    while True:
        response = await post()
        wait_s = _wait_s(response)
        if not is_refused(response) or time.monotonic() + wait_s > end_s:
            return response
        await asyncio.sleep(wait_s)


def is_refused(response: httpx.Response) -> bool:
    """Return whether there was no room for a request, and may be later."""
    return response.status_code in _REFUSED and not any(each in response.content for each in _FINAL)


def _wait_s(response: httpx.Response) -> float:
    least, most = _RETRY_S
    with suppress(ValueError):
        return min(max(float(response.headers.get("retry-after", "")), least), most)
    return least
