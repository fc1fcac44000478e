"""The loss budget: how many points of quality class default may lose within any hour.

It is an hour of time and not of tokens: what is lost counts for as long as it is being lost. Knows
no policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mars_autoscale.policy.observe import ReplicaLoad

Losses = tuple[tuple[float, float], ...]
"""(begin in s, points times seconds) of each minute in which something was lost, by time."""

_HOUR_S = 3600.0
_MINUTE_S = 60.0
_BACK_S = 60.0
"""Of budget that must have come back before it is spent again: else τ would flap."""


def added(
    losses: Losses, loads: Sequence[ReplicaLoad], *, elapsed_s: float, now_s: float
) -> Losses:
    """The losses of the last hour, with what was lost since the look before.

    Args:
        losses: until then.
        loads: of the replicas now.
        elapsed_s: since that look, at least 0.
        now_s: the time; where it is before that of some losses, they count as lost now.
    """
    lost = _losing(loads) * elapsed_s
    # a minute counts until all of it is an hour old
    kept = [(min(at, now_s), each) for at, each in losses if at > now_s - _HOUR_S - _MINUTE_S]
    if not lost > 0.0:
        return tuple(kept)
    if kept and now_s - kept[-1][0] < _MINUTE_S:
        return (*kept[:-1], (kept[-1][0], kept[-1][1] + lost))
    return (*kept, (now_s, lost))


def is_spent(losses: Losses, budget: float, *, was_spent: bool) -> bool:
    """Whether class default must not lose more.

    Args:
        losses: of the last hour.
        budget: points that may be lost on average over an hour.
        was_spent: what this said before: some of the budget must come back for it to change.
    """
    spent = math.fsum(lost for _, lost in losses)
    allowed = _HOUR_S - _BACK_S if was_spent else _HOUR_S
    return spent >= budget * allowed


def _losing(loads: Sequence[ReplicaLoad]) -> float:
    """Points of 100 that an average token loses: more tokens are of replicas with more rows, and
    of faster ones.
    """
    weights = [load.num_running * load.gain for load in loads]
    total = sum(weights)
    if not total > 0.0:
        return 0.0
    mean = sum(weight * load.loss for weight, load in zip(weights, loads, strict=True)) / total
    return min(mean if math.isfinite(mean) else max(load.loss for load in loads), 100.0)
