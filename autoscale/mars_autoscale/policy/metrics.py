"""The autoscaler's metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mars_autoscale.policy import budget
from mars_autoscale.policy.decision import Decision
from mars_autoscale.policy.outer_loop import OuterLoop

_DECISION_GAUGES: dict[str, tuple[str, Callable[[Decision], float]]] = {
    "replicas": ("Replicas that are ordered.", lambda each: each.num_replicas),
    "replicas_needed": ("Replicas that the load needs, before rounding.", lambda each: each.needed),
    "floor_threshold": (
        "Lowest threshold that is allowed for tier default.",
        lambda each: each.range.floor_threshold,
    ),
    "flex_floor_threshold": (
        "Lowest threshold that is allowed for tier flex.",
        lambda each: each.range.flex_floor_threshold,
    ),
    "feed_forward": (
        "Gain over the fastest lossless decoding that the arrivals need of the ready replicas.",
        lambda each: each.range.feed_forward,
    ),
    "debt_seconds": (
        "Seconds at the lowest allowed threshold that no replica has paid for yet.",
        lambda each: each.debt,
    ),
    "saturated": (
        "1 while nothing is left to give and late requests are refused.",
        lambda each: each.range.is_saturated,
    ),
    "frontier_refuted": (
        "1 while audits of what was served contradict frontier.json and nothing may be lost.",
        lambda each: each.is_refuted,
    ),
    "overspent": (
        "1 while tier default's budget of quality is spent.",
        lambda each: each.is_overspent,
    ),
}


def exposition(loops: Mapping[str, OuterLoop]) -> str:
    """Return all models' metrics as text.

    Args:
        loops: outer loops by the model's name.
    """
    return generate_latest(AutoscalerMetrics(loops)).decode()


class AutoscalerMetrics(Collector):
    """The latest decision of each model, and the number of decisions by reason."""

    def __init__(self, loops: Mapping[str, OuterLoop]) -> None:
        self._loops = loops

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family with its values now."""
        loops = dict(self._loops)
        latest = {model: loop.records[-1] for model, loop in loops.items() if loop.records}
        for name, (text, value) in _DECISION_GAUGES.items():
            values = {model: value(record.decision) for model, record in latest.items()}
            yield _gauge(name, text, values)
        num_ready = {model: record.num_ready for model, record in latest.items()}
        yield _gauge("replicas_ready", "Replicas that report.", num_ready)
        num_starting = {model: record.num_starting for model, record in latest.items()}
        text = "Replicas that are ordered and do not serve yet."
        yield _gauge("replicas_starting", text, num_starting)
        shares = {model: _spent_share(loop) for model, loop in loops.items()}
        spent = {model: share for model, share in shares.items() if share is not None}
        text = "Share of the loss budget that tier default has spent within the last hour."
        yield _gauge("loss_spent_ratio", text, spent)
        refused = {
            model: loop.basis.refused is not None
            for model, loop in loops.items()
            if loop.basis is not None
        }
        yield _gauge("frontier_refused", "1 if frontier.json is not used.", refused)
        drifts = {model: loop.state.drift for model, loop in loops.items()}
        yield _gauge(
            "audit_evidence",
            "Evidence of audits against frontier.json, from 0 to the alarm at 1.",
            {model: drift.evidence for model, drift in drifts.items()},
        )
        yield _gauge(
            "audit_loss_factor",
            "Multiple of frontier.json's losses that the budget counts, by audits.",
            {model: drift.loss_factor for model, drift in drifts.items()},
        )
        name = "marsray_autoscaler_decisions_total"
        counter = CounterMetricFamily(name, "Decisions, by reason.", labels=["model", "reason"])
        for model, loop in loops.items():
            for reason, count in list(loop.counts.items()):  # another thread may add a reason
                counter.add_metric([model, reason], count)
        yield counter


def _gauge(name: str, text: str, values: Mapping[str, float]) -> Metric:
    gauge = GaugeMetricFamily(f"marsray_autoscaler_{name}", text, labels=["model"])
    for model, value in values.items():
        gauge.add_metric([model], float(value))
    return gauge


def _spent_share(loop: OuterLoop) -> float | None:
    if loop.basis is None:
        return None
    return budget.spent_share(loop.state.outer.losses, loop.basis.settings.loss_budget)
