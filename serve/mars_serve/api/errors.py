"""Errors of the REST API in OpenAI's shape."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from reprlib import Repr
from typing import Any

TOO_LONG = "context_length_exceeded"
"""Code of the error for a prompt that is too long, at which agents shorten the conversation."""
_MAX_MESSAGE = 1000
"""Longest error message in characters: a message may quote megabytes that the client sent."""
_MAX_SHOWN = 80
"""Longest value in characters that a message quotes."""
_RETRY_S = (1, 40, 60)
"""Least and largest number of seconds after which clients are told to come back, and the largest
with what chance adds. OpenAI's client ignores more than 60."""
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
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        """Seconds after which another attempt may succeed, as far as known; None for no header."""
        self.headers = dict(headers or {})
        """Response headers to send beside ``Retry-After``."""

    def renamed(self, names: Mapping[str, str]) -> "ApiError":
        """Return the error with the name that a client's dialect has for the field."""
        inner, message = self.param, str(self)
        if inner is None or inner not in names:
            return self
        name = names[inner]
        if "_" in inner:  # a name wherever it stands, which a plain word need not be
            message = message.replace(inner, name)
        elif message.startswith(inner):
            message = name + message.removeprefix(inner)
        return ApiError(
            self.status,
            message,
            param=name,
            code=self.code,
            retry_after_s=self.retry_after_s,
            headers=self.headers,
        )

    def body(self) -> dict[str, Any]:
        """Return the response body."""
        # A JSON string may hold half a surrogate pair, which cannot be encoded as UTF-8.
        message = clipped(str(self), _MAX_MESSAGE).encode("utf-8", "replace").decode()
        other = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": message,
                "type": _TYPES.get(self.status, other),
                "param": self.param,
                "code": self.code,
            }
        }


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Let the errors raised within name the fields as a client's dialect does."""
    try:
        yield
    except ApiError as error:
        raise error.renamed(names) from error


def retry_after(wait_s: float, draw: Callable[[], float]) -> int:
    """Return the value of ``Retry-After`` for an expected wait.

    Up to half as much again is added by chance, so that clients that were refused together do not
    come back together; ``draw`` returns a random number in [0, 1).
    """
    least, most, cap = _RETRY_S
    first = min(max(math.ceil(wait_s), least), most)
    return min(first + int(draw() * (first / 2 + 2)), cap)


def invalid_value(where: str, reason: str, *, code: str = "invalid_value") -> ApiError:
    """Return the error 400 for a field whose value cannot be served, with the remedy.

    For an item such as ``prompt[1]`` the error's ``param`` is the field.
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


class _Shortened(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxdict = 3, 8, 8
        self.maxstring = self.maxlong = _MAX_SHOWN

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        few = dict(islice(value.items(), self.maxdict + 1))  # `Repr` would sort all keys
        return super().repr_dict(few, level)


def shown(value: Any) -> str:
    """Return a value as error messages quote it; a large one takes no longer than a small one."""
    return clipped(_Shortened().repr(value), _MAX_SHOWN)


def clipped(text: str, num_characters: int) -> str:
    """Return a text, cut to ``num_characters`` and ended by an ellipsis if it is longer."""
    return text if len(text) <= num_characters else text[: num_characters - 1] + "…"
