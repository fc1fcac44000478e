"""The loss budget: the points of quality that tier default may lose within any hour.

The hour is one of time, not of tokens: a loss counts for as long as it lasts.
"""

import math
from collections.abc import Sequence

from mars_autoscale.policy.observe import ReplicaLoad

Losses = tuple[tuple[float, float], ...]
"""(begin in s, points times seconds) of each minute in which quality was lost, by time."""

_HOUR_S = 3600.0
_MINUTE_S = 60.0
_RECOVERED_S = 60.0
"""Seconds' worth of budget that must have come back before it is spent again; less lets τ flap."""


def added(
    losses: Losses, replicas: Sequence[ReplicaLoad], *, elapsed_s: float, now_s: float
) -> Losses:
    """Return the losses of the last hour, those of the ``elapsed_s`` since the last decision added.

    Losses that are later than ``now_s``, as the clock was put back, move to it.
    """
    lost = _mean_loss(replicas) * elapsed_s
    # a minute counts until all of it is an hour old
    kept = [(min(at, now_s), each) for at, each in losses if at > now_s - _HOUR_S - _MINUTE_S]
    if not lost > 0.0:
        return tuple(kept)
    if kept and now_s - kept[-1][0] < _MINUTE_S:
        return (*kept[:-1], (kept[-1][0], kept[-1][1] + lost))
    return (*kept, (now_s, lost))


def spent_share(losses: Losses, budget: float) -> float | None:
    """Return the share of the budget that the losses of the last hour are; None if it is 0."""
    spent = math.fsum(lost for _, lost in losses)
    return spent / (budget * _HOUR_S) if budget else None


def is_spent(losses: Losses, budget: float, *, was_spent: bool) -> bool:
    """Return whether tier default must lose no more than ``budget`` points on average over an hour.

    ``losses`` are those of the last hour. The answer at the last decision, ``was_spent``, changes
    only once some budget has come back.
    """
    spent = math.fsum(lost for _, lost in losses)
    allowed_s = _HOUR_S - _RECOVERED_S if was_spent else _HOUR_S
    return spent >= budget * allowed_s


def _mean_loss(replicas: Sequence[ReplicaLoad]) -> float:
    """Return the points of 100 that the average token loses now.

    A replica gives tokens in proportion to its running rows and its speed.
    """
    weights = [replica.num_running * replica.gain for replica in replicas]
    total = sum(weights)
    if not total > 0.0:
        return 0.0
    losses = [replica.loss for replica in replicas]
    mean = sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / total
    return min(mean if math.isfinite(mean) else max(losses), 100.0)
