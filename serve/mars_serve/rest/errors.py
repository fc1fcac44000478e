"""Turns what goes wrong into OpenAI's error responses. Knows no endpoint."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from mars_platform.errors import UserError
from mars_serve.engine.loop import EngineDied, QueueFull, RequestFailed
from mars_serve.errors import ApiError

RETRY_AFTER_S = 1
_GRAMMAR = "grammar"  # how the engine calls the field that asks for a structure
_BODY_NOT_PARSED = (400, "There was an error parsing the body")  # FastAPI's, for bad encodings


def as_api_error(error: Exception, grammar_field: str | None = None) -> ApiError:
    """What a backend raised, as an error of the API."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return _refused(error, grammar_field)
    if isinstance(error, QueueFull):
        return ApiError(
            503,
            "the queue is full; try again shortly",
            code="queue_full",
            retry_after_s=RETRY_AFTER_S,
        )
    if isinstance(error, EngineDied):
        return ApiError(
            503, "the replica has failed", code="not_ready", retry_after_s=RETRY_AFTER_S
        )
    if isinstance(error, RequestFailed):
        return ApiError(500, "the model failed on this request", code="request_failed")
    return ApiError(500, f"internal error ({type(error).__name__})", code="internal_error")


def _refused(error: UserError, grammar_field: str | None) -> ApiError:
    """What the engine refuses; the field that its message begins with is the request's own."""
    message = str(error.args[0])  # Ray's str() of an error is the remote traceback
    param, _, reason = message.partition(":")
    if param == _GRAMMAR and grammar_field is not None:
        param = grammar_field
    return ApiError(400, f"{param}:{reason}", param=param, code="invalid_value")


def error_response(error: ApiError) -> JSONResponse:
    """An error as a response."""
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else None
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


def add_error_handlers(app: FastAPI) -> None:
    """Report every error of an application in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(_describe(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == _BODY_NOT_PARSED[0] and error.detail == _BODY_NOT_PARSED[1]:
            return error_response(_unparsable(error.detail))
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = error_response(ApiError(error.status_code, message))
        response.headers.update(error.headers or {})
        return response


def _unparsable(reason: str) -> ApiError:
    return ApiError(422, f"body: not a valid JSON object ({reason})", code="unparsable")


def _describe(error: RequestValidationError) -> ApiError:
    """The first problem of a request body: 422 if it cannot be parsed, else 400."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid" or not where:
        return _unparsable(first["msg"])
    param = ".".join(part for part in where if part.replace("_", "").isalnum())
    message = f"{param}: {first['msg']}"
    if first["type"] != "missing":
        message += f" (got {str(first['input'])[:80]!r})"
    return ApiError(400, message, param=where[0], code="invalid_value")
