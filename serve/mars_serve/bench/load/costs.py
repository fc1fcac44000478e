"""What a load test cost in quality and in replicas, as far as a client can know it.

Goes by what answers say of their τ, and by what the server tells of itself each second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from mars_serve.bench.load.send import LiveView, Outcome, Replayed


@dataclass(frozen=True)
class Losses:
    """What each τ costs in quality, by the server's own frontier."""

    rungs: Mapping[float, float] = field(default_factory=dict)
    """Points below plain AR decoding by τ, of those that the server may use."""
    refusal: str | None = None
    """Why nothing is known of any τ but 1, where that is so."""

    def at(self, threshold: float) -> float | None:
        """Points that a τ costs: between two rungs what a mixture of both does; None below all."""
        known = {1.0: 0.0} | dict(self.rungs)
        thresholds = sorted(known)
        if threshold < thresholds[0]:
            return None
        return float(np.interp(threshold, thresholds, [known[each] for each in thresholds]))


NO_LOSSES = Losses()


@dataclass(frozen=True)
class QualityLoss:
    """Of some answers; None where it cannot be known."""

    mean: float | None = None
    """Points, mean over output tokens."""
    p99: float | None = None
    """Points of the answer at that quantile."""


def quality_loss(outcomes: Iterable[Outcome], losses: Losses) -> QualityLoss:
    """What the served answers cost; not known where that of one of them is not.

    Args:
        outcomes: in any order.
        losses: of each τ.
    """
    served = [outcome for outcome in outcomes if outcome.is_served]
    found = [
        None if each.threshold_mean is None else losses.at(each.threshold_mean) for each in served
    ]
    known = [loss for loss in found if loss is not None]
    num_tokens = sum(outcome.num_tokens for outcome in served)
    if not num_tokens or len(known) < len(found):
        return QualityLoss()
    pairs = zip(known, served, strict=True)
    total = sum(loss * outcome.num_tokens for loss, outcome in pairs)
    return QualityLoss(total / num_tokens, float(np.quantile(known, 0.99)))


@dataclass(frozen=True)
class ReplicaCosts:
    """Of the replicas that were ready; None where the server did not tell."""

    replica_hours: float | None = None
    """Until the last request was sent."""
    threshold_changes: int | None = None
    """Of all replicas, for requests of class default: samples that differ from the one before."""
    replica_changes: int | None = None
    """Samples with another number of them than the one before."""


def replica_costs(replayed: Replayed) -> ReplicaCosts:
    """Count what the server told; the first sample stands for what was before it, too."""
    views = replayed.live
    if not views or replayed.live_refusal is not None:
        return ReplicaCosts()
    end_s = max((outcome.sent_s for outcome in replayed.outcomes), default=0.0)
    pairs = list(pairwise(views))
    return ReplicaCosts(
        _replica_seconds(views, end_s) / 3600,
        sum(_threshold_changes(before, after) for before, after in pairs),
        sum(before.num_replicas != after.num_replicas for before, after in pairs),
    )


def _replica_seconds(views: Sequence[LiveView], end_s: float) -> float:
    times = [0.0, *(min(view.time_s, end_s) for view in views[1:]), end_s]
    spans = (later - earlier for earlier, later in pairwise(times))
    return sum(span * view.num_replicas for span, view in zip(spans, views, strict=True))


def _threshold_changes(before: LiveView, after: LiveView) -> int:
    both = before.thresholds.keys() & after.thresholds.keys()
    return sum(before.thresholds[name] != after.thresholds[name] for name in both)
