from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.types import Message

from local_loop import LocalLoop
from mars_platform.errors import UserError
from mars_serve.config.served import Backend, ServedModel
from mars_serve.engine.ipc.loop import RequestFailed
from mars_serve.http.middleware.errors import ErrorMiddleware
from mars_serve.http.middleware.recording import (
    Recorder,
    RecordMiddleware,
    write_records_to_stderr,
)
from mars_serve.http.middleware.tracing import RequestTracer, tracer_from_environment
from mars_serve.observability.telemetry import IngressTelemetry

Lines = Callable[[], list[dict[str, Any]]]
BODY = {"model": "mars", "prompt": "What is 3 plus 4?", "max_tokens": 5, "mode": "ar"}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    """The lines of the log of requests so far."""
    with caplog.at_level(logging.INFO, "marsray.requests"):
        yield lambda: [
            json.loads(record.message)
            for record in caplog.records
            if record.name == "marsray.requests"
        ]


@pytest.fixture
def telemetry() -> IngressTelemetry:
    return IngressTelemetry(["mars"])


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


async def generate(request: Request) -> StreamingResponse:
    record = request.state.record
    record.model, record.prompt_tokens, record.completion_tokens = "mars", 7, 0

    async def events() -> AsyncIterator[str]:
        for _ in range(3):
            record.completion_tokens += 2
            yield "data: {}\n\n"
            await asyncio.sleep(0.001)
        record.finish_reason = "stop"

    return StreamingResponse(events(), media_type="text/event-stream")


async def break_off() -> StreamingResponse:
    async def events() -> AsyncIterator[str]:
        yield "data: {}\n\n"
        raise RuntimeError("secret detail")

    return StreamingResponse(events(), media_type="text/event-stream")


async def fail(request: Request) -> None:
    request.state.record.model = "secret name"
    raise RuntimeError("secret detail")


async def dawdle() -> None:
    await asyncio.sleep(60)


@pytest.fixture
def own(telemetry: IngressTelemetry, spans: InMemorySpanExporter) -> FastAPI:
    """An application with an endpoint for each way to end."""
    app = FastAPI()
    app.post("/v1/completions")(generate)
    app.post("/v1/broken", response_model=None)(break_off)
    app.post("/v1/failed")(fail)
    app.post("/v1/slow")(dawdle)
    app.add_middleware(ErrorMiddleware)
    recorder = Recorder(telemetry, tracer=RequestTracer(SimpleSpanProcessor(spans)))
    app.add_middleware(RecordMiddleware, recorder=recorder)
    return app


def counted(telemetry: IngressTelemetry) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(telemetry.exposition())
    return {
        (sample.labels["model"], sample.labels["outcome"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name == "marsray_requests_total"
    }


async def call(
    app: FastAPI, path: str, leave_after: int | None = None, **headers: str
) -> list[Message]:
    """What an application sends; its client leaves after so many messages."""
    sent: list[Message] = []
    has_left = asyncio.Event()
    messages = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> Message:
        for message in messages:
            return message
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if has_left.is_set():
            raise OSError("the client has left")
        sent.append(message)
        if len(sent) == leave_after:
            has_left.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (name.replace("_", "-").encode(), each.encode()) for name, each in headers.items()
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await app(scope, receive, send)
    return sent


def header(message: Message, name: str) -> list[str]:
    return [each.decode() for key, each in message["headers"] if key.decode().lower() == name]


async def test_a_request_that_ends_well(
    own: FastAPI, lines: Lines, telemetry: IngressTelemetry
) -> None:
    start, *_ = await call(own, "/v1/completions", x_request_id="abc-1")
    (line,) = lines()
    took = datetime.now(UTC) - datetime.fromisoformat(line.pop("time"))
    assert timedelta() <= took < timedelta(minutes=1)
    assert line.pop("duration_s") > 0.002
    assert line == {
        "level": "INFO",
        "request_id": "abc-1",
        "method": "POST",
        "path": "/v1/completions",
        "model": "mars",
        "status": 200,
        "outcome": "stop",
        "finish_reason": "stop",
        "prompt_tokens": 7,
        "completion_tokens": 6,
    }
    assert header(start, "x-request-id") == ["abc-1"]
    assert counted(telemetry) == {("mars", "stop"): 1}


async def test_a_client_that_leaves_a_stream(
    own: FastAPI, lines: Lines, telemetry: IngressTelemetry
) -> None:
    with suppress(Exception):
        await call(own, "/v1/completions", leave_after=2)
    (line,) = lines()
    assert (line["outcome"], line["level"], line["status"]) == ("cancelled", "INFO", 200)
    assert 2 <= line["completion_tokens"] < 6
    assert counted(telemetry) == {("mars", "cancelled"): 1}


async def test_a_request_whose_task_is_cancelled(
    own: FastAPI, lines: Lines, telemetry: IngressTelemetry
) -> None:
    task = asyncio.create_task(call(own, "/v1/slow"))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (line,) = lines()
    assert line["outcome"] == "cancelled"
    assert "status" not in line
    assert counted(telemetry) == {("", "cancelled"): 1}


@pytest.mark.parametrize("path", ["/v1/failed", "/v1/broken"])
async def test_a_handler_that_raises(
    own: FastAPI, lines: Lines, telemetry: IngressTelemetry, path: str
) -> None:
    with suppress(RuntimeError):  # where the stream had begun
        start, *_ = await call(own, path)
        assert header(start, "x-request-id") == [lines()[0]["request_id"]]
    (line,) = lines()
    assert (line["outcome"], line["level"]) == ("error", "ERROR")
    assert "secret" not in str(line)
    assert counted(telemetry) == {("", "error"): 1}


@pytest.mark.parametrize("path", ["/v1/unknown", "/other"])
async def test_what_is_refused_is_counted_where_requests_are_generated(
    own: FastAPI, lines: Lines, telemetry: IngressTelemetry, path: str
) -> None:
    await call(own, path)
    assert lines()[0]["outcome"] == "rejected_404"
    assert counted(telemetry) == ({("", "rejected_404"): 1} if path.startswith("/v1/") else {})


@pytest.mark.parametrize(
    "given", ["a" * 129, "", "a b", 'a"b', "ä", "a\tb", "a%0d%0ab"], ids=range(7)
)
async def test_an_odd_id_is_replaced(own: FastAPI, lines: Lines, given: str) -> None:
    start, *_ = await call(own, "/v1/completions", x_request_id=given)
    (made,) = header(start, "x-request-id")
    assert len(made) == 32
    assert lines()[0]["request_id"] == made


async def test_an_id_that_the_server_returns_is_not_added(telemetry: IngressTelemetry) -> None:
    app = FastAPI()
    recorder = Recorder(telemetry, is_id_echoed=True)
    app.add_middleware(RecordMiddleware, recorder=recorder)
    start, *_ = await call(app, "/", x_request_id="known")
    assert header(start, "x-request-id") == []
    start, *_ = await call(app, "/")
    assert len(header(start, "x-request-id")) == 1


async def test_probes_that_succeed_are_not_logged(client: httpx2.AsyncClient, lines: Lines) -> None:
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        assert (await client.get(path)).status_code == 200
    assert [line["path"] for line in lines()] == ["/v1/models"]


async def test_the_log_can_be_turned_off(
    models: list[ServedModel],
    app_of: Callable[..., FastAPI],
    client_of: Callable[..., httpx2.AsyncClient],
    lines: Lines,
) -> None:
    async with client_of(app_of(*models, telemetry={"log_requests": False})) as client:
        await client.get("/v1/models")
    assert lines() == []


@pytest.fixture
async def keyed(
    models: list[ServedModel],
    loops: dict[str, LocalLoop],
    broken_backend: Callable[..., Backend],
    served: Callable[..., ServedModel],
    app_of: Callable[..., FastAPI],
    client_of: Callable[..., httpx2.AsyncClient],
    tmp_path: Path,
) -> AsyncIterator[httpx2.AsyncClient]:
    """A client with a key, of a server with a model that works and one that fails."""
    digest = hashlib.sha256(b"mars-canary-key").hexdigest()
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys: [{{name: alice, sha256: {digest}}}]")
    backend = broken_backend(RequestFailed("canary error"), num_outputs=2)
    broken = served("broken", loops["mars"].engine.checkpoint, backend)
    app = app_of(*models, broken, keys={"file": str(file)})
    async with client_of(app, headers={"Authorization": "Bearer mars-canary-key"}) as client:
        yield client


async def test_no_text_and_no_key_is_ever_logged(
    keyed: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture, lines: Lines
) -> None:
    caplog.set_level(logging.DEBUG)
    body = {**BODY, "prompt": "canary prompt", "stop": "canary stop", "user": "canary user"}
    output = (await keyed.post("/v1/completions?canary=query", json=body)).json()
    text = output["choices"][0]["text"]
    chat = {"model": "mars", "max_tokens": 4, "messages": [{"role": "user", "content": "canary"}]}
    responses = [
        await keyed.post("/v1/chat/completions", json={**chat, "stream": True}),
        await keyed.post("/v1/chat/completions", json={**chat, "model": "canary model"}),
        await keyed.post("/v1/chat/completions", json={**chat, "temperature": "canary value"}),
        await keyed.post("/v1/completions", content=b"canary {"),
        await keyed.post("/v1/completions", json=body, headers={"X-Request-Id": "canary id"}),
        await keyed.post("/v1/completions", json=body, headers={"Authorization": "canary key"}),
        await keyed.post("/v1/completions", json={**body, "model": "broken", "stream": True}),
    ]
    statuses = [response.status_code for response in responses]
    assert statuses[:3] == [200, 404, 400]
    assert statuses[4:] == [200, 401, 200]
    assert len(text) > 3
    logged = [
        record.getMessage() for record in caplog.records if not record.name.startswith("http")
    ]  # the client's own log has its URLs
    assert len(logged) >= 8
    assert not any("canary" in line or text in line for line in logged)
    assert [line["outcome"] for line in lines()[-3:]] == ["length", "rejected_401", "error"]
    assert len({response.headers["x-request-id"] for response in responses}) == len(responses)


async def test_a_line_of_a_real_request(keyed: httpx2.AsyncClient, lines: Lines) -> None:
    body = {**BODY, "mode": "threshold", "confidence_threshold": 0.25, "stream": True}
    await keyed.post("/v1/completions", json=body)
    await keyed.post("/v1/completions", json={**BODY, "n": 0})
    line, refused = lines()
    assert (
        line.items()
        >= {
            "key": "alice",
            "model": "mars",
            "stream": True,
            "mode": "threshold",
            "threshold_mean": 0.25,
            "threshold_min": 0.25,
            "completion_tokens": 5,
            "outcome": "length",
        }.items()
    )
    assert 0 <= line["queue_s"] <= line["ttft_s"] <= line["duration_s"]
    assert 1 <= line["forward_passes"] <= 5
    assert refused["outcome"] == "rejected_400"
    assert refused["error_code"] == "invalid_value"


async def test_a_span_of_a_request(own: FastAPI, spans: InMemorySpanExporter) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    await call(own, "/v1/completions", traceparent=f"00-{trace}-b7ad6b7169203331-01")
    (span,) = spans.get_finished_spans()
    assert span.name == "POST /v1/completions"
    assert span.kind is SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" == trace
    assert span.parent is not None
    assert span.parent.span_id == 0xB7AD6B7169203331
    attributes = dict(span.attributes or {})
    assert attributes.pop("marsray.request_id")
    assert attributes == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "mars",
        "gen_ai.response.model": "mars",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 6,
        "marsray.outcome": "stop",
    }


async def test_a_span_of_a_failure(own: FastAPI, spans: InMemorySpanExporter) -> None:
    await call(own, "/v1/failed")
    (span,) = spans.get_finished_spans()
    assert span.name == "POST"
    assert span.parent is None
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "internal_error"
    assert "secret" not in span.to_json()
    assert not span.events  # an exception's text may quote a request


def test_tracing_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(UserError, match=r"^telemetry\.tracing: .*marsray\[tracing\]"):
        tracer_from_environment()


def test_a_process_of_its_own_writes_json_lines(capfd: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("marsray.requests")
    before = log.handlers, log.level, log.propagate
    try:
        write_records_to_stderr()
        write_records_to_stderr()
        log.info(json.dumps({"path": "100%"}))
    finally:
        log.handlers, log.level, log.propagate = before
    assert capfd.readouterr().err == '{"path": "100%"}\n'
