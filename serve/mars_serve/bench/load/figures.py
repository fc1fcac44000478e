"""Computes the figures of a load test from what its clients saw.

Requests that an interrupt cut off count as sent and in nothing else.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from mars_platform.statistics import Estimate, proportion, quantile
from mars_platform.tier import Tier
from mars_serve.bench.load.send import REJECTIONS, Replayed, SentRequest

_TOGETHER_S = 1e-3
"""Longest time between two events of a stream that count as one."""


@dataclass(frozen=True)
class ClientFigures:
    """Figures of one tier's clients, or of all clients; None if there is nothing to measure.

    Times are in seconds, and infinite for requests that were rejected or failed.
    """

    num_sent: int
    num_ended: int
    """Number of requests that were served, rejected or failed."""
    num_served: int
    slo_attainment: float | None
    """Share of the ended requests whose first token came in time; only served ones can."""
    ttft_p50_s: float | None
    """Median time from sending to the first token."""
    ttft_p99_s: float | None
    """99th percentile of the time from sending to the first token."""
    itl_p50_s: float | None
    """Median time between two events with tokens of an answer, each of one or several tokens.

    Events that a busy server sends together count as one.
    """
    itl_p99_s: float | None
    """99th percentile of the time between two events with tokens."""
    e2e_p50_s: float | None
    e2e_p99_s: float | None
    """99th percentile of the time from sending to the end."""
    threshold_mean: float | None
    threshold_min: float | None
    tokens_per_forward: float | None
    """Output tokens for each forward pass of the served requests."""
    tokens_per_s: float | None
    num_tokens: int
    """Output tokens of all requests."""
    accuracy: Estimate | None
    """Share of the checked answers that are correct, with its 95% interval."""
    num_checked: int
    """Number of served answers that could be checked."""
    rejected: int
    """Number of requests answered with status 429 or 503."""
    rejected_429: float | None
    """Share of the ended requests answered with status 429."""
    rejected_503: float | None
    """Share of the ended requests answered with status 503."""
    failed: int
    errors: dict[str, int]
    """Number of rejected and failed requests, by kind of error."""


@dataclass(frozen=True)
class LoadFigures:
    """All figures of a load test."""

    duration_s: float
    """Seconds from the start to the last end."""
    lateness_p99_s: float | None
    """Seconds by which the sender itself was late, 99th percentile."""
    num_planned: int
    num_capped: int
    """Number of planned requests whose lengths were cut to what the model takes."""
    was_interrupted: bool
    """Whether an interrupt ended the test before all requests had ended."""
    all: ClientFigures
    classes: dict[Tier, ClientFigures]


def figures_of(replayed: Replayed, objective_s: float) -> LoadFigures:
    """Compute the figures of a test; first tokens should come within ``objective_s``."""
    sent, planned = replayed.sent, replayed.plan.requests
    duration_s = max((each.end_s or each.sent_s for each in sent), default=0.0)

    def figures_for(requests: Sequence[SentRequest]) -> ClientFigures:
        return client_figures(requests, objective_s, duration_s)

    return LoadFigures(
        duration_s=duration_s,
        lateness_p99_s=quantile([each.lateness_s for each in sent], 0.99),
        num_planned=len(planned),
        num_capped=sum(request.is_capped for request in planned),
        was_interrupted=replayed.was_interrupted,
        all=figures_for(sent),
        classes={
            tier: figures_for([each for each in sent if each.request.tier == tier])
            for tier in Tier
            if any(request.tier == tier for request in planned)
        },
    )


def client_figures(
    sent: Sequence[SentRequest], objective_s: float, duration_s: float
) -> ClientFigures:
    """Compute the figures of some requests, perhaps none, of a test that took ``duration_s``."""
    ended = [each for each in sent if each.end_s is not None]
    served = [each for each in ended if each.is_served]
    checked = [each.correct for each in served if each.correct is not None]
    lowest = [each.threshold_min for each in served if each.threshold_min is not None]
    num_tokens = sum(each.num_tokens for each in sent)
    statuses = Counter(each.status for each in ended)
    rejected = sum(statuses[status] for status in REJECTIONS)
    gaps = (later - sooner for each in served for sooner, later in pairwise(each.token_s))
    itl = [gap for gap in gaps if gap > _TOGETHER_S]
    ttft, e2e = [each.ttft_s for each in ended], [each.e2e_s for each in ended]
    return ClientFigures(
        num_sent=len(sent),
        num_ended=len(ended),
        num_served=len(served),
        slo_attainment=_share(sum(seconds <= objective_s for seconds in ttft), len(ended)),
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p99_s=quantile(ttft, 0.99),
        itl_p50_s=quantile(itl, 0.5),
        itl_p99_s=quantile(itl, 0.99),
        e2e_p50_s=quantile(e2e, 0.5),
        e2e_p99_s=quantile(e2e, 0.99),
        threshold_mean=_mean_threshold(served),
        threshold_min=min(lowest, default=None),
        tokens_per_forward=_share(
            sum(each.num_tokens for each in served), sum(each.num_passes or 0 for each in served)
        ),
        tokens_per_s=_share(num_tokens, duration_s),
        num_tokens=num_tokens,
        accuracy=proportion(sum(checked), len(checked)) if checked else None,
        num_checked=len(checked),
        rejected=rejected,
        rejected_429=_share(statuses[429], len(ended)),
        rejected_503=_share(statuses[503], len(ended)),
        failed=len(ended) - len(served) - rejected,
        errors=dict(Counter(each.error for each in ended if each.error is not None).most_common()),
    )


def _mean_threshold(sent: Sequence[SentRequest]) -> float | None:
    known = [each.threshold_mean for each in sent if each.threshold_mean is not None]
    return fmean(known) if known else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
