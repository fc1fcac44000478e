"""The web pages: the playground at ``/`` and others beside it, as files that need no key.

They hold nothing of the server's own. What they show they ask the other endpoints for, with the key
that their user types in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from mars_serve.http.page_files import PageFile, page_files

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    # Kept, but asked for again each time: a file's name does not change with its content.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def pages_router() -> APIRouter:
    """Return the router of the pages' files, one route for each."""
    # The pages are no part of the API, so they are plain routes that its description leaves out.
    files = page_files().items()
    routes: list[BaseRoute] = [Route(path, _endpoint(file)) for path, file in files]
    return APIRouter(routes=routes)


def _endpoint(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    headers = {**_HEADERS, "ETag": file.etag}

    async def respond(request: Request) -> Response:
        if _is_known(request.headers.get("if-none-match", ""), file.etag):
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.content_type, headers=headers)

    return respond


def _is_known(given: str, etag: str) -> bool:
    """Return whether a client that gives some tags in ``If-None-Match`` has the file already."""
    tags = {tag.strip().removeprefix("W/") for tag in given.split(",")}
    return etag in tags or "*" in tags
