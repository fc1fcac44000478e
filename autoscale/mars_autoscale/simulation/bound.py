"""What somebody could do who knew the trace beforehand: a dynamic programme over a fluid model.

Requests are work that arrives in short spans of time; a replica works it off at the speed of its
rung, prompts at their own. Replicas are asked for in time, and billed from then. No work waits
longer than the objective. What is least is the loss of quality, for a number of replica-hours. The
model has no slots, no rounding to requests and no chance, so that no policy can be better but for
what it leaves late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mars_autoscale.capacity import Capacity
from mars_autoscale.simulation.run import ClusterSettings
from mars_autoscale.traces import TraceRequest

_SPAN_S = 10.0
_MIN_GAIN = 1.0
_NUM_BACKLOGS = 9
"""Steps between no backlog and the largest that the objective allows."""
_NUM_PRICES = 24
"""Halvings of the range of prices of a replica-hour that are tried."""
_PRICES = (1e-6, 1e6)
"""Points of loss times tokens for a replica-second."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bound:
    """The least loss for some replica-hours."""

    quality_loss_mean: float
    """Points, mean over output tokens; infinite where not even all replicas suffice."""
    replica_hours: float
    num_replicas: list[int]
    """Ready in each span."""
    span_s: float = _SPAN_S


def clairvoyant(
    trace: Sequence[TraceRequest],
    capacity: Capacity,
    settings: ClusterSettings,
    *,
    objective_s: float,
    max_replica_hours: float,
) -> Bound:
    """The best that can be done for no more than some replica-hours.

    Args:
        trace: what arrives.
        capacity: of a replica.
        settings: limits; as many replicas as these say are ready at the start.
        objective_s: longest that work may wait.
        max_replica_hours: that may be spent.
    """
    programme = _Programme(trace, capacity, settings, objective_s)
    low, high = _PRICES
    best = programme.solve(high)  # the fewest hours
    for _ in range(_NUM_PRICES):
        price = (low * high) ** 0.5
        found = programme.solve(price)
        if found.replica_hours <= max_replica_hours:
            best, high = found, price
        else:
            low = price
    return best


class _Programme:
    """Stages are spans; a state is a number of replicas and a backlog."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        capacity: Capacity,
        settings: ClusterSettings,
        objective_s: float,
    ) -> None:
        self._settings = settings
        num_spans = int(trace[-1].arrival_s / _SPAN_S) + 1
        spans = np.array([int(request.arrival_s / _SPAN_S) for request in trace])
        outputs = np.array([request.output_tokens for request in trace], dtype=float)
        prompts = np.array([request.prompt_tokens for request in trace], dtype=float)
        self._tokens = np.bincount(spans, outputs, num_spans)
        plain = capacity.tokens_per_s(capacity.rungs[0])
        self._decode_s = self._tokens / plain  # replica-seconds at τ = 1
        self._prompt_s = np.bincount(spans, prompts, num_spans) / capacity.prefill_tokens_per_s
        rungs = capacity.useful(_MIN_GAIN)
        self._gains = np.array([capacity.gain(rung) for rung in rungs])
        self._losses = np.array([rung.loss for rung in rungs])
        self._replicas = np.arange(settings.min_replicas, settings.max_replicas + 1)
        self._backlogs = np.linspace(0.0, objective_s, _NUM_BACKLOGS)  # seconds of each replica

    def solve(self, price: float) -> Bound:
        """The plan of least loss, a replica-second counted as ``price``."""
        count, num_backlogs = len(self._replicas), len(self._backlogs)
        started = np.maximum(self._replicas[None, :] - self._replicas[:, None], 0)
        start_cost = price * self._settings.cold_start_s * started  # [from, to]
        value = np.zeros((count, num_backlogs))
        plans = []
        for span in reversed(range(len(self._tokens))):
            onward = start_cost[:, :, None] + value[None]  # [from, to, backlog]
            following, moved = onward.argmin(axis=1), onward.min(axis=1)  # [from, backlog]
            loss = self._loss(span)  # [replicas, backlog before, backlog after]
            total = loss + moved[:, None, :]
            after = total.argmin(axis=2)
            value = total.min(axis=2) + price * _SPAN_S * self._replicas[:, None]
            plans.append((after, following, loss))
        return self._follow(plans[::-1])

    def _loss(self, span: int) -> Floats:
        """Points times tokens that a span costs; infinite where its work cannot be done."""
        room = (self._replicas * _SPAN_S - self._prompt_s[span])[:, None, None]
        waiting = self._backlogs[None, :] * self._replicas[:, None]  # [replicas, backlog]
        work = self._decode_s[span] + waiting[:, :, None] - waiting[:, None, :]
        needed = np.where(room > 0, np.maximum(work, 0.0) / np.maximum(room, 1e-9), np.inf)
        loss = np.interp(needed, self._gains, self._losses)  # a mixture of two rungs
        return np.where(needed <= self._gains[-1], loss * self._tokens[span], np.inf)

    def _follow(self, plans: Sequence[tuple[NDArray[np.intp], NDArray[np.intp], Floats]]) -> Bound:
        initial = self._settings.initial_replicas - self._settings.min_replicas
        state, backlog = min(max(initial, 0), len(self._replicas) - 1), 0
        loss, seconds, numbers = 0.0, 0.0, list[int]()
        for after, following, costs in plans:
            numbers.append(int(self._replicas[state]))
            kept = int(after[state, backlog])
            loss += float(costs[state, backlog, kept])
            state, backlog = int(following[state, kept]), kept
        seconds = _SPAN_S * sum(numbers) + self._settings.cold_start_s * sum(
            max(later - earlier, 0) for earlier, later in pairwise(numbers)
        )
        return Bound(loss / float(self._tokens.sum()), seconds / 3600, numbers)
