"""Errors and rate limits in Anthropic's shape.

Source: Anthropic API reference, "Errors" and "Rate limits".
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import Any

from mars_serve.api.errors import TOO_LONG, ApiError

PATH = "/v1/messages"
"""Path at which, and below which, clients speak the Messages API."""
COUNT_PATH = f"{PATH}/count_tokens"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_messages(path: str) -> bool:
    """Return whether requests for a path are answered in Anthropic's shapes."""
    return path == PATH or path.startswith(f"{PATH}/")


def error_body(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """Return the body of an error's response, or the content of a stream's event."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    message = error.body()["error"]["message"]
    if error.code == TOO_LONG:
        message = f"prompt is too long: {message}"  # Claude Code then shortens the conversation
    detail: dict[str, Any] = {"type": _TYPES.get(error.status, other), "message": message}
    if error.param == "thread":  # the client's tool runner then sends all messages itself
        detail["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    body = {"type": "error", "error": detail}
    return body if request_id is None else {**body, "request_id": request_id}


def limit_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return Anthropic's rate limit headers that say what OpenAI's among some headers say."""
    found = dict[str, str]()
    for name, value in headers.items():
        if name.startswith("x-ratelimit-"):
            part, _, kind = name.removeprefix("x-ratelimit-").partition("-")
            if part == "reset":
                at = datetime.now(UTC) + timedelta(seconds=ceil(float(value.removesuffix("s"))))
                value = at.isoformat(timespec="seconds").replace("+00:00", "Z")
            found[f"anthropic-ratelimit-{kind}-{part}"] = value
    return found
