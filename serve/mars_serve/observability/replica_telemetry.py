"""Counts and times the requests of a replica.

What the engine counts by itself is read from its status when the metrics are read.
Imports no Ray or HTTP library.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from time import perf_counter

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from mars_platform.method.mode import Mode
from mars_platform.tier import Tier
from mars_serve.engine.ipc.loop import EngineDied, EngineLoop
from mars_serve.engine.outputs import EngineStatus, StepOutput
from mars_serve.engine.request import Request
from mars_serve.observability.metric_families import (
    Histogram,
    HistogramDefinition,
    MetricDefinition,
)
from mars_serve.observability.request_load import RequestLoad

# Upper ends of the buckets. Seconds: a step takes 1 ms to 1 s, a request takes steps to minutes.
_TOKEN_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05,
            0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)  # fmt: skip
_WAIT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5,
           5, 7.5, 10, 20, 40, 80, 160)  # fmt: skip
_REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50,
              60, 120, 240, 480, 960)  # fmt: skip
_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65)
_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975,
               0.99, 0.999, 1)  # fmt: skip


_TIME_TO_FIRST_TOKEN = HistogramDefinition(
    "marsray_time_to_first_token_seconds",
    "Seconds from a request's arrival at the replica to its first tokens.",
    _WAIT_S,
)
_INTER_TOKEN_LATENCY = HistogramDefinition(
    "marsray_inter_token_latency_seconds",
    "Seconds for each token after the first forward pass: the time between two passes of a "
    "request, shared by the tokens that the later one gave.",
    _TOKEN_S,
)
_E2E_LATENCY = HistogramDefinition(
    "marsray_e2e_request_latency_seconds",
    "Seconds from a request's arrival at the replica to its end, requests that were cancelled "
    "after their first output included.",
    _REQUEST_S,
)
_QUEUE_TIME = HistogramDefinition(
    "marsray_request_queue_time_seconds",
    "Seconds from a request's arrival to its first forward pass.",
    _WAIT_S,
)
_TOKENS_PER_FORWARD = HistogramDefinition(
    "marsray_tokens_per_forward",
    "Tokens that a forward pass gave a request.",
    _TOKENS,
)
_REQUEST_THRESHOLD = HistogramDefinition(
    "marsray_request_confidence_threshold",
    "Mean threshold over the passes of a request in mode threshold.",
    _THRESHOLDS,
)

_RUNNING = MetricDefinition("marsray_num_requests_running", "Requests in the running batch.")
_WAITING = MetricDefinition("marsray_num_requests_waiting", "Requests that wait to run.")
_KV_USAGE = MetricDefinition(
    "marsray_kv_cache_usage_ratio",
    "Share of the KV cache's pages that requests hold, 0 to 1; pages that only cache a prefix "
    "count as free.",
)
_THRESHOLD = MetricDefinition(
    "marsray_confidence_threshold",
    "Threshold of requests of tier default that name none, before their floors.",
)
_COMPUTE_RATIO = MetricDefinition(
    "marsray_rehearsal_compute_ratio",
    "Share of a rehearsal's stretched step times that the steps really take, over the last minute "
    "of steps; above 0.5 the rehearsal is not valid on this machine.",
)
_OVERDUE = MetricDefinition(
    "marsray_engine_overdue",
    "1 while the engine shows no sign of life, so that it gets no further requests, else 0.",
)
_FLEX_THRESHOLD = MetricDefinition(
    "marsray_flex_confidence_threshold",
    "Threshold of requests of tier flex that name none, before their floors.",
)

_COUNTERS = {
    "num_prompt_tokens": MetricDefinition(
        "marsray_prompt_tokens_total", "Prompt tokens of admitted requests."
    ),
    "num_generated_tokens": MetricDefinition("marsray_generation_tokens_total", "Output tokens."),
    "num_forward_passes": MetricDefinition(
        "marsray_forward_passes_total", "Forward passes, each over all requests of the batch."
    ),
    "num_row_passes": MetricDefinition(
        "marsray_row_passes_total",
        "Forward passes that gave a request tokens, counted for each request.",
    ),
    "num_prefix_hit_tokens": MetricDefinition(
        "marsray_prefix_cache_hit_tokens_total",
        "Tokens found in the prefix cache instead of being computed, including those of requests "
        "that resume after a preemption.",
    ),
    "num_preemptions": MetricDefinition(
        "marsray_preemptions_total", "Times that a request lost its pages to another request."
    ),
}
"""Counters by the field of `EngineStatus` that holds the count."""


class ReplicaTelemetry(Collector):
    """Metrics of one replica: times of its requests, and the figures of its engine.

    `watch` belongs to one event loop; the other methods may be called from any thread.
    """

    def __init__(self, model: str, replica: str, loop: EngineLoop) -> None:
        self._labels = (model, replica)
        self._loop = loop
        self._first = Histogram(_TIME_TO_FIRST_TOKEN)
        self._gap = Histogram(_INTER_TOKEN_LATENCY)
        self._e2e = Histogram(_E2E_LATENCY)
        self._queue = Histogram(_QUEUE_TIME)
        self._tokens = Histogram(_TOKENS_PER_FORWARD)
        self._threshold = Histogram(_REQUEST_THRESHOLD)
        self.load = RequestLoad()
        """Load of the requests that `watch` has seen."""

    async def watch(
        self, outputs: AsyncGenerator[StepOutput | None], request: Request
    ) -> AsyncGenerator[StepOutput | None]:
        """Pass a request's outputs on, and time them; closing this closes ``outputs``.

        An item of None is a sign of life without an output; see `EngineLoop.stream`.
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
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self).decode()

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families; those of the engine are missing if it has died."""
        timed = self._first, self._gap, self._e2e, self._queue, self._tokens, self._threshold
        for histogram in timed:
            yield histogram.family(self._labels)
        try:
            status = self._loop.status()
        except EngineDied:
            return
        for definition, value in self._gauges(status):
            yield definition.gauge(self._labels, value)
        for field, definition in _COUNTERS.items():
            yield definition.counter(self._labels, getattr(status, field))

    def _gauges(self, status: EngineStatus) -> list[tuple[MetricDefinition, float]]:
        share = status.compute_share
        return [
            *([] if share is None else [(_COMPUTE_RATIO, share)]),
            (_RUNNING, status.num_running),
            (_WAITING, status.num_waiting),
            (_KV_USAGE, 1 - status.num_free_pages / status.num_pages),
            (_THRESHOLD, self._loop.live.threshold),
            (_FLEX_THRESHOLD, self._loop.live.threshold_of(Tier.FLEX)),
            (_OVERDUE, self._loop.is_overdue),
        ]
