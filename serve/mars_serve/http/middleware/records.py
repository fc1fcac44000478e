"""One record a request: its id, how it ended, a line in the log. Never its text, never a key.

Handlers fill the record's fields, as far as they get; the middleware adds the rest.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import uuid
from asyncio import CancelledError
from dataclasses import dataclass
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_serve.http.middleware.authentication import path_within
from mars_serve.observability.telemetry import IngressTelemetry

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from mars_serve.http.middleware.tracing import RequestTracer

_log = logging.getLogger("marsray.requests")

_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_PROBES = {"/health", "/ready", "/metrics"}
_PATH_LENGTH = 200  # more of a path is not worth its place in the log
_LEFT = (CancelledError, ClientDisconnect, OSError)  # what sending to a client that left raises


@dataclass
class RequestRecord:
    """What is known of a request when it ends; None where it does not apply or never got known."""

    request_id: str
    """The client's X-Request-Id, else a new one; the response carries it."""
    key: str | None = None
    """Name of the API key, not the key."""
    model: str | None = None
    """As the request gave it."""
    stream: bool | None = None
    mode: str | None = None
    threshold_mean: float | None = None
    """τ, over the passes."""
    threshold_min: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that were found stored."""
    completion_tokens: int | None = None
    forward_passes: int | None = None
    queue_s: float | None = None
    """Seconds before the first forward pass."""
    ttft_s: float | None = None
    """Seconds from arrival at the ingress to the first tokens."""
    finish_reason: str | None = None
    error_code: str | None = None
    """Of an error in OpenAI's shape, in a stream that had begun too."""


@dataclass
class Exchange:
    """An HTTP request and its response, as far as it went."""

    method: str
    path: str
    status: int | None = None
    """None where no response began."""
    is_complete: bool = False
    """Whether the response's last byte was sent."""
    duration_s: float = 0


def outcome_of(record: RequestRecord, exchange: Exchange, error: BaseException | None) -> str:
    """One word for how a request ended, the label ``outcome`` of ``marsray_requests_total``."""
    if not exchange.is_complete:
        has_left = error is None or isinstance(error, _LEFT)
        return "cancelled" if has_left else "error"
    assert exchange.status is not None
    if exchange.status == 500 or (exchange.status < 400 and record.error_code):
        return "error"
    if exchange.status >= 400:
        return f"rejected_{exchange.status}"
    return record.finish_reason or "ok"


class Recorder:
    """Takes records that are complete: counts, logs and traces them.

    Args:
        telemetry: Where requests are counted.
        logs: Whether each is logged.
        tracer: Where spans go; None for none.
        is_id_echoed: Whether the server around the application returns X-Request-Id itself, as
            Ray Serve does.
    """

    def __init__(
        self,
        telemetry: IngressTelemetry,
        *,
        logs: bool = True,
        tracer: RequestTracer | None = None,
        is_id_echoed: bool = False,
    ) -> None:
        self._telemetry = telemetry
        self._tracer = tracer
        self.is_id_echoed = is_id_echoed
        self._logs = logs

    def begin(self, headers: Headers, exchange: Exchange) -> Span | None:
        """Start a request's span, where there are any."""
        tracer = self._tracer
        return tracer.begin(headers, exchange.method, exchange.path) if tracer else None

    def end(
        self,
        record: RequestRecord,
        exchange: Exchange,
        error: BaseException | None,
        span: Span | None,
    ) -> None:
        """Count, log and trace a request that has ended, ``error`` being what it raised."""
        if record.model not in self._telemetry.models:
            record.model = None  # a client's text, not a name
        outcome = outcome_of(record, exchange, error)
        if exchange.method == "POST" and exchange.path.startswith("/v1/"):
            self._telemetry.count(record.model, outcome)
            if outcome.startswith("rejected_") and exchange.status is not None:
                self._telemetry.count_rejection(record.model, exchange.status, record.error_code)
        if self._logs and not (exchange.path in _PROBES and exchange.status == 200):
            level = logging.ERROR if outcome == "error" else logging.INFO
            fields = _fields(record, exchange, outcome, level)
            _log.log(level, json.dumps(fields, ensure_ascii=False))
        if self._tracer and span:
            self._tracer.end(span, record, exchange, outcome)


def _fields(record: RequestRecord, exchange: Exchange, outcome: str, level: int) -> dict[str, Any]:
    fields = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "level": logging.getLevelName(level),
        "method": exchange.method,
        "path": exchange.path[:_PATH_LENGTH],
        "status": exchange.status,
        "outcome": outcome,
        **vars(record),
        "duration_s": exchange.duration_s,
    }
    rounded = ((k, round(v, 6) if isinstance(v, float) else v) for k, v in fields.items())
    return {key: value for key, value in rounded if value is not None}


class RecordMiddleware:
    """Makes a record at ``request.state.record`` and hands it over when the request has ended."""

    def __init__(self, app: ASGIApp, recorder: Recorder) -> None:
        self._app = app
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a request; its record is handed over once, whatever happens to it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id, is_own = _request_id(headers.get("x-request-id"))
        adds_header = is_own or not self._recorder.is_id_echoed
        record = RequestRecord(request_id)
        exchange = Exchange(scope["method"], path_within(scope))
        scope.setdefault("state", {})["record"] = record

        async def recording_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                if adds_header:
                    MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                exchange.is_complete = True

        span = self._recorder.begin(headers, exchange)
        start = perf_counter()
        problem: BaseException | None = None
        try:
            await self._app(scope, receive, recording_send)
        except BaseException as error:
            problem = error
            raise
        finally:
            exchange.duration_s = perf_counter() - start
            record.key = record.key or getattr(scope["state"].get("caller"), "name", None) or None
            self._recorder.end(record, exchange, problem, span)


def _request_id(given: str | None) -> tuple[str, bool]:
    """The id of a request, and whether it is a new one."""
    if given is not None and _ID.fullmatch(given):
        return given, False
    return uuid.uuid4().hex, True


def write_records_to_stderr() -> None:
    """Let this process write the log of requests to its standard error, a JSON object a line.

    Called once, by whoever owns the process. Ray keeps that stream in ``worker-*.err`` of its log
    directory and shows it to the driver; with RAY_LOG_TO_STDERR=1 it is the container's own.
    """
    # not sys.stderr: Ray Serve may have put its own log there, which adds a prefix to each line
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(logging.Formatter("%(message)s"))
    _log.handlers = [handler]
    _log.setLevel(logging.INFO)
    _log.propagate = False
