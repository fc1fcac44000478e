"""``GET /metrics``: the metrics of the ingress and of every replica in one response.

With several ingress replicas, a response holds the counters of the one that answers, under its own
label; Ray's exporter has those of all.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from mars_serve.api.schema import errors_described
from mars_serve.config.served import ServedModel
from mars_serve.http.recent import Recent
from mars_serve.observability.ingress_telemetry import IngressTelemetry

_MAX_AGE_S = 1.0
"""Seconds for which the metrics of replicas are kept, which are costly to get."""
_CONTENT = {"schema": {"type": "string"}}
_DESCRIBED: dict[str, Any] = {
    "description": "Metrics of the server and of every replica.",
    "content": {"text/plain": _CONTENT, "application/openmetrics-text": _CONTENT},
}


def metrics_router(models: Mapping[str, ServedModel], telemetry: IngressTelemetry) -> APIRouter:
    """Return the router of the endpoint that Prometheus scrapes."""
    router = APIRouter(responses=errors_described())
    recent = [_recent_metrics(model) for model in models.values()]

    @router.get("/metrics", response_class=Response, responses={200: _DESCRIBED})
    async def metrics(request: Request) -> Response:
        """Return metrics in Prometheus' text format, or in OpenMetrics if the client accepts it."""
        found = await asyncio.gather(*(of_model(_MAX_AGE_S) for of_model in recent))
        encode, content_type = _encoder(request.headers.get("accept", ""))
        merged = _Merged([*chain(*found), *telemetry.collect()])
        # with many replicas it takes too long to block streams
        content = await asyncio.to_thread(lambda: encode(merged))
        return Response(content, headers={"Content-Type": content_type})

    return router


def _encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """Return the encoder for a client and its content type, the plain one if no other is meant."""
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):  # the library does not expect a version that is no number
        return choose_encoder("")


def _recent_metrics(model: ServedModel) -> Recent[list[Metric]]:
    return Recent(lambda: model.backend.metrics())


class _Merged(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families: dict[str, Metric] = {}
        for each in families:
            merged = Metric(each.name, each.documentation, each.type)
            self._families.setdefault(each.name, merged).samples.extend(each.samples)

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()
