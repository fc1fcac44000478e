"""Copies metrics to Ray's own exporter, once a second. Knows none of them.

Ray's instruments cost 2 µs a record, so nothing is recorded there as it happens. What Ray exports
has its prefix ``ray_``, its names otherwise the same; histograms are written as the gauges
``..._bucket``, ``..._sum`` and ``..._count`` that make one up, which is exact (Ray's own histograms
guess the sum) and is queried as any histogram. The label ``replica`` is Serve's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from ray.serve import metrics

PERIOD_S = 1.0
_SERVES_OWN = "replica"  # a label that Ray Serve sets and does not let anybody else set

_log = logging.getLogger(__name__)


class RayMirror:
    """Ray's instruments with the values of a collector; made in a replica of Ray Serve."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._gauges: dict[str, metrics.Gauge] = {}
        self._counters: dict[str, metrics.Counter] = {}
        self._counted: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def update(self) -> None:
        """Write the values of now."""
        for family in self._collector.collect():
            write = self._count if family.type == "counter" else self._set
            for sample in family.samples:
                labels = {key: value for key, value in sample.labels.items() if key != _SERVES_OWN}
                write(family, sample, labels)

    def start(self) -> Callable[[], None]:
        """Write them every second, from a thread; returns what ends it."""
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(PERIOD_S):
                try:
                    self.update()
                except Exception:
                    _log.exception("metrics cannot be given to Ray and will be missing there")
                    return

        threading.Thread(target=run, name="ray-metrics", daemon=True).start()
        return ended.set

    def _set(self, family: Metric, sample: Sample, labels: dict[str, str]) -> None:
        gauge = self._gauges.get(sample.name)
        if gauge is None:
            gauge = metrics.Gauge(sample.name, family.documentation, tuple(labels))
            self._gauges[sample.name] = gauge
        gauge.set(sample.value, labels)

    def _count(self, family: Metric, sample: Sample, labels: dict[str, str]) -> None:
        counter = self._counters.get(sample.name)
        if counter is None:
            counter = metrics.Counter(sample.name, family.documentation, tuple(labels))
            self._counters[sample.name] = counter
        key = (sample.name, tuple(labels.items()))
        counted = self._counted.get(key, 0)
        # one that has fallen counts from its start again
        added = sample.value - (counted if counted <= sample.value else 0)
        if added > 0:  # Ray refuses 0
            counter.inc(added, labels)
        self._counted[key] = sample.value
