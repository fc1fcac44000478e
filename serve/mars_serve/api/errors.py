"""Errors of the REST API, in OpenAI's shape. Knows no web framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MAX_MESSAGE = 1000
"""Characters of a message: some quote what the client sent, which may be megabytes."""
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error that a response reports in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})
        """Of the response, beside ``Retry-After``."""

    def body(self) -> dict[str, Any]:
        """The response body."""
        # A string of JSON may hold half of a surrogate pair, which no response can be written with.
        message = str(self).encode("utf-8", "replace").decode()
        other = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": clipped(message, _MAX_MESSAGE),
                "type": _TYPES.get(self.status, other),
                "param": self.param,
                "code": self.code,
            }
        }


def invalid_value(param: str, reason: str) -> ApiError:
    """A field whose value cannot be served: status 400; the reason holds value and remedy."""
    return ApiError(400, f"{param}: {reason}", param=param, code="invalid_value")


def clipped(text: str, num_characters: int) -> str:
    """A text that may be long, for a message."""
    return text if len(text) <= num_characters else text[: num_characters - 1] + "…"
