"""Errors of the REST API, in OpenAI's shape. Knows no web framework."""

from __future__ import annotations

from typing import Any


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
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The response body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid_value(param: str, reason: str) -> ApiError:
    """A field whose value cannot be served: status 400; the reason holds value and remedy."""
    return ApiError(400, f"{param}: {reason}", param=param, code="invalid_value")
