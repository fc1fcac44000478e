"""The load of a model between two samples. Imports no Ray, torch or HTTP library."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from mars_serve.cli.top.sample import Decision, ModelMetrics, Sample, difference, quantile

_WINDOW_S = 30.0
"""Seconds that percentiles are taken over; a second alone has too few requests."""
_DECISIONS = 4


@dataclass(frozen=True)
class ModelLoad:
    """The load of a model; None for what is not known."""

    model: str
    num_replicas: int
    """Replicas that report."""
    num_overdue: int
    """Replicas that show no sign of life."""
    num_ordered: int | None
    """Replicas that the autoscaler has ordered."""
    max_replicas: int | None
    num_running: int
    num_waiting: int
    queued: dict[str, int]
    """Requests that no engine has begun, by tier, as the ingress replicas count them."""
    exact_share: float | None
    """Share of the replicas whose mode without loss is exact now, and not ar."""
    threshold: float | None
    """Mean live τ of tier default over the replicas."""
    flex_threshold: float | None
    """Mean live τ of tier flex."""
    is_automatic: bool | None
    """Whether the autoscaler controls τ."""
    tokens_per_s: float | None
    """Output tokens a second since the sample before."""
    prompt_tokens_per_s: float | None
    tokens_per_forward: float | None
    """Output tokens for each forward pass of a request, over the last half minute."""
    first_token_s: dict[str, float | None]
    """Percentiles of the time to the first token over the last half minute: p50, p90 and p99."""
    kv_share: float | None
    """Share of the KV cache in use, of the fullest replica."""
    ended_per_s: float | None
    """Requests that have ended each second, other than by a refusal."""
    refused_per_s: float | None
    refused: dict[str, int]
    """Refused requests since the server's start, by status and error code."""
    decisions: list[Decision]
    """The latest decisions of the autoscaler, newest first."""

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        found = asdict(self)
        found["decisions"] = [each.model_dump() for each in self.decisions]
        return found

    @property
    def way(self) -> str:
        """How requests that name no mode are decoded now, in words."""
        if self.threshold is None:
            return "unknown"
        if self.threshold < 1:
            return "threshold"
        if self.exact_share is None:
            return "without loss"
        return {0.0: "ar", 1.0: "exact"}.get(self.exact_share, "exact and ar")


class LoadWindow:
    """The latest samples of one server, from which loads are computed."""

    def __init__(self) -> None:
        self._samples = deque[Sample]()

    def add(self, sample: Sample) -> list[ModelLoad]:
        """Take a sample and return the load of each model."""
        while len(self._samples) > 1 and sample.time_s - self._samples[0].time_s > _WINDOW_S:
            self._samples.popleft()
        self._samples.append(sample)
        return [self._load(name) for name in sample.metrics]

    def forget(self) -> None:
        """Drop all samples, since the server has ended."""
        self._samples.clear()

    def _load(self, name: str) -> ModelLoad:
        now, last = self._samples[-1], self._before(name, -2)
        first = self._before(name, 0)
        metrics, gauges = now.metrics[name], now.metrics[name].gauges
        seconds = now.time_s - self._samples[-2].time_s if last is not None else 0.0
        rates = _rates(metrics, last, seconds)
        live, scaler = now.lives.get(name), now.autoscalers.get(name)
        decisions = scaler.decisions if scaler is not None else []
        return ModelLoad(
            model=name,
            num_replicas=len(gauges["num_requests_running"]),
            num_overdue=int(sum(gauges["engine_overdue"].values())),
            num_ordered=decisions[-1].num_replicas if decisions else None,
            max_replicas=scaler.plan.max_replicas if scaler and scaler.plan else None,
            num_running=int(sum(gauges["num_requests_running"].values())),
            num_waiting=int(sum(gauges["num_requests_waiting"].values())),
            queued={tier: int(num) for tier, num in sorted(metrics.queued.items())},
            exact_share=_mean(gauges["exact_decoding"]),
            threshold=_mean(gauges["confidence_threshold"]),
            flex_threshold=_mean(gauges["flex_confidence_threshold"]),
            is_automatic=None if live is None else live.is_automatic,
            tokens_per_s=rates.get("generation_tokens_total"),
            prompt_tokens_per_s=rates.get("prompt_tokens_total"),
            tokens_per_forward=_tokens_per_forward(metrics, first),
            first_token_s=_percentiles(metrics, first),
            kv_share=max(gauges["kv_cache_usage_ratio"].values(), default=None),
            ended_per_s=rates.get("ended"),
            refused_per_s=rates.get("refused"),
            refused={key: int(value) for key, value in sorted(metrics.rejections.items())},
            decisions=decisions[: -_DECISIONS - 1 : -1],
        )

    def _before(self, name: str, index: int) -> ModelMetrics | None:
        """Return a model's metrics of an earlier sample; None if there is none."""
        if len(self._samples) < 2:
            return None
        return self._samples[index].metrics.get(name)


def _rates(after: ModelMetrics, before: ModelMetrics | None, seconds: float) -> dict[str, float]:
    """Return the growth of counts each second; empty without an earlier sample."""
    if before is None or seconds <= 0:
        return {}
    grown = difference(after.counters, before.counters)
    outcomes = difference(after.outcomes, before.outcomes)
    grown["refused"] = sum(difference(after.rejections, before.rejections).values())
    grown["ended"] = sum(value for key, value in outcomes.items() if not key[:1].isdigit())
    return {key: value / seconds for key, value in grown.items()}


def _tokens_per_forward(after: ModelMetrics, before: ModelMetrics | None) -> float | None:
    if before is None:  # the counts since the server's start are no news
        return None
    grown = difference(after.counters, before.counters)
    passes = grown.get("row_passes_total", 0.0)
    return grown["generation_tokens_total"] / passes if passes else None


def _percentiles(after: ModelMetrics, before: ModelMetrics | None) -> dict[str, float | None]:
    buckets = difference(after.first_tokens, before.first_tokens) if before is not None else {}
    return {f"p{share}": quantile(buckets, share / 100) for share in (50, 90, 99)}


def _mean(values: dict[str, float]) -> float | None:
    return fmean(values.values()) if values else None
