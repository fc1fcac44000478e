"""The metrics of a replica. Imports no Ray or HTTP library."""

from collections.abc import Iterator
from dataclasses import replace

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from mars_autoscale.policy.inner_loop import InnerLoopDecision
from mars_autoscale.policy.reports import EngineStatus, Phase, ReplicaReport
from mars_platform.tier import Tier
from mars_serve.engine.ipc.client import EngineClient, EngineDied
from mars_serve.observability.metric_families import MetricDefinition
from mars_serve.observability.request_telemetry import RequestTelemetry

_RUNNING = MetricDefinition("marsray_num_requests_running", "Requests in the running batch.")
_WAITING = MetricDefinition("marsray_num_requests_waiting", "Requests that wait to run.")
_KV_USAGE = MetricDefinition(
    "marsray_kv_cache_usage_ratio",
    "Share of the KV cache's pages that requests hold, 0 to 1; pages that only cache a prefix "
    "count as free.",
)
_STATES = MetricDefinition(
    "marsray_states_held", "States of recurrent layers that requests hold, up to two each."
)
_SNAPSHOTS = MetricDefinition(
    "marsray_state_snapshots", "Snapshots of states of recurrent layers that cache a prefix."
)
_THRESHOLD = MetricDefinition(
    "marsray_confidence_threshold",
    "Threshold of requests of tier default in mode threshold that name none, before their floors.",
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
    "Threshold of requests of tier flex in mode threshold that name none, before their floors.",
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
    "num_computed_again": MetricDefinition(
        "marsray_prefix_cache_recomputed_tokens_total",
        "Tokens that were computed although their keys and values were in the prefix cache, since "
        "no state of recurrent layers, or no window of keys and values, was there to go on from.",
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
    """Metrics and reports of one replica, as its engine's process has reported lately.

    Any thread may call the methods.
    """

    def __init__(self, model: str, replica: str, engine: EngineClient, node: str = "") -> None:
        self._labels = (model, replica)
        self._engine = engine
        self._last = ReplicaReport(replica, node)

    @property
    def requests(self) -> RequestTelemetry:
        """Counts and times of the engine's requests."""
        found = self._engine.activity
        return found if isinstance(found, RequestTelemetry) else RequestTelemetry()

    def report(
        self,
        decision: InnerLoopDecision | None = None,
        *,
        live_version: int = 0,
        is_pinned: bool = False,
        pace: float = 0.0,
    ) -> ReplicaReport:
        """Return what the replica reports; if its engine has died, its last figures.

        ``decision`` is the latest of its inner loop, if any, ``live_version`` the version of the
        governor's value that it has applied; ``is_pinned`` says whether τ was set by hand, and
        ``pace`` is the measured one, 0 if unknown.
        """
        engine, condition = self._engine, self._engine.condition
        phase = Phase.DRAINING if condition.is_draining else Phase.READY
        try:
            self._last = replace(
                self._last,
                phase=Phase.OVERDUE if engine.is_overdue else phase,
                engine=engine.status(),
                requests=self.requests.counts,
                decoding=replace(decision or InnerLoopDecision(engine.live), live=engine.live),
                live_version=live_version,
                is_pinned=is_pinned,
                age_s=engine.age_s,
                pace=pace,
            )
        except EngineDied:
            self._last = replace(self._last, phase=Phase.OVERDUE, age_s=engine.age_s)
        return self._last

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families; those of the engine are missing if it has died."""
        yield from self.requests.families(self._labels)
        try:
            status = self._engine.status()
        except EngineDied:
            return
        for definition, value in self._gauges(status):
            yield definition.gauge([(self._labels, value)])
        for field, definition in _COUNTERS.items():
            yield definition.counter([(self._labels, getattr(status, field))])

    def _gauges(self, status: EngineStatus) -> list[tuple[MetricDefinition, float]]:
        live = self._engine.live
        return [
            (_RUNNING, status.num_running),
            (_WAITING, status.num_waiting),
            (_KV_USAGE, status.kv_share or 0.0),
            (_STATES, status.num_held_states),
            (_SNAPSHOTS, status.num_state_snapshots),
            (_THRESHOLD, live.threshold),
            (_FLEX_THRESHOLD, live.threshold_of(Tier.FLEX)),
            (_EXACT, live.is_exact),
            (_OVERDUE, self._engine.is_overdue),
        ]
