"""The record of a request: who sent it, how it was served and how it ended.

Endpoints fill in the fields that they learn; `recording` adds the rest and reports the record. A
record contains neither text of the request nor its key, but for names of fields.
"""

import re
import time
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.requests import ClientDisconnect

_DISCONNECTED = (CancelledError, ClientDisconnect, OSError)
"""Exceptions raised by sending to a client that has disconnected."""
_HEADER = "X-Marsray-Unknown-Fields"
_MAX_SHOWN = 16
"""Most names in a response's header."""
_MAX_LENGTH = 64
"""Most characters of a name."""
_MAX_RECORDED = 64
"""Most names that records get within `_EVERY_S`; clients could make up any number of them."""
_EVERY_S = 60.0
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass
class RequestRecord:
    """Facts about one request; a fact is None if it does not apply or never became known."""

    request_id: str
    """The client's X-Request-Id, or a new id; the response returns it."""
    key: str | None = None
    model: str | None = None
    lora: str | None = None
    """Name of the LoRA adapter that acts on the model."""
    stream: bool | None = None
    queued: bool | None = None
    """Whether it is answered later, in the background, by a request with a record of its own."""
    mode: str | None = None
    threshold_mean: float | None = None
    """Mean τ over the forward passes."""
    threshold_min: float | None = None
    """Lowest τ of the forward passes."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Number of prompt tokens found in the KV cache."""
    completion_tokens: int | None = None
    forward_passes: int | None = None
    queue_s: float | None = None
    """Seconds before the first forward pass."""
    ttft_s: float | None = None
    """Seconds from arrival at the ingress to the first tokens."""
    moves: int | None = None
    """Times that an output was sent to another replica, because one died or did not answer."""
    finish_reason: str | None = None
    error_code: str | None = None
    """Code of the reported error, also if a stream had begun before it."""
    unknown_fields: list[str] | None = None
    """Names of fields that the server does not know, each in one record a minute."""


@dataclass
class Exchange:
    """An HTTP request and the state of its response."""

    method: str
    path: str
    status: int | None = None
    """Status of the response; None if none began."""
    is_complete: bool = False
    """Whether the response's last byte was sent."""
    duration_s: float = 0


def outcome_of(record: RequestRecord, exchange: Exchange, error: BaseException | None) -> str:
    """Return how a request ended: the label ``outcome`` of ``marsray_requests_total``."""
    if not exchange.is_complete:
        was_cancelled = error is None or isinstance(error, _DISCONNECTED)
        return "cancelled" if was_cancelled else "error"
    assert exchange.status is not None
    if exchange.status == 500 or (exchange.status < 400 and record.error_code):
        return "error"
    if exchange.status >= 400:
        return f"rejected_{exchange.status}"
    return record.finish_reason or "ok"


class UnknownFields:
    """Names unknown fields: in each response, and once a minute for each name in a record."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recorded = dict[str, float]()
        """Time at which each name was last recorded, the oldest first."""

    def report(self, names: Sequence[str], record: RequestRecord) -> dict[str, str]:
        """Return the header that names the unknown fields of a request, and complete its record.

        Names are a client's text, so letters that could end a header or a line are replaced.
        """
        if not names:
            return {}
        safe = [_UNSAFE.sub("?", name[:_MAX_LENGTH]) for name in names[:_MAX_SHOWN]]
        record.unknown_fields = [name for name in safe if self._is_due(name)] or None
        more = ["..."] if len(names) > _MAX_SHOWN else []
        return {_HEADER: ", ".join([*safe, *more])}

    def _is_due(self, name: str) -> bool:
        now = self._clock()
        while self._recorded and now - next(iter(self._recorded.values())) >= _EVERY_S:
            del self._recorded[next(iter(self._recorded))]
        if name in self._recorded or len(self._recorded) >= _MAX_RECORDED:
            return False
        self._recorded[name] = now
        return True
