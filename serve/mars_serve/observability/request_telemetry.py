"""Counts and times the requests of an engine, in the engine's process.

Imports no Ray or HTTP library.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import Metric

from mars_autoscale.audit.counts import AuditCounts, AuditKey, AuditOutcome, added
from mars_autoscale.policy.lengths import LengthCounter
from mars_autoscale.policy.reports import RequestCounts
from mars_platform.method.mode import Mode
from mars_platform.tier import Tier
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.observability.audit_metrics import audit_families
from mars_serve.observability.metric_families import Histogram, HistogramDefinition

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


_FINE = 1.05
"""Ratio to within which the dashboard tells quantiles."""
_TIME_TO_FIRST_TOKEN = HistogramDefinition(
    "marsray_time_to_first_token_seconds",
    "Seconds from a request's arrival at the replica to its first tokens.",
    _WAIT_S,
    _FINE,
)
_INTER_TOKEN_LATENCY = HistogramDefinition(
    "marsray_inter_token_latency_seconds",
    "Seconds for each token after the first forward pass: the time between two passes of a "
    "request, shared by the tokens that the later one gave.",
    _TOKEN_S,
    _FINE,
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


FIRST_TOKEN_BOUNDS_S = _TIME_TO_FIRST_TOKEN.bounds
"""Upper ends in seconds of the buckets of `RequestCounts.first_token`."""
TOKEN_GAP_BOUNDS_S = _INTER_TOKEN_LATENCY.bounds
"""Upper ends in seconds of the buckets of `RequestCounts.token_gap`."""
_FAILED = frozenset({FinishReason.ERROR, FinishReason.REFUSED, FinishReason.TIMEOUT})


def live_tier(request: Request) -> Tier | None:
    """Return the tier whose live τ decodes a request; None if its own mode or τ does."""
    options = request.options
    is_pinned = options.mode is not Mode.THRESHOLD or options.threshold is not None
    if is_pinned:
        return None
    return Tier.FLEX if options.tier is Tier.FLEX else Tier.DEFAULT


@dataclass(slots=True)
class _Times:
    start_s: float
    last_s: float = 0.0
    """Time of the latest pass that gave tokens."""
    num_outputs: int = 0
    num_passes: int = 0
    num_tokens: int = 0
    sum_threshold: float = 0.0


class RequestTelemetry:
    """The `Observer` of an engine; a pickled copy holds what has been counted so far."""

    def __init__(self) -> None:
        self.audits = dict[AuditKey, AuditCounts]()
        """Audited outputs."""
        self._first = Histogram(_TIME_TO_FIRST_TOKEN)
        self._gap = Histogram(_INTER_TOKEN_LATENCY)
        self._e2e = Histogram(_E2E_LATENCY)
        self._queue = Histogram(_QUEUE_TIME)
        self._tokens = Histogram(_TOKENS_PER_FORWARD)
        self._threshold = Histogram(_REQUEST_THRESHOLD)
        self._prompt_tokens = self._prefix_hit_tokens = 0
        self._lengths = LengthCounter()
        self._live_tiers = Counter[Tier | None]()
        """Present requests by `live_tier`."""
        self._times: dict[str, _Times] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the requests that run."""
        return {**self.__dict__, "_times": {}}

    @property
    def counts(self) -> RequestCounts:
        """Counts since the start, as the replica reports them."""
        return RequestCounts(
            self._prompt_tokens,
            self._prefix_hit_tokens,
            self._lengths.counts,
            self._first.counts,
            self._gap.counts,
            self.audits,
        )

    def share(self, tier: Tier | None) -> float:
        """Return the share, 0 to 1, of the present requests that have this `live_tier`."""
        return self._live_tiers[tier] / max(self._live_tiers.total(), 1)

    def come(self, request: Request) -> None:
        """Count a request that waits from now on."""
        assert request.arrived_at is not None
        self._times[request.id] = _Times(request.arrived_at)
        self._prompt_tokens += request.num_prompt
        self._lengths.begun(request.options.max_tokens)
        self._live_tiers[live_tier(request)] += 1

    def stepped(self, request: Request, output: StepOutput, now_s: float) -> None:
        """Count an output at a time by ``time.monotonic``."""
        times = self._times[request.id]
        if output.finish_reason in _FAILED:
            return
        if not times.num_outputs:
            self._queue.observe(output.queue_s)
            self._prefix_hit_tokens += output.num_prefix_hit_tokens
        times.num_outputs += 1
        num_tokens = len(output.tokens)
        if not num_tokens:
            return
        if times.num_passes:
            self._gap.observe((now_s - times.last_s) / num_tokens, num_tokens)
        else:
            self._first.observe(now_s - times.start_s)
        times.last_s = now_s
        times.num_passes += 1
        self._lengths.grown(times.num_tokens, times.num_tokens + num_tokens)
        times.num_tokens += num_tokens
        times.sum_threshold += output.threshold
        self._tokens.observe(num_tokens)

    def gone(self, request: Request, now_s: float) -> None:
        """Count a request that has ended at a time by ``time.monotonic``."""
        times = self._times.pop(request.id)
        self._live_tiers[live_tier(request)] -= 1
        if times.num_outputs:
            self._lengths.ended(times.num_tokens)
            self._e2e.observe(now_s - times.start_s)
        if times.num_passes and request.options.mode is Mode.THRESHOLD:
            self._threshold.observe(times.sum_threshold / times.num_passes)

    def audited(self, outcome: AuditOutcome) -> None:
        """Count the outcome of an audit."""
        self.audits = added(self.audits, outcome.counts())

    def families(self, labels: tuple[str, str]) -> Iterator[Metric]:
        """Yield the histograms as metric families with these labels."""
        timed = self._first, self._gap, self._e2e, self._queue, self._tokens, self._threshold
        for histogram in timed:
            yield histogram.family(labels)
        yield from audit_families(self.audits, labels)
