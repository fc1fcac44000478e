"""Computes what a load test cost in quality and in replicas, as far as a client can know it.

The sources are the τ in each answer, and what the server reports of itself every second.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from mars_serve.bench.load.send import Replayed, SentRequest


@dataclass(frozen=True)
class Losses:
    """Quality that each τ costs, by the server's own frontier."""

    rungs: Mapping[float, float] = field(default_factory=dict)
    """Points of quality below plain AR decoding, by τ of the rungs that the server may use."""
    refusal: str | None = None
    """Reason why only the loss at τ = 1 is known; None if the frontier is known."""

    def at(self, threshold: float) -> float | None:
        """Return the points that a τ costs, None below the lowest rung.

        Between two rungs the loss is interpolated: it is that of a mixture of both.
        """
        known = {1.0: 0.0} | dict(self.rungs)
        thresholds = sorted(known)
        if threshold < thresholds[0]:
            return None
        return float(np.interp(threshold, thresholds, [known[each] for each in thresholds]))


NO_LOSSES = Losses()


@dataclass(frozen=True)
class QualityLoss:
    """Quality that some answers lost, in points; None if it cannot be known."""

    mean: float | None = None
    """Mean over output tokens."""
    p99: float | None = None
    """99th percentile over answers."""


def quality_loss(sent: Iterable[SentRequest], losses: Losses) -> QualityLoss:
    """Compute the quality that the served answers lost; unknown if it is for one of them."""
    served = [each for each in sent if each.is_served]
    found = [
        None if each.threshold_mean is None else losses.at(each.threshold_mean) for each in served
    ]
    known = [loss for loss in found if loss is not None]
    num_tokens = sum(each.num_tokens for each in served)
    if not num_tokens or len(known) < len(found):
        return QualityLoss()
    total = sum(loss * each.num_tokens for loss, each in zip(known, served, strict=True))
    return QualityLoss(total / num_tokens, float(np.quantile(known, 0.99)))


def replica_hours(replayed: Replayed) -> float | None:
    """Compute the hours of all ready replicas together, until the last request was sent.

    The server is asked each second; its first answer also stands for the time before it.

    Returns:
        The hours; None if the server did not report its replicas.
    """
    views = replayed.live
    if not views or replayed.live_refusal is not None:
        return None
    end_s = max((each.sent_s for each in replayed.sent), default=0.0)
    times = [0.0, *(min(view.time_s, end_s) for view in views[1:]), end_s]
    seconds = sum(
        (later - earlier) * view.num_replicas
        for (earlier, later), view in zip(pairwise(times), views, strict=True)
    )
    return seconds / 3600
