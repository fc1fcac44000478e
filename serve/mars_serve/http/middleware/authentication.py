"""Lets a request in by its key, before anything else of it is looked at.

Every path needs a key but those listed here. Knows no endpoint and reads no body.
"""

from __future__ import annotations

import posixpath
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from mars_serve.api.errors import ApiError
from mars_serve.api.keys import Caller, KeyRing

PUBLIC_PATHS = frozenset({"/health", "/ready", "/version", "/openapi.json"})
_ADMIN = "admin"
_POLICY_VIOLATION = 1008  # of the websocket protocol


class KeyMiddleware:
    """Puts the `Caller` into the request's state, or refuses the request.

    Raises `ApiError`: 401 without a valid key, 403 for what the key does not allow. On a server
    without keys everybody is the same caller, an admin if ``open_admin`` says so.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, *, open_admin: bool) -> None:
        self._app = app
        self._keys = keys
        self._anyone = Caller("", is_admin=open_admin and keys.is_open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] == "websocket":  # there is no such endpoint, and none may come unguarded
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        if scope["type"] == "http":
            caller = await self._authenticate(scope)
            scope.setdefault("state", {})["caller"] = caller
            if _is_admin_path(scope) and not caller.is_admin:
                raise self._not_admin()
        await self._app(scope, receive, send)

    async def _authenticate(self, scope: Scope) -> Caller:
        if self._keys.is_open or _is_public(scope):
            return self._anyone
        await self._keys.refresh()
        key = _bearer_key(scope)
        caller = self._keys.find(key) if key else None
        if caller is None:
            problem = "this key is not known here" if key else "no key was given"
            raise ApiError(
                401,
                f"{problem}; send the header 'Authorization: Bearer KEY' with a key of this server",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return caller

    def _not_admin(self) -> ApiError:
        remedy = (
            "start the server with a key that has admin: true"
            if self._keys.is_open
            else "use a key that has admin: true"
        )
        message = f"/admin: this caller is no administrator; {remedy}"
        return ApiError(403, message, code="not_allowed")


def _bearer_key(scope: Scope) -> bytes | None:
    """The key that a request gives; two are none, since others may have read the other one."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1:
        return None
    scheme, _, key = given[0].strip().partition(b" ")
    return key.strip() or None if scheme.lower() == b"bearer" else None


def _is_public(scope: Scope) -> bool:
    """As the router would see it, letter for letter: what differs from it needs a key."""
    return scope["method"] in ("GET", "HEAD") and path_within(scope) in PUBLIC_PATHS


def _is_admin_path(scope: Scope) -> bool:
    """Generous, so that no spelling of an admin path that a router or proxy may know is missed."""
    path = posixpath.normpath("/" + unquote(path_within(scope)).replace("\\", "/").lstrip("/"))
    return path.lower().split("/")[1] == _ADMIN


def path_within(scope: Scope) -> str:
    """The path of a request, below where the application is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if path.startswith(root + "/") else path
