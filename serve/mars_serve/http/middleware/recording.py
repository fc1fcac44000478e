"""Records every request and reports the record: as metrics, a log line and a trace span."""

from __future__ import annotations

import logging
import re
import uuid
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_serve.api.anthropic.errors import COUNT_PATH, is_messages, limit_headers
from mars_serve.http.middleware.admission import GENERATING
from mars_serve.http.middleware.authentication import ADMIN_PATHS, path_within
from mars_serve.http.middleware.records import Exchange, RequestRecord, outcome_of
from mars_serve.observability.ingress_telemetry import IngressTelemetry
from mars_serve.observability.log_lines import json_line, write_to_stderr

if TYPE_CHECKING:  # OpenTelemetry is loaded only if tracing is on
    from opentelemetry.trace import Span

    from mars_serve.http.middleware.tracing import RequestTracer

_log = logging.getLogger("marsray.requests")

_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# asked for again and again
_PROBES = {"/health", "/ping", "/ready", "/metrics", "/admin/dashboard/events"}
_OTHERS = {*ADMIN_PATHS, COUNT_PATH}  # below /v1, and generate nothing
_STORED = ("/v1/files", "/v1/batches", "/v1/responses/")  # so do paths that begin so
_PATH_LENGTH = 200  # longest path in the log


class RecordMiddleware:
    """Puts a record into ``request.state.record``, and counts, logs and traces ended requests.

    With ``is_id_echoed``, X-Request-Id is returned by the server around the application, as Ray
    Serve does.
    """

    def __init__(
        self,
        app: ASGIApp,
        telemetry: IngressTelemetry,
        *,
        logs: bool = True,
        tracer: RequestTracer | None = None,
        is_id_echoed: bool = False,
    ) -> None:
        self._app = app
        self._telemetry = telemetry
        self._tracer = tracer
        self._is_id_echoed = is_id_echoed
        self._logs = logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a request; its record is reported exactly once, however the request ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id, is_own = _request_id(headers.get("x-request-id"))
        adds_header = is_own or not self._is_id_echoed
        record = RequestRecord(request_id)
        exchange = Exchange(scope["method"], path_within(scope))
        scope.setdefault("state", {})["record"] = record

        async def recording_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers_out = MutableHeaders(scope=message)
                if adds_header:
                    headers_out["X-Request-Id"] = request_id
                if is_messages(exchange.path):
                    headers_out["request-id"] = request_id
                    headers_out.update(limit_headers(headers_out))
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                exchange.is_complete = True

        tracer = self._tracer
        span = tracer.begin(headers, exchange.method, exchange.path) if tracer else None
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
            self._report(record, exchange, problem, span)

    def _report(
        self,
        record: RequestRecord,
        exchange: Exchange,
        error: BaseException | None,
        span: Span | None,
    ) -> None:
        """Count, log and trace a request that has ended; ``error`` is what it raised."""
        if record.model not in self._telemetry.models:
            record.model = None  # text of the client, not the name of a model
        outcome = outcome_of(record, exchange, error)
        is_other = exchange.path in _OTHERS or exchange.path.startswith(_STORED)
        is_generating = exchange.path.startswith("/v1/") and not is_other
        if exchange.method == "POST" and is_generating and not record.queued:
            endpoint = exchange.path if exchange.path in GENERATING else "other"
            self._telemetry.count(record.model, outcome, endpoint)
            if outcome.startswith("rejected_") and exchange.status is not None:
                self._telemetry.count_rejection(record.model, exchange.status, record.error_code)
            if record.moves:
                self._telemetry.count_moves(record.model, record.moves)
            if record.lora:
                num_tokens = record.completion_tokens or 0
                self._telemetry.count_lora(record.model, record.lora, num_tokens)
        if self._logs and not (exchange.path in _PROBES and exchange.status == 200):
            level = logging.ERROR if outcome == "error" else logging.INFO
            fields = _log_fields(record, exchange, outcome, level)
            _log.log(level, json_line(fields))
        if self._tracer and span:
            self._tracer.end(span, record, exchange, outcome)


def _log_fields(
    record: RequestRecord, exchange: Exchange, outcome: str, level: int
) -> dict[str, Any]:
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


def _request_id(given: str | None) -> tuple[str, bool]:
    """Return a request's id, and whether it is a new one rather than the client's."""
    if given is not None and _ID.fullmatch(given):
        return given, False
    return uuid.uuid4().hex, True


def write_logs_to_stderr() -> None:
    """Make this process write its logs to its standard error: of requests, as JSON, and of errors.

    The owner of the process calls this once. Ray stores that stream in ``worker-*.err`` of its log
    directory and shows it to the driver; with RAY_LOG_TO_STDERR=1 it goes to the container's own.
    """
    write_to_stderr(_log, "%(message)s")
    write_to_stderr(logging.getLogger("mars_serve"))
    _log.setLevel(logging.INFO)
