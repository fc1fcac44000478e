"""What a replica and the ingress count and time, as Prometheus families.

Counting is by hand where it happens once a forward pass and request: prometheus_client's histogram
costs 0.6 µs an observation and Ray's 2 µs, this one 0.1 µs, and 16 rows can make 16,000 a second.
What the engine counts itself is read from it when somebody looks. Knows neither HTTP nor Ray.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from time import perf_counter

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mars_platform.method.mode import Mode
from mars_platform.tier import Tier
from mars_serve.engine.ipc.loop import EngineDied, EngineLoop
from mars_serve.engine.request import EngineStatus, Request, StepOutput
from mars_serve.observability.request_load import RequestLoad

_LABELS = ("model", "replica")

# Seconds. A step takes 1 ms to 1 s, a request from a few of them to minutes.
_TOKEN_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05,
            0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)  # fmt: skip
_WAIT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5,
           5, 7.5, 10, 20, 40, 80, 160)  # fmt: skip
_REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50,
              60, 120, 240, 480, 960)  # fmt: skip
_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65)
_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975,
               0.99, 0.999, 1)  # fmt: skip


@dataclass(frozen=True)
class _Definition:
    """A metric with a value for each model and replica."""

    name: str
    help: str


@dataclass(frozen=True)
class _HistogramDefinition(_Definition):
    buckets: tuple[float, ...]
    """Upper ends, included."""


_TIME_TO_FIRST_TOKEN = _HistogramDefinition(
    "marsray_time_to_first_token_seconds",
    "Seconds from a request's arrival at the replica to its first tokens.",
    _WAIT_S,
)
_INTER_TOKEN_LATENCY = _HistogramDefinition(
    "marsray_inter_token_latency_seconds",
    "Seconds for each token after the first forward pass: the time between two passes of a "
    "request, shared by the tokens that the later one gave.",
    _TOKEN_S,
)
_E2E_LATENCY = _HistogramDefinition(
    "marsray_e2e_request_latency_seconds",
    "Seconds from a request's arrival at the replica to its end, requests that were cancelled "
    "after their first output included.",
    _REQUEST_S,
)
_QUEUE_TIME = _HistogramDefinition(
    "marsray_request_queue_time_seconds",
    "Seconds from a request's arrival to its first forward pass.",
    _WAIT_S,
)
_TOKENS_PER_FORWARD = _HistogramDefinition(
    "marsray_tokens_per_forward",
    "Tokens that a forward pass gave a request.",
    _TOKENS,
)
_REQUEST_THRESHOLD = _HistogramDefinition(
    "marsray_request_confidence_threshold",
    "Mean threshold over the passes of a request in mode threshold.",
    _THRESHOLDS,
)

_RUNNING = _Definition("marsray_num_requests_running", "Requests in the running batch.")
_WAITING = _Definition("marsray_num_requests_waiting", "Requests that wait to run.")
_KV_USAGE = _Definition(
    "marsray_kv_cache_usage_ratio",
    "Share of the pages of keys and values that requests hold, 0 to 1; pages that only cache a "
    "prefix count as free.",
)
_THRESHOLD = _Definition(
    "marsray_confidence_threshold",
    "Threshold of the requests that give none of their own, before their floors.",
)
_COMPUTE_RATIO = _Definition(
    "marsray_rehearsal_compute_ratio",
    "Of the time that a rehearsal stretches steps to, the part that they really take, over the "
    "last minute of steps; above 0.5 the rehearsal is not valid on this machine.",
)
_FLEX_THRESHOLD = _Definition(
    "marsray_flex_confidence_threshold",
    "The same for requests of service tier flex.",
)

_PROMPT_TOKENS = _Definition("marsray_prompt_tokens_total", "Prompt tokens of admitted requests.")
_GENERATION_TOKENS = _Definition("marsray_generation_tokens_total", "Output tokens.")
_FORWARD_PASSES = _Definition(
    "marsray_forward_passes_total", "Forward passes, each over all requests of the batch."
)
_ROW_PASSES = _Definition(
    "marsray_row_passes_total",
    "Forward passes that gave a request tokens, counted for each request.",
)
_HIT_TOKENS = _Definition(
    "marsray_prefix_cache_hit_tokens_total",
    "Tokens that were found stored instead of being computed, in requests that come back after a "
    "preemption too.",
)
_PREEMPTIONS = _Definition(
    "marsray_preemptions_total", "Times that a request gave its pages up for another."
)

_REQUESTS = _Definition(
    "marsray_requests_total",
    "Requests to generate, by how they ended: stop, length, tool_calls, cancelled (the client "
    "left), error, or rejected with a status.",
)
_REJECTIONS = _Definition(
    "marsray_rejections_total", "Requests to generate that were refused, by status and error code."
)


class _Histogram:
    """Counts of one histogram; updated from one thread only."""

    __slots__ = ("_buckets", "_counts", "_definition", "_sum")

    def __init__(self, definition: _HistogramDefinition) -> None:
        self._definition = definition
        self._buckets = definition.buckets
        self._counts = [0] * (len(self._buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._buckets, value)] += times
        self._sum += value * times

    def family(self, labels: tuple[str, ...]) -> Metric:
        cumulative, total = [], 0
        bounds = [*map(str, map(float, self._buckets)), "+Inf"]
        for bound, count in zip(bounds, list(self._counts), strict=True):
            total += count
            cumulative.append((bound, float(total)))
        definition = self._definition
        family = HistogramMetricFamily(definition.name, definition.help, labels=_LABELS)
        family.add_metric(labels, cumulative, self._sum)
        return family


class ReplicaTelemetry(Collector):
    """Metrics of one replica: times of its requests, and what its engine reports.

    `watch` belongs to one event loop; the rest may be called from any thread.
    """

    def __init__(self, model: str, replica: str, loop: EngineLoop) -> None:
        self._labels = (model, replica)
        self._loop = loop
        self._first = _Histogram(_TIME_TO_FIRST_TOKEN)
        self._gap = _Histogram(_INTER_TOKEN_LATENCY)
        self._e2e = _Histogram(_E2E_LATENCY)
        self._queue = _Histogram(_QUEUE_TIME)
        self._tokens = _Histogram(_TOKENS_PER_FORWARD)
        self._threshold = _Histogram(_REQUEST_THRESHOLD)
        self.load = RequestLoad()
        """What `watch` has seen come and go."""

    async def watch(
        self, outputs: AsyncGenerator[StepOutput | None], request: Request
    ) -> AsyncGenerator[StepOutput | None]:
        """Pass on what a request gets, and time it; closing this closes ``outputs``.

        None stands for nothing at all; see `EngineLoop.stream`.
        """
        start = last = perf_counter()
        num_outputs = num_passes = num_all = 0
        threshold_sum = 0.0
        self.load.come(request)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if output is None:
                        yield None
                        continue
                    if not num_outputs:
                        self._queue.observe(output.queue_s)
                        self.load.begun(request, output.num_prefix_hit_tokens)
                    num_outputs += 1
                    num_tokens = len(output.tokens)
                    num_all += num_tokens
                    if num_tokens:
                        now = perf_counter()
                        if num_passes:
                            self._gap.observe((now - last) / num_tokens, num_tokens)
                        else:
                            self._first.observe(now - start)
                        last = now
                        num_passes += 1
                        threshold_sum += output.threshold
                        self._tokens.observe(num_tokens)
                    yield output
        finally:
            self.load.gone(request, has_begun=num_outputs > 0, num_tokens=num_all)
            if num_outputs:
                self._e2e.observe(perf_counter() - start)
            if num_passes and request.options.mode is Mode.THRESHOLD:
                self._threshold.observe(threshold_sum / num_passes)

    def exposition(self) -> str:
        """All of it in Prometheus' text format, as of now."""
        return generate_latest(self).decode()

    def collect(self) -> Iterator[Metric]:
        """All of it as families; an engine that has died reports nothing of itself."""
        timed = self._first, self._gap, self._e2e, self._queue, self._tokens, self._threshold
        for histogram in timed:
            yield histogram.family(self._labels)
        try:
            status = self._loop.status()
        except EngineDied:
            return
        for definition, value in self._gauges(status):
            gauge = GaugeMetricFamily(definition.name, definition.help, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for definition, count in _counters(status):
            counter = CounterMetricFamily(definition.name, definition.help, labels=_LABELS)
            counter.add_metric(self._labels, count)
            yield counter

    def _gauges(self, status: EngineStatus) -> list[tuple[_Definition, float]]:
        share = status.compute_share
        return [
            *([] if share is None else [(_COMPUTE_RATIO, share)]),
            (_RUNNING, status.num_running),
            (_WAITING, status.num_waiting),
            (_KV_USAGE, 1 - status.num_free_pages / status.num_pages),
            (_THRESHOLD, self._loop.live.threshold),
            (_FLEX_THRESHOLD, self._loop.live.threshold_of(Tier.FLEX)),
        ]


def _counters(status: EngineStatus) -> list[tuple[_Definition, int]]:
    return [
        (_PROMPT_TOKENS, status.num_prompt_tokens),
        (_GENERATION_TOKENS, status.num_generated_tokens),
        (_FORWARD_PASSES, status.num_forward_passes),
        (_ROW_PASSES, status.num_row_passes),
        (_HIT_TOKENS, status.num_prefix_hit_tokens),
        (_PREEMPTIONS, status.num_preemptions),
    ]


class IngressTelemetry(Collector):
    """Metrics of one ingress replica: how requests ended.

    Args:
        models: Names that may become label values; requests for any other count as model "".
        replica: Name, unique among the replicas that one server is scraped for.
    """

    def __init__(self, models: Collection[str], replica: str = "ingress") -> None:
        self.models = frozenset(models)
        self._replica = replica
        self._requests = Counter[tuple[str, str]]()
        self._rejections = Counter[tuple[str, str, str]]()

    def count(self, model: str | None, outcome: str) -> None:
        """Count a request that has ended."""
        self._requests[self._known(model), outcome] += 1

    def count_rejection(self, model: str | None, status: int, code: str | None) -> None:
        """Count a request that was refused; ``code`` is one of the server's own."""
        self._rejections[self._known(model), str(status), code or ""] += 1

    def exposition(self) -> str:
        """All of it in Prometheus' text format, as of now."""
        return generate_latest(self).decode()

    def collect(self) -> Iterator[Metric]:
        """All of it as families."""
        requests = CounterMetricFamily(_REQUESTS.name, _REQUESTS.help, labels=(*_LABELS, "outcome"))
        for (model, outcome), count in list(self._requests.items()):
            requests.add_metric((model, self._replica, outcome), count)
        yield requests
        rejections = CounterMetricFamily(
            _REJECTIONS.name, _REJECTIONS.help, labels=(*_LABELS, "status", "code")
        )
        for (model, status, code), count in list(self._rejections.items()):
            rejections.add_metric((model, self._replica, status, code), count)
        yield rejections

    def _known(self, model: str | None) -> str:
        return model if model in self.models else ""
