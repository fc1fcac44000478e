"""Authenticates every request by its API key, before its body is read.

Every path except `PUBLIC_PATHS` needs a key. Of these, ``/ready`` tells more to an administrator's,
and the files of the pages hold nothing of the server's own.
"""

import posixpath
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from mars_serve.api.anthropic.errors import is_messages
from mars_serve.api.errors import ApiError
from mars_serve.api.keys import Caller, KeyRing
from mars_serve.http.page_files import page_files

PUBLIC_PATHS = frozenset({"/health", "/ping", "/ready", *page_files()})
LOAD_LORA, UNLOAD_LORA = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADMIN_PATHS = frozenset({LOAD_LORA, UNLOAD_LORA})
"""Paths that are for administrators, beside those below ``/admin``."""
_ADMIN = "admin"
_POLICY_VIOLATION = 1008  # status code of the websocket protocol


class KeyMiddleware:
    """Stores the request's `Caller` in its state, or refuses the request.

    Raises `ApiError`: 401 without a valid key, 403 if the key does not allow the path. On a server
    without keys all requests have the same caller, `KeyRing.anyone`. A caller in the state already
    stands: the server itself has put it there, for a request that it makes in a client's name.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request if its key allows the path."""
        if scope["type"] == "websocket":  # no endpoint uses websockets
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        if scope["type"] == "http":
            state = scope.setdefault("state", {})
            caller = state["caller"] = state.get("caller") or await self._authenticate(scope)
            if _is_admin_path(scope) and not caller.is_admin:
                remedy = "start the server with" if self._keys.is_open else "use"
                reason = f"this caller is no administrator; {remedy} a key that has admin: true"
                raise ApiError(403, reason, code="not_allowed")
        await self._app(scope, receive, send)

    async def _authenticate(self, scope: Scope) -> Caller:
        if self._keys.is_open:
            return self._keys.anyone
        await self._keys.refresh()
        key = _given_key(scope)
        caller = self._keys.find(key) if key else None
        if caller is None and _is_public(scope):
            return self._keys.anyone
        if caller is None:
            problem = "the key is unknown" if key else "there is no key"
            raise ApiError(
                401,
                f"{problem}; send the header 'Authorization: Bearer KEY' with a key of this server",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return caller


def _given_key(scope: Scope) -> bytes | None:
    """Return the key that a request gives.

    Of several headers none counts, since a proxy may have checked another one than this server;
    only Anthropic's client may give its key in two that agree.
    """
    given = [_bearer_key(value) for name, value in scope["headers"] if name == b"authorization"]
    if is_messages(path_within(scope)):
        own = [value.strip() for name, value in scope["headers"] if name == b"x-api-key"]
        given = given if given == own else given + own
    return given[0] or None if len(given) == 1 else None


def _bearer_key(value: bytes) -> bytes | None:
    scheme, _, key = value.strip().partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None


def _is_public(scope: Scope) -> bool:
    """Return whether a path is public as the router reads it; any other spelling needs a key."""
    return scope["method"] in ("GET", "HEAD") and path_within(scope) in PUBLIC_PATHS


def _is_admin_path(scope: Scope) -> bool:
    """Return whether any router or proxy could read the path as one for administrators."""
    path = posixpath.normpath("/" + unquote(path_within(scope)).replace("\\", "/").lstrip("/"))
    return path.lower() in ADMIN_PATHS or path.lower().split("/")[1] == _ADMIN


def path_within(scope: Scope) -> str:
    """Return the request's path relative to where the application is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if path.startswith(root + "/") else path
