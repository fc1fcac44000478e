"""The web pages: the playground at ``/`` and others beside it, as files that need no key.

The files lie in the folder ``pages`` beside this module and are read once. Each folder there but
``common`` is a page: its ``index.html`` is served at ``/`` for the playground and at the folder's
name for others, and every other file at its path below ``/pages/``. Nothing but these files is ever
served, whatever a request asks for. They hold nothing of the server's own. What they show they ask
the other endpoints for, with the key that their user types in.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

_FOLDER = Path(__file__).parent / "pages"
_FRONT = "playground"  # the page at /
_INDEX = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Content types by the end of a file's name; files with other ends are not served."""
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


@dataclass(frozen=True)
class PageFile:
    """A file of a page, with what HTTP says of it."""

    content: bytes
    content_type: str
    etag: str
    """Strong entity tag, which changes with the content."""


@cache
def page_files() -> dict[str, PageFile]:
    """Return the files by the paths at which they are served."""
    return {
        _path_of(file.relative_to(_FOLDER)): _read(file)
        for file in sorted(_FOLDER.rglob("*"))
        if file.is_file() and file.suffix in _TYPES
    }


def _path_of(file: Path) -> str:
    if file.name != _INDEX:
        return f"/pages/{file.as_posix()}"
    page = file.parent.as_posix()
    return "/" if page == _FRONT else f"/{page}"


def _read(file: Path) -> PageFile:
    content = file.read_bytes()
    digest = blake2b(content, digest_size=12).hexdigest()
    return PageFile(content, _TYPES[file.suffix], f'"{digest}"')


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
