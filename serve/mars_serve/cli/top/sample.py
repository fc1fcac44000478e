"""Reads from a server's endpoints how it is at one moment. Imports no Ray or torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

_TTFT = "marsray_time_to_first_token_seconds_bucket"


class Decision(BaseModel):
    """A decision of the autoscaler."""

    time_s: float
    reason: str
    num_replicas: int
    replicas_before: int
    num_ready: int
    num_starting: int
    threshold: float | None = None
    requests_per_s: float | None = None
    is_saturated: bool = False
    problem: str | None = None


class _Plan(BaseModel):
    max_replicas: int


class Autoscaler(BaseModel):
    """The autoscaling of a model."""

    plan: _Plan | None = None
    decisions: list[Decision]


class Autoscalers(BaseModel):
    """The response of ``GET /admin/autoscaler``."""

    models: dict[str, Autoscaler | None]


class Live(BaseModel):
    """The live τ of a model."""

    confidence_threshold: float
    is_automatic: bool


class Lives(BaseModel):
    """The response of ``GET /admin/threshold``."""

    models: dict[str, Live]


@dataclass
class ModelMetrics:
    """The metrics of one model."""

    gauges: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    """Values by replica, by the metric's name without ``marsray_``."""
    counters: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Counts over all replicas, by the metric's name without ``marsray_``."""
    first_tokens: dict[float, float] = field(default_factory=lambda: defaultdict(float))
    """Requests by the upper end in seconds of the bucket that their first token came in,
    cumulative."""
    outcomes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Requests by how they ended."""
    queued: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Requests that no engine has begun, by tier."""
    rejections: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Refused requests by status and error code."""


@dataclass(frozen=True)
class Sample:
    """A server's own figures at one moment."""

    time_s: float
    """Seconds by a clock that never goes back."""
    metrics: Mapping[str, ModelMetrics]
    """Metrics by model."""
    lives: Mapping[str, Live] = field(default_factory=dict)
    """Live τ by model; empty without an administrator's key."""
    autoscalers: Mapping[str, Autoscaler | None] = field(default_factory=dict)
    """Autoscaling by model; empty without an administrator's key."""


def parsed_metrics(text: str, models: Iterable[str]) -> dict[str, ModelMetrics]:
    """Read Prometheus' text format.

    Args:
        text: the response of ``GET /metrics``.
        models: names of the models to tell of.

    Raises:
        ValueError: it is no such text.
    """
    found = {name: ModelMetrics() for name in models}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            if labels.get("model") in found:
                _add(found[labels["model"]], family.type, name, labels, value)
    return found


def _add(
    model: ModelMetrics, kind: str, name: str, labels: Mapping[str, str], value: float
) -> None:
    short = name.removeprefix("marsray_")
    if name == _TTFT:
        model.first_tokens[float(labels["le"])] += value
    elif short == "requests_total":
        model.outcomes[labels["outcome"]] += value
    elif short == "rejections_total":
        model.rejections[f"{labels['status']} {labels['code']}".strip()] += value
    elif short == "num_requests_queued":
        model.queued[labels["tier"]] += value
    elif kind == "gauge":
        model.gauges[short][labels.get("replica", "")] = value
    elif kind == "counter":
        model.counters[short] += value


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """Return a quantile of a cumulative histogram, in between its ends by straight lines.

    Args:
        buckets: number of values up to each end.
        share: share of the values that are not above the quantile.

    Returns:
        The quantile; infinite if it is above the last finite end, None without values.
    """
    ends = sorted(buckets)
    total = buckets[ends[-1]] if ends else 0.0
    if total <= 0:
        return None
    low, below = 0.0, 0.0
    for end in ends:
        if buckets[end] >= share * total:
            if math.isinf(end) or buckets[end] == below:
                return end
            return low + (end - low) * (share * total - below) / (buckets[end] - below)
        low, below = end, buckets[end]
    return math.inf


def difference(after: Mapping[Any, float], before: Mapping[Any, float]) -> dict[Any, float]:
    """Return what counts have grown by; the counts themselves where they have begun anew."""
    grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
    return dict(after) if any(value < 0 for value in grown.values()) else grown
