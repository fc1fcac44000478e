"""Copies any collector's metrics to Ray's exporter once a second.

An observation costs 2 µs with Ray's instruments, which is too slow to record events one by one.
Ray's exporter adds the prefix ``ray_`` to every name. A histogram is copied as the gauges
``..._bucket``, ``..._sum`` and ``..._count``: they are exact, while Ray's histograms guess the sum,
and are queried as any histogram. Ray Serve sets the label ``replica``.
"""

import logging
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

PERIOD_S = 1.0
"""Seconds between two copies."""
_SERVE_LABEL = "replica"
"""Label that Ray Serve sets in its replicas, and that no metric may set itself."""

_log = logging.getLogger(__name__)


class RayMirror:
    """A collector's metrics as instruments of Ray; create it in an actor or a Serve replica.

    ``metrics`` is the module ``ray.serve.metrics`` in a Serve replica, ``ray.util.metrics`` in
    another actor, which need not load Ray Serve.
    """

    def __init__(self, collector: Collector, metrics: ModuleType) -> None:
        self._collector = collector
        self._metrics = metrics
        self._instruments: dict[str, Any] = {}
        """Ray's gauges and counters, by name."""
        self._counted: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def update(self) -> None:
        """Copy the present values."""
        for family in self._collector.collect():
            for sample in family.samples:
                labels = {key: value for key, value in sample.labels.items() if key != _SERVE_LABEL}
                self._write(family, sample, labels)

    def start(self) -> Callable[[], None]:
        """Copy every second in a thread; returns a function that ends the thread."""
        ended = threading.Event()

        def run() -> None:
            is_failing = False
            while not ended.wait(PERIOD_S):
                try:
                    self.update()
                    is_failing = False
                except Exception:
                    if not is_failing:  # once for all failures in a row
                        _log.exception("metrics cannot be given to Ray; trying again")
                    is_failing = True

        threading.Thread(target=run, name="ray-metrics", daemon=True).start()
        return ended.set

    def _write(self, family: Metric, sample: Sample, labels: dict[str, str]) -> None:
        is_counter = family.type == "counter"
        kind = self._metrics.Counter if is_counter else self._metrics.Gauge
        instrument = self._instruments.get(sample.name)
        if instrument is None:
            instrument = kind(sample.name, family.documentation, tuple(labels))
            self._instruments[sample.name] = instrument
        if not is_counter:
            instrument.set(sample.value, labels)
            return
        key = (sample.name, tuple(labels.items()))
        counted = self._counted.get(key, 0)
        # a counter that has fallen was restarted from 0
        added = sample.value - (counted if counted <= sample.value else 0)
        if added > 0:  # Ray refuses 0
            instrument.inc(added, labels)
        self._counted[key] = sample.value
