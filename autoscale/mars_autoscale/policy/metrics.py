"""Metrics of autoscaling, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mars_autoscale.policy.control import Control, Record

_GAUGES: dict[str, tuple[str, Callable[[Record], float]]] = {
    "replicas": ("Replicas that are asked for.", lambda each: each.decision.num_replicas),
    "replicas_ready": ("Replicas that report.", lambda each: each.num_ready),
    "replicas_needed": (
        "Replicas for what arrives, before rounding.",
        lambda each: each.decision.needed,
    ),
    "floor_threshold": (
        "Lowest threshold that is allowed for tier default.",
        lambda each: each.decision.floor_threshold,
    ),
    "flex_floor_threshold": (
        "Lowest threshold that is allowed for tier flex.",
        lambda each: each.decision.flex_floor_threshold,
    ),
    "feed_forward": (
        "Gain in speed that what arrives needs of the replicas.",
        lambda each: each.decision.feed_forward,
    ),
    "debt_seconds": (
        "Seconds at the lowest threshold that no replica has paid yet.",
        lambda each: each.decision.debt,
    ),
    "saturated": (
        "1 while nothing is left to give and late requests are refused.",
        lambda each: each.decision.is_saturated,
    ),
    "overspent": (
        "1 while tier default's budget of quality is spent.",
        lambda each: each.decision.is_overspent,
    ),
}


def exposition(controls: Mapping[str, Control]) -> str:
    """All models' metrics.

    Args:
        controls: by the model's name.
    """
    return generate_latest(AutoscalerMetrics(controls)).decode()


class AutoscalerMetrics(Collector):
    """The latest decision of each model, and how many there were of each reason."""

    def __init__(self, controls: Mapping[str, Control]) -> None:
        self._controls = controls

    def collect(self) -> Iterator[Metric]:
        """All of it as families."""
        controls = dict(self._controls)
        for name, (text, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"marsray_autoscaler_{name}", text, labels=["model"])
            for model, control in controls.items():
                if control.records:
                    gauge.add_metric([model], float(value(control.records[-1])))
            yield gauge
        yield self._frontier(controls)
        yield self._decisions(controls)

    def _frontier(self, controls: Mapping[str, Control]) -> Metric:
        name = "marsray_autoscaler_frontier_refused"
        gauge = GaugeMetricFamily(name, "1 where frontier.json is not used.", labels=["model"])
        for model, control in controls.items():
            if control.plan is not None:
                gauge.add_metric([model], float(control.plan.refused is not None))
        return gauge

    def _decisions(self, controls: Mapping[str, Control]) -> Metric:
        name = "marsray_autoscaler_decisions_total"
        counter = CounterMetricFamily(name, "Decisions, by reason.", labels=["model", "reason"])
        for model, control in controls.items():
            for reason, count in list(control.counts.items()):  # decisions go on meanwhile
                counter.add_metric([model, reason], count)
        return counter
