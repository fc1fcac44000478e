"""Requests that the server makes of its own application, in the name of a client."""

from dataclasses import dataclass

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from mars_serve.api.keys import Caller


@dataclass(frozen=True)
class OwnRequests:
    """Sends requests to an application in this process, past the check of the key alone.

    All else holds for them as for the client's own: limits, places, errors and records.
    """

    app: ASGIApp

    async def post(self, path: str, body: bytes, caller: Caller) -> httpx.Response:
        """Send JSON and return the whole response; cancelling this cancels the request."""

        async def named(scope: Scope, receive: Receive, send: Send) -> None:
            scope["state"] = {"caller": caller}
            await self.app(scope, receive, send)

        transport = httpx.ASGITransport(app=named)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            headers = {"content-type": "application/json"}
            return await client.post(path, content=body, headers=headers, timeout=None)
