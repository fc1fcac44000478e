"""Builds marsray's Grafana dashboard as JSON, from a table of panels.

The metrics are those of Ray's exporter, with its prefix ``ray_``. Every replica and every ingress
exports only its own, so that sums count nothing twice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_SOURCE = {"type": "prometheus", "uid": "${source}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3
_MODEL = '{model=~"$model"}'
_AUDITED = ("confidence_threshold", "sampling")


@dataclass(frozen=True)
class Panel:
    """A graph of the dashboard."""

    title: str
    unit: str
    """Grafana's name of the unit; ``none`` for plain numbers."""
    queries: tuple[tuple[str, str], ...]
    """Legend and PromQL expression of each curve."""


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    rate = f"sum by (le) (rate(ray_{metric}_bucket{_MODEL}[$__rate_interval]))"
    return tuple((f"p{q}", f"histogram_quantile(0.{q}, {rate})") for q in (50, 95, 99))


def _sum_rate(metric: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) (rate(ray_{metric}{_MODEL}[$__rate_interval]))"


PANELS = (
    Panel("Time to first token", "s", _quantiles("marsray_time_to_first_token_seconds")),
    Panel("Time between tokens", "s", _quantiles("marsray_inter_token_latency_seconds")),
    Panel("Time of a whole request", "s", _quantiles("marsray_e2e_request_latency_seconds")),
    Panel("Time in the queue", "s", _quantiles("marsray_request_queue_time_seconds")),
    Panel(
        "τ: live, and the lowest allowed",
        "none",
        (
            ("live, mean", f"avg(ray_marsray_confidence_threshold{_MODEL})"),
            ("live, lowest", f"min(ray_marsray_confidence_threshold{_MODEL})"),
            ("flex, lowest", f"min(ray_marsray_flex_confidence_threshold{_MODEL})"),
            ("floor of default", f"max(ray_marsray_autoscaler_floor_threshold{_MODEL})"),
            ("floor of flex", f"max(ray_marsray_autoscaler_flex_floor_threshold{_MODEL})"),
        ),
    ),
    Panel("τ served, by request", "none", _quantiles("marsray_request_confidence_threshold")),
    Panel(
        "Audits: first differences per 1,000 tokens, by τ",
        "none",
        (
            (
                "{{confidence_threshold}}, {{sampling}}",
                f"1000 * {_sum_rate('marsray_audited_diverged_total', *_AUDITED)}"
                f" / {_sum_rate('marsray_audited_tokens_total', *_AUDITED)}",
            ),
            ("evidence", f"max by (model) (ray_marsray_autoscaler_audit_evidence{_MODEL})"),
        ),
    ),
    Panel(
        "Replicas",
        "none",
        (
            ("target", f"max by (model) (ray_marsray_autoscaler_replicas{_MODEL})"),
            ("ready", f"max by (model) (ray_marsray_autoscaler_replicas_ready{_MODEL})"),
            ("starting", f"max by (model) (ray_marsray_autoscaler_replicas_starting{_MODEL})"),
            ("needed", f"max by (model) (ray_marsray_autoscaler_replicas_needed{_MODEL})"),
        ),
    ),
    Panel(
        "Decisions a minute, by reason",
        "none",
        (("{{reason}}", f"60 * {_sum_rate('marsray_autoscaler_decisions_total', 'reason')}"),),
    ),
    Panel(
        "Autoscaler: debt, saturation, quality budget, frontier",
        "none",
        (
            ("debt, s", f"max by (model) (ray_marsray_autoscaler_debt_seconds{_MODEL})"),
            ("saturated", f"max by (model) (ray_marsray_autoscaler_saturated{_MODEL})"),
            ("budget spent", f"max by (model) (ray_marsray_autoscaler_overspent{_MODEL})"),
            (
                "frontier refused",
                f"max by (model) (ray_marsray_autoscaler_frontier_refused{_MODEL})",
            ),
            (
                "frontier refuted",
                f"max by (model) (ray_marsray_autoscaler_frontier_refuted{_MODEL})",
            ),
        ),
    ),
    Panel(
        "Pace: measured speed as a share of the calibrated one",
        "percentunit",
        (("{{model}}", f"max by (model) (ray_marsray_autoscaler_pace{_MODEL})"),),
    ),
    Panel(
        "Requests",
        "none",
        (
            ("running", f"sum(ray_marsray_num_requests_running{_MODEL})"),
            ("waiting", f"sum(ray_marsray_num_requests_waiting{_MODEL})"),
        ),
    ),
    Panel(
        "Requests that no engine has begun, by tier",
        "none",
        (("{{tier}}", f"sum by (tier) (ray_marsray_num_requests_queued{_MODEL})"),),
    ),
    Panel(
        "Share of the replicas where mode exact stands in for τ = 1",
        "percentunit",
        (("{{model}}", f"avg by (model) (ray_marsray_exact_decoding{_MODEL})"),),
    ),
    Panel(
        "Loss budget spent within the last hour",
        "percentunit",
        (("{{model}}", f"max by (model) (ray_marsray_autoscaler_loss_spent_ratio{_MODEL})"),),
    ),
    Panel(
        "Requests ended a second, by outcome",
        "reqps",
        (("{{outcome}}", _sum_rate("marsray_requests_total", "outcome")),),
    ),
    Panel(
        "Requests refused a second",
        "reqps",
        (("{{status}} {{code}}", _sum_rate("marsray_rejections_total", "status", "code")),),
    ),
    Panel(
        "Engines that do not answer, and outputs moved a second",
        "none",
        (
            ("{{pod}} overdue", f"ray_marsray_engine_overdue{_MODEL} > 0"),
            ("{{model}} moved", _sum_rate("marsray_moves_total", "model")),
        ),
    ),
    Panel(
        "Tokens a second",
        "none",
        (
            ("output", _sum_rate("marsray_generation_tokens_total", "model")),
            ("prompt", _sum_rate("marsray_prompt_tokens_total", "model")),
            ("prompt, prefix hits", _sum_rate("marsray_prefix_cache_hit_tokens_total", "model")),
        ),
    ),
    Panel(
        "Output tokens per forward pass of a request",
        "none",
        (
            (
                "{{model}}",
                f"{_sum_rate('marsray_generation_tokens_total', 'model')} / "
                f"{_sum_rate('marsray_row_passes_total', 'model')}",
            ),
        ),
    ),
    Panel(
        "Prompt tokens found in the prefix cache",
        "percentunit",
        (
            (
                "{{model}}",
                f"{_sum_rate('marsray_prefix_cache_hit_tokens_total', 'model')} / "
                f"{_sum_rate('marsray_prompt_tokens_total', 'model')}",
            ),
        ),
    ),
    Panel(
        "KV cache in use",
        "percentunit",
        (("{{pod}}", f"ray_marsray_kv_cache_usage_ratio{_MODEL}"),),
    ),
    Panel(
        "Requests ended a second, by endpoint, and lines of batches",
        "reqps",
        (
            ("{{endpoint}}", _sum_rate("marsray_endpoint_requests_total", "endpoint")),
            ("lines {{outcome}}", _sum_rate("marsray_batch_lines_total", "outcome")),
        ),
    ),
)


def dashboard() -> str:
    """Return the dashboard in the JSON that Grafana imports."""
    content = {
        "uid": "marsray",
        "title": "marsray",
        "tags": ["marsray", "ray"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": [_panel(index, panel) for index, panel in enumerate(PANELS)],
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "source", "type": "datasource", "query": "prometheus", "label": "Source"},
        {
            "name": "model",
            "type": "query",
            "label": "Model",
            "datasource": _SOURCE,
            "query": "label_values(ray_marsray_num_requests_running, model)",
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
            "refresh": 2,
        },
    ]


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(index, _COLUMNS)
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": row * _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": text, "legendFormat": legend}
            for number, (legend, text) in enumerate(panel.queries)
        ],
    }
