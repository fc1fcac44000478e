from __future__ import annotations

import re
from pathlib import Path

import pytest

from kustomized import needs_kubectl
from mars_serve.config.settings import AutoscalingSettings
from mars_serve.observability import (
    request_telemetry,
)

pytestmark = needs_kubectl

ROOT = Path(__file__).resolve().parents[2]
RECORDED = re.compile(r"\bmarsray:[\w:]+")


@pytest.fixture
def rules(render):
    (found,) = render("overlays/ha").of_kind("PrometheusRule")
    return [rule for group in found["spec"]["groups"] for rule in group["rules"]]


def test_grafana_finds_the_dashboard_by_its_label(render):
    found = render("overlays/ha").of_kind("ConfigMap")
    (configmap,) = (each for each in found if each["metadata"]["name"] == "marsray-dashboard")
    assert configmap["metadata"]["labels"] == {"grafana_dashboard": "1"}


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
        "MarsrayReplicasSlow",
    }
    assert alerts["MarsrayThresholdAtFloor"]["for"] == "10m"
    for alert in alerts.values():
        assert alert["labels"]["severity"] in ("page", "ticket")
    runbook = (ROOT / "docs" / "operations" / "runbook.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^## (Marsray\w+)$", runbook, re.MULTILINE)) == set(alerts)
    for name, alert in alerts.items():
        place = f"docs/operations/runbook.md#{name.lower()}"
        assert alert["annotations"]["runbook"] == place


def test_requests_that_were_sent_elsewhere_raise_an_alert(rules):
    (alert,) = [rule for rule in rules if "moves_total" in rule["expr"]]
    assert alert["alert"] == "MarsrayEnginesFail"


def test_the_alerts_objective_is_that_of_the_service(rules):
    bounds = [float(each) for rule in rules for each in re.findall(r'le="([^"]+)"', rule["expr"])]
    assert set(bounds) == {AutoscalingSettings(max_replicas=1).objective_ttft_s}
    # a query matches nothing at a bound that the histogram does not have
    assert set(bounds) <= set(request_telemetry._TIME_TO_FIRST_TOKEN.buckets)


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
