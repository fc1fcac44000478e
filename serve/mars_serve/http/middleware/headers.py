"""Refuses requests by their headers, before anything else of them is read."""

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from mars_serve.api.errors import ApiError, clipped
from mars_serve.config.settings import is_loopback

_ID = b"x-request-id"
_MAX_ID = 128  # bytes of a request's id, which is logged and returned
_MAX_SHOWN = 80  # longest part of a header that a message quotes


class HeaderMiddleware:
    """Passes on requests whose headers are ASCII; raises `ApiError` 400 for others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request if its headers can be read."""
        if scope["type"] == "http":
            check_headers(scope)
        await self._app(scope, receive, send)


def check_headers(scope: Scope) -> None:
    """Refuse headers that are not ASCII and overlong ids.

    Such bytes mean one thing here and another in a proxy or a log, and some readers fail at them.

    Raises:
        ApiError: status 400, naming the header.
    """
    for name, value in scope["headers"]:
        if not (name.isascii() and value.isascii()):
            reason = "it is not ASCII; send ASCII characters only"
        elif name == _ID and len(value) > _MAX_ID:
            reason = f"{len(value)} characters; send at most {_MAX_ID}"
        else:
            continue
        raise ApiError(400, f"header {_shown(name)}: {reason}", code="invalid_header")


class OwnMachineMiddleware:
    """Refuses requests that a web page of somebody else made a browser on this machine send.

    A server without keys trusts whoever reaches it. A browser does, for any page: by a name of the
    page's own that leads to this machine, or across origins. The headers ``Host`` and ``Origin``,
    which a page cannot choose, tell. Raises `ApiError` 403.
    """

    def __init__(self, app: ASGIApp, allowed: Iterable[str]) -> None:
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request if it is addressed to this machine and comes from it."""
        for name, value in scope.get("headers", ()):
            if name == b"host" and not self._is_own(b"//" + value):
                raise self._refusal("Host", value, "is not this machine's")
            if name == b"origin" and not self._is_own(value):
                raise self._refusal("Origin", value, "is a page of somebody else")
        await self._app(scope, receive, send)

    def _is_own(self, url: bytes) -> bool:
        try:
            host = urlsplit(url.decode("ascii")).hostname
        except ValueError:
            return False
        return host is not None and (is_loopback(host) or host in self._allowed)

    def _refusal(self, name: str, value: bytes, reason: str) -> ApiError:
        return ApiError(
            403,
            f"header {name}: {_shown(value)!r} {reason}; address the server as localhost, add the "
            "name to allowed_hosts, or use keys",
            code="host_not_allowed",
        )


def _shown(text: bytes) -> str:
    return clipped(text.decode("ascii", "replace"), _MAX_SHOWN)
