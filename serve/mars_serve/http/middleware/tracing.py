"""OpenTelemetry spans of requests, with the attributes of its conventions for generative AI.

The standard OTEL_ variables choose the destination. Spans contain no text of requests.
"""

from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mars_platform.errors import UserError
from mars_serve.http.middleware.records import Exchange, RequestRecord

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}


class RequestTracer:
    """Makes a server span for each request, a child of the client's span if it sent one."""

    def __init__(self, processor: SpanProcessor) -> None:
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "marsray"}))
        # a private provider: the global one belongs to whoever runs the process
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("marsray")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, headers: Mapping[str, str], method: str, path: str) -> Span:
        """Start the span of a request."""
        parent = self._propagator.extract(headers)
        operation = _OPERATIONS.get(path)
        attributes = {"http.request.method": method, "url.path": path}
        if operation:
            attributes["gen_ai.operation.name"] = operation
        # an unknown path is the client's text, but span names must be few
        name = f"{method} {path}" if operation else method
        return self._tracer.start_span(
            name, context=parent, kind=SpanKind.SERVER, attributes=attributes
        )

    def end(self, span: Span, record: RequestRecord, exchange: Exchange, outcome: str) -> None:
        """End the span of a request."""
        attributes = _attributes(record, exchange, outcome)
        span.set_attributes({key: each for key, each in attributes.items() if each is not None})
        if outcome == "error":
            span.set_status(StatusCode.ERROR, record.error_code)
        span.end()

    def close(self) -> None:
        """Send all spans that were not sent yet."""
        self._provider.shutdown()


def _attributes(record: RequestRecord, exchange: Exchange, outcome: str) -> dict[str, Any]:
    reason = record.finish_reason
    return {
        "http.response.status_code": exchange.status,
        "error.type": record.error_code,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": [reason] if reason else None,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "marsray.request_id": record.request_id,
        "marsray.key": record.key,
        "marsray.outcome": outcome,
        "marsray.stream": record.stream,
        "marsray.mode": record.mode,
        "marsray.confidence_threshold": record.threshold_mean,
        "marsray.min_confidence_threshold": record.threshold_min,
        "marsray.forward_passes": record.forward_passes,
        "marsray.queue_s": record.queue_s,
        "marsray.time_to_first_token_s": record.ttft_s,
    }


def tracer_from_environment() -> RequestTracer:
    """Return a tracer that sends spans to the destination in the OTEL_EXPORTER_OTLP_ variables.

    Raises:
        UserError: OpenTelemetry's packages are not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise UserError(
            f"telemetry.tracing: {error.name} is not installed; "
            "run pip install 'marsray[tracing]', or leave tracing off"
        ) from error
    return RequestTracer(BatchSpanProcessor(OTLPSpanExporter()))
