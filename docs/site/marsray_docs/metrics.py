"""The reference of metrics, from the collectors that a server has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import Metric

from mars_autoscale.audit.counts import AuditCounts, AuditKey
from mars_autoscale.policy.metrics import AutoscalerMetrics
from mars_platform.tier import Tier
from mars_serve.observability import replica_telemetry
from mars_serve.observability.audit_metrics import audit_families
from mars_serve.observability.ingress_telemetry import IngressTelemetry
from mars_serve.observability.metric_families import LABELS, MetricDefinition
from mars_serve.observability.request_telemetry import RequestTelemetry
from marsray_docs.tables import code, table, text

_HEAD = """# Metrics

Generated from the collectors. `GET /metrics` has all of them, over all replicas. Ray's exporter has them
with the prefix `ray_`, those of several ingress replicas included.
[The runbook](../operations/runbook.md) says what to do when an alert on them fires.

"""


@dataclass(frozen=True)
class Described:
    """A metric as the reference lists it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


def metrics() -> dict[str, list[Described]]:
    """Return all metrics by the process that counts them."""
    labels = ("model", "replica")
    requests = RequestTelemetry().families(labels)
    audits = audit_families({AuditKey(Tier.DEFAULT, 0.9, True): AuditCounts()}, labels)
    engine = [
        Described(each.name, _kind(each.name), LABELS, each.help) for each in _engine_definitions()
    ]
    return {
        "Requests, at the ingress": [_of_family(each) for each in IngressTelemetry([]).collect()],
        "Requests, in each replica": [_of_family(each) for each in requests],
        "Engines": engine,
        "Audits": [_of_family(each) for each in audits],
        "The autoscaler": [_of_family(each) for each in AutoscalerMetrics({}).collect()],
    }


def page() -> str:
    """Return the page as Markdown."""
    parts = [_HEAD]
    for title, described in metrics().items():
        rows = [
            (code(each.name), each.kind, ", ".join(map(code, each.labels)), text(each.help))
            for each in described
        ]
        parts.append(
            f"## {title}\n\n" + table(["metric", "kind", "labels", "meaning"], rows) + "\n"
        )
    return "".join(parts)


def _engine_definitions() -> Iterator[MetricDefinition]:
    for value in vars(replica_telemetry).values():
        held = value.values() if isinstance(value, dict) else [value]
        yield from (each for each in held if isinstance(each, MetricDefinition))


def _of_family(family: Metric) -> Described:
    # A family without samples tells its labels nowhere else.
    labels: Any = getattr(family, "_labelnames", ())
    suffix = "_total" if family.type == "counter" else ""
    return Described(family.name + suffix, family.type, tuple(labels), family.documentation)


def _kind(name: str) -> str:
    return "counter" if name.endswith("_total") else "gauge"
