"""The best result with knowledge of the whole trace: a dynamic programme over a fluid model.

Requests are work that arrives in short spans of time. A replica works decoding off at the speed of
its rung, and prompts at their own speed. Replicas are ordered ahead of time, and billed from then.
Work that would wait longer than the objective is refused. For a number of replica-hours, the
programme minimises the refused work first, and the loss of quality next. No policy can do better,
because the model has no limit of rows, no whole requests and no randomness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mars_autoscale.model.capacity import Capacity
from mars_autoscale.simulation.cluster import PrefixCache
from mars_autoscale.simulation.replicas import ReplicaSettings
from mars_autoscale.traces.files import TraceRequest

_SPAN_S = 10.0
"""Seconds of a span."""
_MIN_GAIN = 1.0
"""Lowest gain of the rungs that are used: any that is faster than the base."""
_NUM_BACKLOGS = 9
"""Number of backlogs considered, from none to the largest that the objective allows."""
_NUM_PRICES = 24
"""Number of prices that the bisection tries."""
_PRICES = (1e-6, 1e6)
"""Lowest and highest price of a replica-second, in points of loss times tokens."""
_REFUSED_LOSS = 1e4
"""Points of loss that a refused token counts as: far more than any τ costs."""

Floats = NDArray[np.float64]
_SpanPlan = tuple[NDArray[np.intp], NDArray[np.intp], Floats, Floats]
"""Best choices of a span: indices of the backlog to keep and of the number of replicas to go to;
and the loss and the refused tokens of each backlog."""


@dataclass(frozen=True)
class Bound:
    """The least loss for a number of replica-hours."""

    served: float
    """Share of the output tokens that can be served in time."""
    quality_loss_mean: float
    """Points of quality lost, mean over the served output tokens."""
    replica_hours: float
    num_replicas: list[int]
    """Replicas that are ready in each span."""
    span_s: float = _SPAN_S
    """Seconds of a span."""


def clairvoyant(
    trace: Sequence[TraceRequest],
    capacity: Capacity,
    settings: ReplicaSettings,
    *,
    objective_s: float,
    max_replica_hours: float,
) -> Bound:
    """Return the best result for at most a number of replica-hours.

    Args:
        trace: requests by arrival.
        capacity: speed of a replica.
        settings: limits of the number of replicas, and their number at the start.
        objective_s: longest time in seconds that work may wait.
        max_replica_hours: replica-hours that may be spent.
    """
    programme = _Programme(trace, capacity, settings, objective_s)
    low, high = _PRICES
    best = programme.solve(high)  # the highest price gives the fewest replica-hours
    for _ in range(_NUM_PRICES):
        price = (low * high) ** 0.5
        found = programme.solve(price)
        if found.replica_hours <= max_replica_hours:
            best, high = found, price
        else:
            low = price
    return best


def _new_prompt_tokens(trace: Sequence[TraceRequest], settings: ReplicaSettings) -> list[int]:
    """Return the prompt tokens of each request that no earlier prompt began with.

    No replica has more of a prompt cached than all replicas together got, unless they keep nothing.
    """
    seen = PrefixCache(sum(request.prompt_tokens for request in trace))
    tokens = list[int]()
    for request in trace:
        is_kept = settings.prefix_cache_tokens > 0
        tokens.append(request.prompt_tokens - is_kept * seen.num_cached(request))
        seen.add(request)
    return tokens


class _Programme:
    """A dynamic programme over spans, whose states are numbers of replicas and backlogs."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        capacity: Capacity,
        settings: ReplicaSettings,
        objective_s: float,
    ) -> None:
        self._settings = settings
        self._initial = settings.num_initial(trace, capacity)
        num_spans = int(trace[-1].arrival_s / _SPAN_S) + 1
        spans = np.array([int(request.arrival_s / _SPAN_S) for request in trace])
        outputs = np.array([request.output_tokens for request in trace], dtype=float)
        prompts = np.array(_new_prompt_tokens(trace, settings), dtype=float)
        self._tokens = np.bincount(spans, outputs, num_spans)
        self._decode_s = self._tokens / capacity.tokens_per_s(capacity.base())  # replica-seconds
        self._prompt_s = np.bincount(spans, prompts, num_spans) / capacity.prefill_tokens_per_s
        rungs = capacity.ladder(_MIN_GAIN)
        self._gains = np.array([capacity.gain(rung) for rung in rungs])
        self._losses = np.array([rung.loss for rung in rungs])
        self._replicas = np.arange(settings.min, settings.max + 1)
        self._backlogs = np.linspace(0.0, objective_s, _NUM_BACKLOGS)  # seconds of each replica

    def solve(self, price: float) -> Bound:
        """Return the result of least loss plus ``price`` for each replica-second."""
        count, num_backlogs = len(self._replicas), len(self._backlogs)
        started = np.maximum(self._replicas[None, :] - self._replicas[:, None], 0)
        start_cost = price * self._settings.cold_start_s * started  # [from, to]
        value = np.zeros((count, num_backlogs))
        plans = []
        for span in reversed(range(len(self._tokens))):
            onward = start_cost[:, :, None] + value[None]  # [from, to, backlog]
            following, moved = onward.argmin(axis=1), onward.min(axis=1)  # [from, backlog]
            loss, refused = self._loss(span)  # [replicas, backlog before, backlog after]
            total = loss + _REFUSED_LOSS * refused + moved[:, None, :]
            after = total.argmin(axis=2)
            value = total.min(axis=2) + price * _SPAN_S * self._replicas[:, None]
            plans.append((after, following, loss, refused))
        return self._follow(plans[::-1])

    def _loss(self, span: int) -> tuple[Floats, Floats]:
        """Return a span's points of loss times tokens, and its refused tokens.

        Both are [replicas, backlog before, backlog after].
        """
        room = (self._replicas * _SPAN_S - self._prompt_s[span])[:, None, None]
        waiting = self._backlogs[None, :] * self._replicas[:, None]  # [replicas, backlog]
        work = self._decode_s[span] + waiting[:, :, None] - waiting[:, None, :]
        undone = np.maximum(work - np.where(room > 0, room * self._gains[-1], room), 0.0)
        all_s = self._decode_s[span] + self._prompt_s[span] + waiting[:, :, None]
        share = np.divide(undone, all_s, out=np.zeros_like(undone), where=all_s > 0)
        refused = np.minimum(share, 1.0) * self._tokens[span]
        needed = np.where(room > 0, np.maximum(work, 0.0) / np.maximum(room, 1e-9), np.inf)
        loss = np.interp(needed, self._gains, self._losses)  # a mixture of two rungs
        return loss * (self._tokens[span] - refused), refused

    def _follow(self, plans: Sequence[_SpanPlan]) -> Bound:
        state, backlog = self._initial - self._settings.min, 0
        loss, refused, numbers = 0.0, 0.0, list[int]()
        for after, following, costs, refusals in plans:
            numbers.append(int(self._replicas[state]))
            kept = int(after[state, backlog])
            loss += float(costs[state, backlog, kept])
            refused += float(refusals[state, backlog, kept])
            state, backlog = int(following[state, kept]), kept
        seconds = _SPAN_S * sum(numbers) + self._settings.cold_start_s * sum(
            max(later - earlier, 0) for earlier, later in pairwise(numbers)
        )
        tokens = float(self._tokens.sum())
        served = tokens - refused
        return Bound(served / tokens, loss / max(served, 1.0), seconds / 3600, numbers)
