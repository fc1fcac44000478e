"""The autoscaler's metrics."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mars_autoscale.policy.outer_loop import OuterLoop

_DECISION_GAUGES = {
    "replicas": ("num_replicas", "Replicas that are ordered."),
    "replicas_needed": ("needed", "Replicas that the load needs, before rounding."),
    "floor_threshold": ("floor_threshold", "Lowest threshold that is allowed for tier default."),
    "flex_floor_threshold": (
        "flex_floor_threshold",
        "Lowest threshold that is allowed for tier flex.",
    ),
    "feed_forward": (
        "feed_forward",
        "Gain over the fastest lossless decoding that the arrivals need of the ready replicas.",
    ),
    "pace": ("pace", "Measured speed of the replicas as a share of frontier.json's, at most 1."),
    "debt_seconds": (
        "debt",
        "Seconds at the lowest allowed threshold that no replica has paid for yet.",
    ),
    "saturated": (
        "is_saturated",
        "1 while nothing is left to give and late requests are refused.",
    ),
    "frontier_refuted": (
        "is_refuted",
        "1 while audits of what was served contradict frontier.json and nothing may be lost.",
    ),
    "overspent": ("is_overspent", "1 while tier default's budget of quality is spent."),
    "replicas_ready": ("num_ready", "Replicas that report."),
    "replicas_starting": ("num_starting", "Replicas that are ordered and do not serve yet."),
}
"""Field of `AutoscalerDecision` and description of each gauge, by the gauge's name."""


class AutoscalerMetrics(Collector):
    """The latest decision of each model, by the model's name, and the decisions by reason."""

    def __init__(self, loops: Mapping[str, OuterLoop]) -> None:
        self._loops = loops

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family with its values now."""
        loops = dict(self._loops)
        latest = {model: loop.records[-1] for model, loop in loops.items() if loop.records}
        for name, (field, text) in _DECISION_GAUGES.items():
            values = {model: getattr(record, field) for model, record in latest.items()}
            yield _gauge(name, text, values)
        yield _gauge(
            "loss_spent_ratio",
            "Share of the loss budget that tier default has spent within the last hour.",
            {model: loop.spent_share for model, loop in loops.items()},
        )
        yield _gauge(
            "frontier_refused",
            "1 if frontier.json is not used.",
            {
                model: loop.basis.refused is not None
                for model, loop in loops.items()
                if loop.basis is not None
            },
        )
        yield _gauge(
            "audit_evidence",
            "Evidence of audits against frontier.json, from 0 to the alarm at 1.",
            {model: loop.state.drift.evidence for model, loop in loops.items()},
        )
        yield _gauge(
            "audit_loss_factor",
            "Multiple of frontier.json's losses that the budget counts, by audits.",
            {model: loop.state.drift.loss_factor for model, loop in loops.items()},
        )
        name = "marsray_autoscaler_decisions_total"
        counter = CounterMetricFamily(name, "Decisions, by reason.", labels=["model", "reason"])
        for model, loop in loops.items():
            for reason, count in list(loop.counts.items()):  # another thread may add a reason
                counter.add_metric([model, reason], count)
        yield counter


def _gauge(name: str, text: str, values: Mapping[str, float | None]) -> Metric:
    gauge = GaugeMetricFamily(f"marsray_autoscaler_{name}", text, labels=["model"])
    for model, value in values.items():
        if value is not None:
            gauge.add_metric([model], float(value))
    return gauge
