"""Figures of a load test, from what its clients saw. Knows no server and no files.

Requests that an interrupt cut off count as sent and in nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from mars_platform.statistics import Estimate, proportion
from mars_platform.tier import Tier
from mars_serve.bench.load.costs import NO_LOSSES, Losses, quality_loss, replica_costs
from mars_serve.bench.load.send import REJECTIONS, LiveView, Outcome, Replayed

_SAMPLE_S = 1.0


@dataclass(frozen=True)
class ClassFigures:
    """What clients of a class saw, or all clients; None where there is nothing to measure.

    Times are in seconds, and infinite for requests that were rejected or failed.
    """

    num_sent: int
    num_ended: int
    num_served: int
    """To their end."""
    slo_attainment: float | None
    """Share of the ended ones whose first token came in time; rejected and failed ones did not."""
    ttft_p50_s: float | None
    """To the first token, from sending."""
    ttft_p99_s: float | None
    e2e_p50_s: float | None
    """To the end, from sending."""
    e2e_p99_s: float | None
    threshold_mean: float | None
    """τ that requests were served with, mean over those served."""
    threshold_min: float | None
    """Lowest τ of any pass."""
    tokens_per_forward: float | None
    tokens_per_s: float | None
    """Output tokens of all requests over the time from the start to the last end."""
    num_tokens: int
    accuracy: Estimate | None
    """Share of the served answers that are correct, with its 95% interval."""
    num_checked: int
    quality_loss_mean: float | None
    """Points, mean over the served answers' tokens."""
    quality_loss_p99: float | None
    """Points of the served answer at that quantile."""
    rejected: int
    """Answered with 429 or 503."""
    rejected_429: float | None
    """Share of the ended ones."""
    rejected_503: float | None
    failed: int
    """All others that were not served."""
    errors: dict[str, int]
    """Requests that were rejected or failed, by kind."""


@dataclass(frozen=True)
class Sample:
    """One second of the test; what is None is not known."""

    time_s: float
    """Its begin, in seconds after the start."""
    requests_per_s: float
    """Sent in it."""
    in_flight: int
    """At its end."""
    ttft_p95_s: float | None
    """Of the requests sent in it; infinite where more than a twentieth was not served."""
    threshold_mean: float | None
    """τ that the requests sent in it were served with."""
    live_threshold: float | None
    """What replicas decoded with where requests gave no τ, mean over the replicas."""
    num_replicas: int | None


@dataclass(frozen=True)
class LoadFigures:
    """A load test."""

    duration_s: float
    """From the start to the last end."""
    lateness_p99_s: float | None
    """Seconds by which the sender itself was late."""
    num_planned: int
    num_capped: int
    """Planned requests whose lengths were cut to what the model takes."""
    was_interrupted: bool
    all: ClassFigures
    classes: dict[Tier, ClassFigures]
    """Those that were planned."""
    replica_hours: float | None
    """See `mars_serve.bench.load.costs.ReplicaCosts`, as below."""
    threshold_changes: int | None
    replica_changes: int | None
    samples: list[Sample]


def figures_of(replayed: Replayed, objective_s: float, losses: Losses = NO_LOSSES) -> LoadFigures:
    """Sum up a test.

    Args:
        replayed: the test.
        objective_s: seconds in which the first token should come.
        losses: what each τ costs in quality.
    """
    outcomes, planned = replayed.outcomes, replayed.plan.requests
    duration_s = max((outcome.end_s or outcome.sent_s for outcome in outcomes), default=0.0)
    classes = [each for each in Tier if any(r.tier == each for r in planned)]
    return LoadFigures(
        duration_s=duration_s,
        lateness_p99_s=_quantile([outcome.lateness_s for outcome in outcomes], 0.99),
        num_planned=len(planned),
        num_capped=sum(request.is_capped for request in planned),
        was_interrupted=replayed.was_interrupted,
        all=class_figures(outcomes, objective_s, duration_s, losses),
        classes={
            each: class_figures(
                [outcome for outcome in outcomes if outcome.request.tier == each],
                objective_s,
                duration_s,
                losses,
            )
            for each in classes
        },
        **vars(replica_costs(replayed)),
        samples=samples_of(outcomes, replayed.live, duration_s),
    )


def class_figures(
    outcomes: Sequence[Outcome],
    objective_s: float,
    duration_s: float,
    losses: Losses = NO_LOSSES,
) -> ClassFigures:
    """Sum up some requests.

    Args:
        outcomes: what became of them; none at all is fine.
        objective_s: seconds in which the first token should come.
        duration_s: of the test.
        losses: what each τ costs in quality.
    """
    ended = [outcome for outcome in outcomes if outcome.end_s is not None]
    served = [outcome for outcome in ended if outcome.is_served]
    checked = [outcome.correct for outcome in served if outcome.correct is not None]
    lowest = [one.threshold_min for one in served if one.threshold_min is not None]
    num_tokens = sum(outcome.num_tokens for outcome in outcomes)
    statuses = Counter(outcome.status for outcome in ended)
    rejected = sum(statuses[status] for status in REJECTIONS)
    ttft, e2e = [one.ttft_s for one in ended], [one.e2e_s for one in ended]
    loss = quality_loss(served, losses)
    return ClassFigures(
        num_sent=len(outcomes),
        num_ended=len(ended),
        num_served=len(served),
        slo_attainment=_share(sum(seconds <= objective_s for seconds in ttft), len(ended)),
        ttft_p50_s=_quantile(ttft, 0.5),
        ttft_p99_s=_quantile(ttft, 0.99),
        e2e_p50_s=_quantile(e2e, 0.5),
        e2e_p99_s=_quantile(e2e, 0.99),
        threshold_mean=_mean_threshold(served),
        threshold_min=min(lowest, default=None),
        tokens_per_forward=_share(
            sum(one.num_tokens for one in served), sum(one.num_passes or 0 for one in served)
        ),
        tokens_per_s=_share(num_tokens, duration_s),
        num_tokens=num_tokens,
        accuracy=proportion(sum(checked), len(checked)) if checked else None,
        num_checked=len(checked),
        quality_loss_mean=loss.mean,
        quality_loss_p99=loss.p99,
        rejected=rejected,
        rejected_429=_share(statuses[429], len(ended)),
        rejected_503=_share(statuses[503], len(ended)),
        failed=len(ended) - len(served) - rejected,
        errors=dict(Counter(one.error for one in ended if one.error is not None).most_common()),
    )


def samples_of(
    outcomes: Sequence[Outcome], live: Sequence[LiveView], duration_s: float
) -> list[Sample]:
    """Each second of a test.

    Args:
        outcomes: in any order.
        live: what the server told, by time; the last one of a second counts.
        duration_s: of the test.
    """
    seconds = range(math.floor(duration_s / _SAMPLE_S) + 1) if outcomes else range(0)
    by_second: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        by_second.setdefault(int(outcome.sent_s // _SAMPLE_S), []).append(outcome)
    views = {int(view.time_s // _SAMPLE_S): view for view in live}
    sent = np.sort([outcome.sent_s for outcome in outcomes])
    ended = np.sort([outcome.end_s for outcome in outcomes if outcome.end_s is not None])
    ends = [(second + 1) * _SAMPLE_S for second in seconds]
    in_flight = np.searchsorted(sent, ends) - np.searchsorted(ended, ends)
    return [
        _sample(second, by_second.get(second, []), int(in_flight[second]), views.get(second))
        for second in seconds
    ]


def _sample(
    second: int, outcomes: Sequence[Outcome], in_flight: int, view: LiveView | None
) -> Sample:
    ended = [outcome for outcome in outcomes if outcome.end_s is not None]
    return Sample(
        time_s=second * _SAMPLE_S,
        requests_per_s=len(outcomes) / _SAMPLE_S,
        in_flight=in_flight,
        ttft_p95_s=_quantile([outcome.ttft_s for outcome in ended], 0.95),
        threshold_mean=_mean_threshold(ended),
        live_threshold=None if view is None else view.threshold,
        num_replicas=None if view is None else view.num_replicas,
    )


def _mean_threshold(outcomes: Sequence[Outcome]) -> float | None:
    known = [one.threshold_mean for one in outcomes if one.threshold_mean is not None]
    return fmean(known) if known else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _quantile(values: Sequence[float], q: float) -> float | None:
    """One of the values, as the simulator's: between an infinite one and another there is none."""
    return float(np.quantile(values, q, method="higher")) if values else None
