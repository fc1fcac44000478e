"""Metrics of a replica or an ingress as Prometheus families.

Imports no Ray, torch or HTTP library.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

LABELS = ("model", "replica")
"""Labels of every metric."""
Samples = Iterable[tuple[Sequence[str], float]]
"""Pairs of labels and value."""


@dataclass(frozen=True)
class MetricDefinition:
    """Name and description of a metric that has a value for each model and replica."""

    name: str
    help: str

    def gauge(self, samples: Samples, *more_labels: str) -> Metric:
        """Return a gauge with these values, whose labels are `LABELS` and some more."""
        return self._filled(GaugeMetricFamily, samples, more_labels)

    def counter(self, samples: Samples, *more_labels: str) -> Metric:
        """Return a counter with these counts, whose labels are `LABELS` and some more."""
        return self._filled(CounterMetricFamily, samples, more_labels)

    def _filled(self, kind: type[Any], samples: Samples, more_labels: Sequence[str]) -> Metric:
        family: Metric = kind(self.name, self.help, labels=(*LABELS, *more_labels))
        for labels, value in samples:
            family.add_metric(labels, value)  # type: ignore[attr-defined]
        return family


@dataclass(frozen=True)
class HistogramDefinition(MetricDefinition):
    """Name, description and buckets of a histogram."""

    buckets: tuple[float, ...]
    """Upper ends of the buckets, inclusive and rising."""
    max_ratio: float = math.inf
    """Largest ratio of two neighbouring `bounds`, above 1."""

    @property
    def bounds(self) -> tuple[float, ...]:
        """Upper ends of the buckets that are counted in: those of `buckets`, and more between them
        from which quantiles can be told to within `max_ratio`.
        """
        return _finer(self.buckets, self.max_ratio)


@cache
def _finer(buckets: tuple[float, ...], max_ratio: float) -> tuple[float, ...]:
    bounds = [buckets[0]]
    for low, high in pairwise(buckets):
        num = 1 if max_ratio == math.inf else math.ceil(math.log(high / low, max_ratio))
        bounds += [low * (high / low) ** (part / num) for part in range(1, num)]
        bounds.append(high)
    return tuple(bounds)


class Histogram:
    """Counts of one histogram, updated from one thread only.

    An observation takes 0.1 µs. prometheus_client's histogram takes 0.6 µs and Ray's 2 µs, and a
    batch of 16 rows can make 16,000 observations a second.
    """

    __slots__ = ("_bounds", "_counts", "_definition", "_sum")

    def __init__(self, definition: HistogramDefinition) -> None:
        self._definition = definition
        self._bounds = definition.bounds
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def __getstate__(self) -> Any:
        """Leave out the bounds, which the reader computes once for all copies."""
        return self._definition, self._counts, self._sum

    def __setstate__(self, state: Any) -> None:
        """Take the counts of another histogram."""
        self._definition, self._counts, self._sum = state
        self._bounds = self._definition.bounds

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of values in each bucket of the definition's `bounds`, and of those above all."""
        return tuple(self._counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that was observed a number of times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, labels: tuple[str, str]) -> Metric:
        """Return the histogram with its present counts."""
        definition = self._definition
        cumulative, total, named = [], 0, frozenset(definition.buckets)
        for bound, count in zip((*self._bounds, math.inf), list(self._counts), strict=True):
            total += count
            if bound in named or bound == math.inf:
                name = "+Inf" if bound == math.inf else str(float(bound))
                cumulative.append((name, float(total)))
        family = HistogramMetricFamily(definition.name, definition.help, labels=LABELS)
        family.add_metric(labels, cumulative, self._sum)
        return family
