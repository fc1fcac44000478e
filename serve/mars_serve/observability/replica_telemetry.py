"""The metrics of a replica. Imports no Ray or HTTP library."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from mars_autoscale.policy.inner_loop import InnerLoopDecision
from mars_platform.tier import Tier
from mars_serve.engine.ipc.loop import EngineDied, EngineLoop
from mars_serve.engine.outputs import EngineStatus
from mars_serve.observability.figures import ReplicaCounts, ReplicaFigures, ReplicaState
from mars_serve.observability.metric_families import MetricDefinition
from mars_serve.observability.request_telemetry import RequestTelemetry

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
_OVERDUE = MetricDefinition(
    "marsray_engine_overdue",
    "1 while the engine shows no sign of life, so that it gets no further requests, else 0.",
)
_EXACT = MetricDefinition(
    "marsray_exact_decoding",
    "1 while requests whose live threshold is 1 run in mode exact, else 0.",
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
    "num_out_of_memory": MetricDefinition(
        "marsray_out_of_memory_steps_total",
        "Steps that ran out of the device's memory; they were run again in parts, and later steps "
        "are smaller.",
    ),
}
"""Counters by the field of `EngineStatus` that holds the count."""


class ReplicaTelemetry(Collector):
    """Metrics of one replica, as its engine's process has reported them lately.

    Any thread may call the methods.
    """

    def __init__(self, model: str, replica: str, loop: EngineLoop) -> None:
        self._labels = (model, replica)
        self._loop = loop

    @property
    def requests(self) -> RequestTelemetry:
        """Counts and times of the engine's requests."""
        found = self._loop.activity
        return found if isinstance(found, RequestTelemetry) else RequestTelemetry()

    def exposition(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self).decode()

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families; those of the engine are missing if it has died."""
        yield from self.requests.families(self._labels)
        try:
            status = self._loop.status()
        except EngineDied:
            return
        for definition, value in self._gauges(status):
            yield definition.gauge(self._labels, value)
        for field, definition in _COUNTERS.items():
            yield definition.counter(self._labels, getattr(status, field))

    def figures(self, node: str, decision: InnerLoopDecision) -> ReplicaFigures:
        """Return what the replica reports for the dashboard.

        Args:
            node: address of its node.
            decision: the latest one of its inner loop.

        Raises:
            EngineDied: the engine has stopped.
        """
        status, condition = self._loop.status(), self._loop.condition
        state = ReplicaState.DRAINING if condition.is_draining else ReplicaState.READY
        return ReplicaFigures(
            self._labels[1],
            node,
            ReplicaState.OVERDUE if self._loop.is_overdue else state,
            num_running=status.num_running,
            num_waiting=status.num_waiting,
            live=self._loop.live,
            cause=decision.cause,
            gain=decision.gain,
            loss=decision.loss,
            num_pages=status.num_pages,
            num_free_pages=status.num_free_pages,
            counts=self._counts(status),
        )

    def _counts(self, status: EngineStatus) -> ReplicaCounts:
        requests = self.requests
        return ReplicaCounts(
            arrived=requests.load.totals.arrived,
            prompt_tokens=status.num_prompt_tokens,
            prefix_hit_tokens=status.num_prefix_hit_tokens,
            generated_tokens=status.num_generated_tokens,
            row_passes=status.num_row_passes,
            preemptions=status.num_preemptions,
            first_token=requests.first_token_counts,
            token_gap=requests.token_gap_counts,
        )

    def _gauges(self, status: EngineStatus) -> list[tuple[MetricDefinition, float]]:
        return [
            (_RUNNING, status.num_running),
            (_WAITING, status.num_waiting),
            (_KV_USAGE, 1 - status.num_free_pages / status.num_pages),
            (_THRESHOLD, self._loop.live.threshold),
            (_FLEX_THRESHOLD, self._loop.live.threshold_of(Tier.FLEX)),
            (_EXACT, self._loop.live.is_exact),
            (_OVERDUE, self._loop.is_overdue),
        ]
