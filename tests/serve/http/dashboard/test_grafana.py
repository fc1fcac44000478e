"""Grafana's queries and the alerts' name only what a scrape of a real server has."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import yaml
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ladders import CAPACITY
from mars_autoscale.audit.counts import AuditCounts, AuditKey
from mars_autoscale.policy.outer_loop import AutoscalingBasis
from mars_autoscale.policy.settings import OuterSettings
from mars_platform.tier import Tier
from mars_serve.observability.audit_metrics import audit_families
from mars_serve.observability.metric_families import LABELS
from replica_reports import report_of
from rest.rest_requests import COMPLETION, COMPLETIONS
from rest.rest_server import SingleEngineBackend, app_of, client_of, served

MONITORING = Path(__file__).parents[4] / "k8s" / "components" / "monitoring"
OF_PROMETHEUS = {"pod", "le"}
"""Labels that the scrape adds, and that of a histogram's buckets."""
BASIS = AutoscalingBasis(CAPACITY, OuterSettings(max_replicas=3, period_s=0.02))


class ScaledBackend(SingleEngineBackend):
    """A backend with the metrics of its engine and of a governor that decides."""

    async def metrics(self) -> list[Metric]:
        return [*self._replica.collect(), *await self.governor.metrics("model")]


def queries() -> list[tuple[str, str]]:
    """Return each expression, with the legend of its curve."""
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    groups = yaml.safe_load((MONITORING / "rules.yaml").read_text())["spec"]["groups"]
    found = [
        (target["expr"], target["legendFormat"]) for panel in panels for target in panel["targets"]
    ]
    return found + [(rule["expr"], "") for group in groups for rule in group["rules"]]


@pytest.fixture
async def scraped(mars, loops, monkeypatch) -> dict[str, set[str]]:
    """Labels by the name of every sample of a server that has served, refused and decided."""
    monkeypatch.setattr("mars_serve.http.endpoints.metrics._MAX_AGE_S", 0.05)
    backend = ScaledBackend(loops["mars"])
    app = app_of(served("mars", mars, backend))
    queue = Counter(dict.fromkeys(Tier, 0))
    app.state.telemetry.watch_queues({"mars": lambda: queue})
    app.state.telemetry.count_moves("mars", 1)  # no replica has died here
    app.state.telemetry.count_batch_line("mars", is_right=True)
    before = asyncio.all_tasks()
    await backend.governor.report("model", report_of("r1"), BASIS)
    async with client_of(app) as client:
        await client.answer(COMPLETIONS, {**COMPLETION, "max_tokens": 2})
        await client.post(COMPLETIONS, json={**COMPLETION, "n": 0})
        async with asyncio.timeout(20):
            while "decisions_total{" not in (text := (await client.get("/metrics")).text):
                await asyncio.sleep(0.06)  # for so long the answer is kept
    for task in asyncio.all_tasks() - before:
        task.cancel()
    labels = defaultdict[str, set[str]](set)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels[sample.name] |= sample.labels.keys()
    # the engine has audited nothing
    tally = {AuditKey(Tier.DEFAULT, 0.9, is_plain=True): AuditCounts(1, 9, 1)}
    for family in audit_families(tally, ("mars", "only")):
        for sample in family.samples:
            labels[sample.name] |= sample.labels.keys()
    return labels


async def test_every_query_names_metrics_and_labels_of_a_real_scrape(scraped):
    found = queries()
    assert len(found) > 40
    for expression, legend in found:
        if "ray_marsray_" not in expression:  # of recorded series, which other rules make
            continue
        names = re.findall(r"\bray_(marsray_\w+)", expression)
        assert set(names) <= scraped.keys(), expression
        labels = set.union(*(scraped[name] for name in names)) | OF_PROMETHEUS
        groups = ",".join(re.findall(r"by \(([^)]+)\)", expression))
        used = {each.strip() for each in groups.split(",")} - {""}
        used |= set(re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression))
        used |= set(re.findall(r"{{(\w+)}}", legend))
        assert used <= labels, (expression, legend)
    assert set(LABELS) <= scraped["marsray_num_requests_running"]
