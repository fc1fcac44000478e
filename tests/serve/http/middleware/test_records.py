from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from starlette.requests import Request
from starlette.types import Message

from decoding.local_engine_client import LocalEngineClient
from mars_platform.errors import UserError
from mars_serve.config.served import ServedModel
from mars_serve.engine.ipc.client import RequestFailed
from mars_serve.http.middleware.errors import ErrorMiddleware, as_api_error
from mars_serve.http.middleware.recording import RecordMiddleware, write_logs_to_stderr
from mars_serve.http.middleware.tracing import RequestTracer, tracer_from_environment
from mars_serve.observability.ingress_telemetry import IngressTelemetry
from rest import asgi
from rest.api_keys import bearer, key_entry
from rest.rest_requests import CHAT, COMPLETION, COMPLETIONS, MESSAGES
from rest.rest_server import BrokenBackend, app_of, client_of, served

Lines = Callable[[], list[dict[str, Any]]]
BODY = {**COMPLETION, "max_tokens": 5, "mode": "ar"}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    """Return a function that reads the lines of the request log."""
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
    """Return an application with an endpoint for each way in which a request may end."""
    app = FastAPI()
    app.post(COMPLETIONS)(generate)
    app.post("/v1/broken", response_model=None)(break_off)
    app.post("/v1/failed")(fail)
    app.post("/v1/slow")(dawdle)
    app.add_middleware(ErrorMiddleware)
    tracer = RequestTracer(SimpleSpanProcessor(spans))
    app.add_middleware(RecordMiddleware, telemetry=telemetry, tracer=tracer)
    return app


def counted(telemetry: IngressTelemetry) -> dict[tuple[str, str], float]:
    families = telemetry.collect()
    return {
        (sample.labels["model"], sample.labels["outcome"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name == "marsray_requests_total"
    }


async def call(
    app: FastAPI, path: str, leave_after: int | None = None, **headers: str
) -> list[Message]:
    """Post to an application and return its messages to a client that may disconnect."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    version = {"version": "3.0", "spec_version": "2.4"}
    return await asgi.call(app, "POST", path, named, leave_after=leave_after, asgi=version)


def header(message: Message, name: str) -> list[str]:
    return [each.decode() for key, each in message["headers"] if key.decode().lower() == name]


async def test_a_successful_request_is_logged_and_counted(own, lines, telemetry):
    start, *_ = await call(own, COMPLETIONS, x_request_id="abc-1")
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


async def test_a_client_that_disconnects_from_a_stream_is_recorded_as_cancelled(
    own, lines, telemetry
):
    with suppress(Exception):
        await call(own, COMPLETIONS, leave_after=2)
    (line,) = lines()
    assert (line["outcome"], line["level"], line["status"]) == ("cancelled", "INFO", 200)
    assert 2 <= line["completion_tokens"] < 6
    assert counted(telemetry) == {("mars", "cancelled"): 1}


async def test_a_request_whose_task_is_cancelled_is_recorded_as_cancelled(own, lines, telemetry):
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
async def test_an_endpoint_that_raises_is_recorded_as_error(own, lines, telemetry, path):
    with suppress(RuntimeError):  # raised if the stream had begun
        start, *_ = await call(own, path)
        assert header(start, "x-request-id") == [lines()[0]["request_id"]]
    (line,) = lines()
    assert (line["outcome"], line["level"]) == ("error", "ERROR")
    assert "secret" not in str(line)
    assert counted(telemetry) == {("", "error"): 1}


@pytest.mark.parametrize("path", ["/v1/unknown", "/v1/files", "/v1/batches/batch_x", "/other"])
async def test_a_refusal_is_counted_where_text_is_generated(own, lines, telemetry, path):
    await call(own, path)
    assert lines()[0]["outcome"] == "rejected_404"
    assert counted(telemetry) == ({("", "rejected_404"): 1} if path == "/v1/unknown" else {})


@pytest.mark.parametrize(
    "given", ["a" * 129, "", "a b", 'a"b', "ä", "a\tb", "a%0d%0ab"], ids=range(7)
)
async def test_an_unsafe_request_id_is_replaced(own, lines, given):
    start, *_ = await call(own, COMPLETIONS, x_request_id=given)
    (made,) = header(start, "x-request-id")
    assert len(made) == 32
    assert lines()[0]["request_id"] == made


async def test_a_request_id_that_the_server_returns_itself_is_not_added(telemetry):
    app = FastAPI()
    app.add_middleware(RecordMiddleware, telemetry=telemetry, is_id_echoed=True)
    start, *_ = await call(app, "/", x_request_id="known")
    assert header(start, "x-request-id") == []
    start, *_ = await call(app, "/")
    assert len(header(start, "x-request-id")) == 1


async def test_probes_that_succeed_are_not_logged(client, lines):
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        assert (await client.get(path)).status_code == 200
    assert [line["path"] for line in lines()] == ["/v1/models"]


async def test_the_log_can_be_turned_off(models, lines):
    async with client_of(app_of(*models, telemetry={"log_requests": False})) as client:
        await client.get("/v1/models")
    assert lines() == []


@pytest.fixture
async def keyed(
    models: list[ServedModel], loops: dict[str, LocalEngineClient]
) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client with a key, of a server with a working model and a failing one."""
    backend = BrokenBackend(RequestFailed("canary error"), num_outputs=2)
    broken = served("broken", loops["mars"].engine.checkpoint, backend)
    app = app_of(*models, broken, keys={"entries": [key_entry("mars-canary-key", name="alice")]})
    async with client_of(app, headers=bearer("mars-canary-key")) as client:
        yield client


async def test_no_text_and_no_key_is_logged(keyed, caplog, lines):
    caplog.set_level(logging.DEBUG)
    body = {**BODY, "prompt": "canary prompt", "stop": "canary stop", "user": "canary user"}
    output = (await keyed.post("/v1/completions?canary=query", json=body)).json()
    text = output["choices"][0]["text"]
    chat = {"model": "mars", "max_tokens": 4, "messages": [{**MESSAGES[0], "content": "canary"}]}
    responses = [
        await keyed.post(CHAT, json={**chat, "stream": True}),
        await keyed.post(CHAT, json={**chat, "model": "canary model"}),
        await keyed.post(CHAT, json={**chat, "temperature": "canary value"}),
        await keyed.post(COMPLETIONS, content=b"canary {"),
        await keyed.post(COMPLETIONS, json=body, headers={"X-Request-Id": "canary id"}),
        await keyed.post(COMPLETIONS, json=body, headers={"Authorization": "canary key"}),
        await keyed.post(COMPLETIONS, json={**body, "model": "broken", "stream": True}),
    ]
    statuses = [response.status_code for response in responses]
    assert statuses[:3] == [200, 404, 400]
    assert statuses[4:] == [200, 401, 200]
    assert len(text) > 3
    logged = [
        record.getMessage() for record in caplog.records if not record.name.startswith("http")
    ]  # the client's own log contains URLs
    assert len(logged) >= 8
    assert not any("canary" in line or text in line for line in logged)
    assert [line["outcome"] for line in lines()[-3:]] == ["length", "rejected_401", "error"]
    assert len({response.headers["x-request-id"] for response in responses}) == len(responses)


async def test_the_log_line_of_a_generation_has_its_figures(keyed, lines):
    body = {**BODY, "mode": "threshold", "confidence_threshold": 0.25, "stream": True}
    await keyed.post(COMPLETIONS, json=body)
    await keyed.post(COMPLETIONS, json={**BODY, "n": 0})
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


async def test_a_span_continues_the_clients_trace_and_has_the_figures(own, spans):
    trace = "0af7651916cd43dd8448eb211c80319c"
    await call(own, COMPLETIONS, traceparent=f"00-{trace}-b7ad6b7169203331-01")
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


async def test_a_span_of_a_failure_has_the_error_but_no_text(own, spans):
    await call(own, "/v1/failed")
    (span,) = spans.get_finished_spans()
    assert span.name == "POST"
    assert span.parent is None
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "internal_error"
    assert "secret" not in span.to_json()
    assert not span.events  # an exception's text may quote a request


def test_tracing_without_its_packages_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(UserError, match=r"^telemetry\.tracing: .*marsray\[tracing\]"):
        tracer_from_environment()


UNPRINTABLE = "\x9b\x85\u2028\u2029\x7f\u202e\ufeff\x1b\r\n\t\U000e0041"


async def test_no_character_of_a_path_ends_a_line_or_steers_a_terminal(own, caplog):
    with caplog.at_level(logging.INFO, "marsray.requests"):
        await call(own, f"/v1/{UNPRINTABLE}")
    (line,) = (each.message for each in caplog.records if each.name == "marsray.requests")
    assert line.isprintable()
    assert json.loads(line)["path"] == f"/v1/{UNPRINTABLE}"


@pytest.fixture
def written() -> Iterator[None]:
    """Let logs be written to standard error during a test."""
    names = "marsray.requests", "mars_serve"
    logs = [logging.getLogger(name) for name in names]
    before = [(log.handlers, log.level, log.propagate) for log in logs]
    write_logs_to_stderr()
    write_logs_to_stderr()
    yield
    for log, (handlers, level, propagate) in zip(logs, before, strict=True):
        log.handlers, log.level, log.propagate = handlers, level, propagate


@pytest.mark.usefixtures("written")
def test_records_are_written_to_stderr_as_json_lines(capfd):
    logging.getLogger("marsray.requests").info(json.dumps({"path": "100%"}))
    assert capfd.readouterr().err == '{"path": "100%"}\n'


@pytest.mark.usefixtures("written")
def test_the_text_of_an_error_forges_no_line(capfd):
    as_api_error(ValueError(f"{UNPRINTABLE}ERROR 2026-01-01 forged"))
    first, *others = capfd.readouterr().err.removesuffix("\n").split("\n")
    assert first.startswith("ERROR ")
    assert first.endswith("a request failed")
    assert "forged" in others[-1]
    assert all(line.isprintable() and line.startswith(" ") for line in others)
