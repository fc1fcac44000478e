from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from fastapi import FastAPI
from prometheus_client.core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from decoding.local_engine_client import LocalEngineClient
from mars_platform.checkpoint.directory import Checkpoint
from mars_serve.config.served import ServedModel
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.observability.replica_telemetry import ReplicaTelemetry
from rest.rest_server import SingleEngineBackend, app_of, client_of, served

NAME = re.compile(r"marsray_[a-z0-9_]+")
BODY = {"model": "mars", "prompt": "What is 3 plus 4?", "max_tokens": 5, "mode": "ar"}


@pytest.fixture
def app(
    loops: dict[str, LocalEngineClient],
    make_loop: Callable[..., LocalEngineClient],
    mars: Checkpoint,
) -> FastAPI:
    """Return an application with a model on two replicas and a model on one."""

    class CountingBackend(SingleEngineBackend):  # type: ignore[valid-type, misc]
        """A backend that sends all requests to its first replica."""

        def __init__(self, name: str, *replicas: LocalEngineClient) -> None:
            super().__init__(replicas[0])
            self.telemetry = [
                ReplicaTelemetry(name, f"{name}-{index}", loop)
                for index, loop in enumerate(replicas)
            ]

        async def metrics(self) -> list[Metric]:
            return [each for replica in self.telemetry for each in replica.collect()]

    def model(name: str, *replicas: LocalEngineClient) -> ServedModel:
        checkpoint = replicas[0].engine.checkpoint
        return served(name, checkpoint, CountingBackend(name, *replicas))

    return app_of(model("mars", loops["mars"], make_loop(mars)), model("plain", loops["plain"]))


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def check(families: list[Metric]) -> None:
    """Check what the parser of OpenMetrics, which is strict about names and buckets, does not."""
    for family in families:
        assert NAME.fullmatch(family.name)
        assert family.documentation.endswith(".")
        assert family.type in ("counter", "gauge", "histogram")
        seen = [(sample.name, *sorted(sample.labels.items())) for sample in family.samples]
        assert len(set(seen)) == len(seen)


async def test_one_response_has_the_metrics_of_ingress_and_replicas(client, monkeypatch):
    monkeypatch.setattr("mars_serve.http.endpoints.metrics._MAX_AGE_S", 0.0)
    before = samples((await client.get("/metrics")).text)
    for max_tokens in (3, 5):
        response = await client.post("/v1/completions", json={**BODY, "max_tokens": max_tokens})
        assert response.status_code == 200
    assert (await client.post("/v1/completions", json={**BODY, "model": "x"})).status_code == 404
    after = samples((await client.get("/metrics")).text)

    def grown(name: str, model: str, **labels: str) -> float:
        key = name, tuple(sorted({"model": model, **labels}.items()))
        return after[key] - before.get(key, 0)

    of = {"replica": "mars-0"}
    assert grown("marsray_generation_tokens_total", "mars", **of) == 8
    assert grown("marsray_e2e_request_latency_seconds_count", "mars", **of) == 2
    assert grown("marsray_e2e_request_latency_seconds_count", "mars", replica="mars-1") == 0
    assert grown("marsray_generation_tokens_total", "plain", replica="plain-0") == 0
    of = {"replica": "ingress"}
    assert grown("marsray_requests_total", "mars", outcome="length", **of) == 2
    assert grown("marsray_requests_total", "", outcome="rejected_404", **of) == 1
    endpoint = {"endpoint": "/v1/completions", **of}
    assert grown("marsray_endpoint_requests_total", "mars", **endpoint) == 2
    assert grown("marsray_rejections_total", "", status="404", code="model_not_found", **of) == 1


async def test_the_response_is_valid_for_prometheus(client):
    response = await client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(response.text))
    assert len(families) == 8 + 8 + 6 + 9
    check(families)
    for line in ("HELP", "TYPE"):
        assert response.text.count(f"# {line} marsray_num_requests_running ") == 1


async def test_openmetrics_is_returned_on_request(client):
    headers = {"Accept": "application/openmetrics-text; version=1.0.0, text/plain;q=0.5"}
    response = await client.get("/metrics", headers=headers)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    check(list(openmetrics.text_string_to_metric_families(response.text)))


@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=a", ",;q", "*/*" * 1000])
async def test_an_odd_accept_header_gets_the_plain_format(client, accept):
    response = await client.get("/metrics", headers={"Accept": accept})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")


async def test_requests_that_were_moved_are_counted_and_logged(mars, loops, caplog):
    class MovingBackend(SingleEngineBackend):  # type: ignore[valid-type, misc]
        async def complete(self, request: Request) -> list[StepOutput]:
            request.failed_on = ("one", "two", "three")
            return await super().complete(request)

    caplog.set_level("INFO", "marsray.requests")
    async with client_of(app_of(served("mars", mars, MovingBackend(loops["mars"])))) as client:
        assert (await client.post("/v1/completions", json={**BODY, "n": 2})).status_code == 200
        text = (await client.get("/metrics")).text
    of = (("model", "mars"), ("replica", "ingress"))
    assert samples(text)["marsray_moves_total", of] == 6
    assert json.loads(caplog.messages[0])["moves"] == 6
