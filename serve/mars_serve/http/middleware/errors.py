"""Turns exceptions, those of Ray included, into error responses in the shape of their path."""

import logging
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from ray.exceptions import RayError, RayTaskError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_platform.errors import UserError
from mars_serve.api.anthropic.errors import error_body, is_messages
from mars_serve.api.errors import ApiError, clipped, invalid_value, retry_after, shown
from mars_serve.api.limits import queue_full
from mars_serve.engine.ipc.client import (
    DeadlineMissed,
    EngineDied,
    QueueFull,
    QueueTimeout,
    RequestFailed,
)
from mars_serve.http.middleware.authentication import path_within

_UNKNOWN_S = 1.0
"""Wait in seconds that a refusal names where nothing is known."""
_GRAMMAR = "grammar"  # the engine's name for the field that gives a grammar
_BODY_NOT_PARSED = (400, "There was an error parsing the body")  # FastAPI's: not UTF-8
_CODES = {404: "not_found", 405: "method_not_allowed"}
_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
_MAX_PATH = 80  # longest path that a message quotes
_MAX_NAME = 64  # longest field name that a message quotes; a client may choose the name

_log = logging.getLogger(__name__)


def as_api_error(
    error: Exception, grammar_field: str | None = None, wait_s: float = _UNKNOWN_S
) -> ApiError:
    """Return the API error for an exception of a backend.

    An unexpected exception is logged, and the response reveals nothing about it. The engine's word
    for a grammar gives way to the request's field, and ``wait_s`` is how long the queue takes.
    """
    if isinstance(error, ApiError):
        return error
    cause = cause_of(error)
    if isinstance(cause, UserError):
        return _refused(cause, grammar_field)
    if isinstance(cause, RequestFailed):
        return ApiError(500, "the model failed on this request", code="request_failed")
    unavailable = _unavailable(cause, wait_s)
    if unavailable is not None:
        return unavailable
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has more", code="internal_error")


def cause_of(error: Exception) -> BaseException:
    """Return the exception raised in the process where Ray ran the call."""
    cause: BaseException = error
    while isinstance(cause, RayTaskError) and isinstance(cause.cause, BaseException):
        cause = cause.cause
    return cause


def _unavailable(error: BaseException, wait_s: float) -> ApiError | None:
    """Return the API error for one that a later retry may not meet, else None."""
    # Imported late: Ray Serve reads its environment at import, and the command sets that first.
    from ray.serve.exceptions import BackPressureError, RayServeException

    if isinstance(error, DeadlineMissed):
        message = f"deadline_ms: {error}; raise it, or try again later"
        retry_s = wait_s if error.wait_s is None else error.wait_s
        return ApiError(503, message, code="deadline", param="deadline_ms", retry_after_s=retry_s)
    if isinstance(error, QueueFull):
        return queue_full(wait_s if error.wait_s is None else error.wait_s)
    if isinstance(error, BackPressureError):
        return queue_full(wait_s)
    if isinstance(error, QueueTimeout):
        message = "the request waited too long in the queue; try again shortly"
        return ApiError(503, message, code="queue_timeout", retry_after_s=wait_s)
    if isinstance(error, EngineDied):
        return _not_ready("the replica has failed; try again shortly")
    # Ray's own errors: there is no replica, or the chosen one is gone.
    if isinstance(error, RayError | RayServeException) and not isinstance(error, RayTaskError):
        return _not_ready("no replica can serve this now; try again shortly")
    return None


def _not_ready(message: str) -> ApiError:
    return ApiError(503, message, code="not_ready", retry_after_s=_UNKNOWN_S)


def _refused(error: UserError, grammar_field: str | None) -> ApiError:
    """Return the error for a request that the engine refused.

    The engine's message begins with a field; its name for a grammar is replaced by the request's.
    """
    message = str(error)
    param, separator, reason = message.partition(": ")
    if not (separator and param.isidentifier()):
        return ApiError(400, message, code="invalid_value")
    if param == _GRAMMAR and grammar_field is not None:
        param = grammar_field
    return invalid_value(param, reason)


def _respond(scope: Scope, error: ApiError, draw: Callable[[], float]) -> JSONResponse:
    """Return an error as a response in the shape of its path; ``draw`` draws from [0, 1)."""
    record = scope.get("state", {}).get("record")
    if record is not None:
        record.error_code = error.code
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(retry_after(error.retry_after_s, draw))
    body = error.body()
    if is_messages(path_within(scope)):
        body = error_body(error, record and record.request_id)
    return JSONResponse(body, status_code=error.status, headers=headers)


class ErrorMiddleware:
    """Answers with an error response to any exception raised before the response began.

    FastAPI's handlers only see errors of endpoints; this middleware also covers the errors of the
    middleware within it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._draw = Random().random

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request, and answer if it raises."""
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if has_begun or scope["type"] != "http":
                raise
            await _respond(scope, as_api_error(error), self._draw)(scope, receive, send)


def add_error_handlers(app: FastAPI, draw: Callable[[], float]) -> None:
    """Report every error of an application's endpoints in the shape of its path."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return _respond(request.scope, error, draw)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return _respond(request.scope, _describe(error), draw)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return _respond(request.scope, _of_framework(app, request, error), draw)


def _of_framework(app: FastAPI, request: Request, error: HTTPException) -> ApiError:
    if (error.status_code, error.detail) == _BODY_NOT_PARSED:
        return _unparsable(error.detail)
    status, headers = error.status_code, dict(error.headers or {})
    if status == 405:
        headers["Allow"] = ", ".join(_methods_of(app, request))
    path = clipped(request.url.path, _MAX_PATH)
    message = f"{request.method} {path}: {error.detail}"
    return ApiError(status, message, code=_CODES.get(status), headers=headers)


def _methods_of(app: FastAPI, request: Request) -> list[str]:
    """Return the methods that a path accepts; the framework names only those of its first route."""
    scopes = {method: {**request.scope, "method": method} for method in _METHODS}
    return [
        method
        for method, scope in scopes.items()
        if any(route.matches(scope)[0] is Match.FULL for route in app.routes)
    ]


def _unparsable(reason: str) -> ApiError:
    return ApiError(422, f"body: not a valid JSON object ({reason})", code="unparsable")


def _describe(error: RequestValidationError) -> ApiError:
    """Return the error for a request's first problem: 422 if it cannot be parsed, else 400."""
    first = error.errors()[0]
    where = first["loc"][1:]  # behind "body" or "query"
    if first["type"] == "json_invalid" or not where:
        return _unparsable(first["msg"])
    is_missing = first["type"] == "missing"
    path = _path_in(error.body, where, is_missing=is_missing)
    names = [clipped(str(part), _MAX_NAME) for part in path]
    param = ".".join(names)
    message = f"{param}: {first['msg']}"
    if not is_missing:
        message += f" (got {shown(first['input'])})"
    return ApiError(400, message, param=names[0], code="invalid_value")


def _path_in(body: Any, where: Sequence[str | int], *, is_missing: bool) -> list[str | int]:
    """Return an error's path without the tags of unions, which the body has not."""
    path, value = list[str | int](), body
    for position, part in enumerate(where, start=1):
        is_absent = is_missing and position == len(where)
        if isinstance(value, dict) and (part in value or is_absent):
            path, value = [*path, part], value.get(part)
        elif isinstance(value, list) and isinstance(part, int):
            path, value = [*path, part], value[part]
    return path or [where[0]]
