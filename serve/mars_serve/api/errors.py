"""Errors of the REST API in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_MAX_MESSAGE = 1000
"""Longest error message in characters: a message may quote megabytes that the client sent."""
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
        """Response headers to send beside ``Retry-After``."""

    def body(self) -> dict[str, Any]:
        """Return the response body."""
        # A JSON string may hold half a surrogate pair, which cannot be encoded as UTF-8.
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


def invalid_value(where: str, reason: str, *, code: str = "invalid_value") -> ApiError:
    """Return the error 400 for a field whose value cannot be served.

    Args:
        where: the field, or an item of it such as ``prompt[1]``; the error's ``param`` is the
            field.
        reason: the value and its remedy.
        code: the error's ``code``.
    """
    param = where.partition("[")[0]
    return ApiError(400, f"{where}: {reason}", param=param, code=code)


def unsupported_value(param: str, reason: str) -> ApiError:
    """Return the error 400 for a valid value that this model or server does not support."""
    return invalid_value(param, reason, code="unsupported_value")


def check_token_ids(where: str, ids: Collection[int], vocabulary: int) -> None:
    """Refuse token ids that a model with ``vocabulary`` tokens does not know.

    Raises:
        ApiError: status 400, naming the largest id.
    """
    largest = max(ids, default=0)
    if largest >= vocabulary:
        reason = f"token id {largest} is not below {vocabulary}; use ids of the model's tokens"
        raise invalid_value(where, reason)


def clipped(text: str, num_characters: int) -> str:
    """Return a text, cut to ``num_characters`` and ended by an ellipsis if it is longer."""
    return text if len(text) <= num_characters else text[: num_characters - 1] + "…"
