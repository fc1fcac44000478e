"""Metrics of a replica or an ingress as Prometheus families.

Imports no Ray, torch or HTTP library.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

LABELS = ("model", "replica")
"""Labels of every metric."""


@dataclass(frozen=True)
class MetricDefinition:
    """Name and description of a metric that has a value for each model and replica."""

    name: str
    help: str

    def gauge(self, labels: tuple[str, str], value: float) -> Metric:
        """Return a gauge with one value."""
        family = GaugeMetricFamily(self.name, self.help, labels=LABELS)
        family.add_metric(labels, value)
        return family

    def counter(self, labels: tuple[str, str], count: int) -> Metric:
        """Return a counter with one count."""
        family = CounterMetricFamily(self.name, self.help, labels=LABELS)
        family.add_metric(labels, count)
        return family


@dataclass(frozen=True)
class HistogramDefinition(MetricDefinition):
    """Name, description and buckets of a histogram."""

    buckets: tuple[float, ...]
    """Upper ends of the buckets, inclusive and rising."""


class Histogram:
    """Counts of one histogram, updated from one thread only.

    An observation takes 0.1 µs. prometheus_client's histogram takes 0.6 µs and Ray's 2 µs, and a
    batch of 16 rows can make 16,000 observations a second.
    """

    __slots__ = ("_counts", "_definition", "_sum")

    def __init__(self, definition: HistogramDefinition) -> None:
        self._definition = definition
        self._counts = [0] * (len(definition.buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that was observed a number of times."""
        self._counts[bisect_left(self._definition.buckets, value)] += times
        self._sum += value * times

    def family(self, labels: tuple[str, str]) -> Metric:
        """Return the histogram with its present counts."""
        definition = self._definition
        cumulative, total = [], 0
        bounds = [*map(str, map(float, definition.buckets)), "+Inf"]
        for bound, count in zip(bounds, list(self._counts), strict=True):
            total += count
            cumulative.append((bound, float(total)))
        family = HistogramMetricFamily(definition.name, definition.help, labels=LABELS)
        family.add_metric(labels, cumulative, self._sum)
        return family
