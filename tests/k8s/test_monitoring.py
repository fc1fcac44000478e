from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kustomized import needs_kubectl
from mars_autoscale.policy.metrics import AutoscalerMetrics
from mars_serve.config.settings import AutoscalingSettings
from mars_serve.observability import (
    audit_metrics,
    ingress_telemetry,
    replica_telemetry,
    request_telemetry,
)
from mars_serve.observability.metric_families import HistogramDefinition, MetricDefinition

pytestmark = needs_kubectl

ROOT = Path(__file__).resolve().parents[2]
EXPORTED = re.compile(r"\bray_(marsray_\w+)")
RECORDED = re.compile(r"\bmarsray:[\w:]+")


@pytest.fixture
def rules(render):
    (found,) = render("overlays/ha").of_kind("PrometheusRule")
    return [rule for group in found["spec"]["groups"] for rule in group["rules"]]


@pytest.fixture
def panels(render):
    found = render("overlays/ha").of_kind("ConfigMap")
    (configmap,) = (each for each in found if each["metadata"]["name"] == "marsray-dashboard")
    assert configmap["metadata"]["labels"] == {"grafana_dashboard": "1"}
    return json.loads(configmap["data"]["dashboard.json"])["panels"]


def metric_names() -> set[str]:
    """Every metric of the code, by the name of Ray's exporter without its prefix."""
    definitions = [
        each
        for module in (ingress_telemetry, replica_telemetry, request_telemetry)
        for each in vars(module).values()
        if isinstance(each, MetricDefinition)
    ]
    definitions += replica_telemetry._COUNTERS.values()
    definitions += audit_metrics.AUDIT_COUNTERS.values()
    histograms = [each.name for each in definitions if isinstance(each, HistogramDefinition)]
    names = {each.name for each in definitions}
    names |= {f"{name}{part}" for name in histograms for part in ("_bucket", "_count", "_sum")}
    for family in AutoscalerMetrics({}).collect():
        names.add(f"{family.name}_total" if family.type == "counter" else family.name)
    return names


def expressions(rules: list[dict[str, Any]], panels: list[dict[str, Any]]) -> Iterator[str]:
    yield from (rule["expr"] for rule in rules)
    yield from (target["expr"] for panel in panels for target in panel["targets"])


def test_every_metric_in_a_query_exists(rules, panels):
    known = metric_names()
    assert len(known) > 30
    for expression in expressions(rules, panels):
        used = set(EXPORTED.findall(expression))
        assert used <= known, expression
        assert used or RECORDED.search(expression), expression


def test_alerts_use_the_recorded_series_and_all_of_them(rules):
    recorded = {rule["record"] for rule in rules if "record" in rule}
    asked = {name for rule in rules if "alert" in rule for name in RECORDED.findall(rule["expr"])}
    assert asked == recorded


def test_every_alert_names_its_section_of_the_runbook(rules):
    alerts = {rule["alert"]: rule for rule in rules if "alert" in rule}
    assert set(alerts) == {
        "MarsrayTtftBudgetBurnsFast",
        "MarsrayTtftBudgetBurns",
        "MarsrayEnginesFail",
        "MarsrayThresholdAtFloor",
        "MarsrayNoReplica",
        "MarsrayFrontierRefused",
        "MarsrayFrontierRefuted",
        "MarsrayRejections",
    }
    assert alerts["MarsrayThresholdAtFloor"]["for"] == "10m"
    for alert in alerts.values():
        assert alert["labels"]["severity"] in ("page", "ticket")
    runbook = (ROOT / "docs" / "operations" / "runbook.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^## (Marsray\w+)$", runbook, re.MULTILINE)) == set(alerts)
    for name, alert in alerts.items():
        place = f"docs/operations/runbook.md#{name.lower()}"
        assert alert["annotations"]["runbook"] == place


def test_the_alerts_objective_is_that_of_the_service(rules):
    bounds = [float(each) for rule in rules for each in re.findall(r'le="([^"]+)"', rule["expr"])]
    assert set(bounds) == {AutoscalingSettings(max_replicas=1).objective_ttft_s}
    # a query matches nothing at a bound that the histogram does not have
    assert set(bounds) <= set(request_telemetry._TIME_TO_FIRST_TOKEN.buckets)


def test_series_are_grouped_by_labels_that_the_metrics_have(rules):
    collector = ingress_telemetry.IngressTelemetry(["a"])
    collector.count_rejection("a", 503, "queue_full")
    labels = {
        key for family in collector.collect() for sample in family.samples for key in sample.labels
    }
    for rule in rules:
        for group in re.findall(r"by \(([\w, ]+)\)", rule["expr"]):
            assert set(group.split(", ")) <= labels


def test_prometheus_scrapes_ports_that_the_pods_have(render):
    service = render("overlays/ha")
    head = service.cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    for monitor in service.of_kind("PodMonitor"):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            for container in (head, service.worker_container):
                assert endpoint["port"] in {each["name"] for each in container["ports"]}


def test_the_key_for_scraping_comes_from_a_secret(render):
    monitors = render("overlays/ha").of_kind("PodMonitor")
    (own,) = (m for m in monitors if m["metadata"]["name"] == "marsray-metrics")
    (endpoint,) = own["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics"
    assert set(endpoint["authorization"]["credentials"]) == {"name", "key"}
