"""The order in which waiting requests go to replicas.

Tiers are strict: while a higher tier has a request, lower tiers wait, for as long as that takes.
Within a tier, keys share the tokens evenly. Within a key, the earliest deadline is first, then the
earliest arrival; but requests that can hardly begin in time any more give way to those that can,
since else a backlog makes all that come behind it late as well. Of a key's requests that are served
while both kinds wait, one in `LATE_TURN` at least is a late one, that with the earliest deadline.
So a late request waits for no more than `LATE_TURN` times as many requests of its key as if late
ones were first.

Even shares come from start-time fair queueing (P. Goyal, H. Vin, H. Cheng: Start-time Fair
Queueing, SIGCOMM 1996). Each key with requests has a start tag, the key with the smallest tag is
served, and its tag grows by the cost of what is served. While two keys wait, their tags differ by
no more than the cost of the largest request of either, so the tokens that both are served differ
by no more than the sum of these two. A key that waits anew starts at the smallest tag of those that
wait, or at its own if that is larger: it brings no credit, and leaves no charge behind. A key that
begins to wait is therefore served after at most one request of each other key, but for corrections.

Costs are known at the end only, as with the counters of Sheng et al., Fairness in Serving Large
Language Models, OSDI 2024: a request is charged what is expected of it, and `FairQueue.settle`
moves its key's tag by the difference. Once nobody waits in a tier all is forgiven, as at the end of
a busy period in the first paper, since nothing was taken from anybody.

Imports no Ray, torch or HTTP library.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from mars_autoscale.queueing.ranked import RankedSet
from mars_autoscale.queueing.sums import DeadlineSums
from mars_platform.tier import Tier

ItemT = TypeVar("ItemT")

LATE_TURN = 8
"""One of so many requests of a key that are served is a late one, while late ones wait."""
_IN_TIME_SHARE = 0.75
"""Share of the time to its first token after which a waiting request counts as late. The rest is
for its prompt and the step that it waits for."""


def late_from(arrived_s: float, wanted_s: float) -> float:
    """Return the time from which on a waiting request can hardly begin in time.

    The request arrived at ``arrived_s``, and its output should begin within ``wanted_s`` of that.
    """
    return arrived_s + _IN_TIME_SHARE * wanted_s


@dataclass(eq=False, slots=True)
class QueuedRequest(Generic[ItemT]):
    """A request that waits or has been popped."""

    item: ItemT
    tier: Tier
    key: str
    cost: int
    """Expected tokens of prompt and output."""
    deadline_s: float
    """Time on the queue's clock by which it is to begin."""
    limit_s: float | None
    """Time on the queue's clock after which it no longer waits; None if it waits forever."""
    late_s: float
    """Time on the queue's clock from which on it gives way; infinite if it never does."""
    arrival: int
    """Number of requests that arrived before."""
    _flow: _Flow[ItemT] | None = field(default=None, repr=False)
    """The flow it is charged to; None before it is added and once it is settled."""


@dataclass(eq=False, slots=True)
class _Flow(Generic[ItemT]):
    key: str
    start: int
    """Start tag, in tokens."""
    turn: int
    """Grows with each request that a flow of the tier is served; among equal tags, the flow that
    began or was served longest ago is first."""
    num_unsettled: int = 0
    """Requests that were popped and not settled."""
    tokens: int = 0
    num_in_time: int = 0
    """Requests that were served since a late one was."""
    waiting: RankedSet[QueuedRequest[ItemT]] = field(default_factory=RankedSet)
    early: RankedSet[QueuedRequest[ItemT]] = field(default_factory=RankedSet)
    """Waiting requests that were not known to be late at the last look."""
    sums: DeadlineSums = field(default_factory=DeadlineSums)
    """Sums of those."""

    def add(self, queued: QueuedRequest[ItemT]) -> None:
        for each in (self.waiting, self.early):
            each.place(queued, queued.deadline_s, queued.arrival)
        self.sums.add(queued.deadline_s, 1, queued.cost)
        self.tokens += queued.cost

    def remove(self, queued: QueuedRequest[ItemT]) -> None:
        self._leave_early(queued)
        self.waiting.discard(queued)
        self.tokens -= queued.cost

    def serve(self, queued: QueuedRequest[ItemT]) -> None:
        """Remove a request, and count it towards the turn of a late one."""
        self.num_in_time = self.num_in_time + 1 if queued in self.early else 0
        self.remove(queued)

    def note_late(self, now_s: float) -> None:
        """Take the requests that have become late out of the early ones."""
        while (first := self.early.first()) is not None and first.late_s <= now_s:
            self._leave_early(first)

    def first(self, now_s: float) -> QueuedRequest[ItemT] | None:
        self.note_late(now_s)
        oldest = self.waiting.first()
        is_turn_of_late = self.num_in_time >= LATE_TURN - 1 or not self.early
        return oldest if is_turn_of_late else self.early.first()

    def _leave_early(self, queued: QueuedRequest[ItemT]) -> None:
        if queued in self.early:
            self.early.discard(queued)
            self.sums.add(queued.deadline_s, -1, -queued.cost)


class _Shares(Generic[ItemT]):
    """One tier's requests: start-time fair queueing between keys."""

    def __init__(self) -> None:
        self.num = 0
        self.tokens = 0
        self.flows = dict[str, _Flow[ItemT]]()
        """Flows with waiting or unsettled requests, and those whose tag is above the floor."""
        self._backlogged = RankedSet[_Flow[ItemT]]()
        self._idle = RankedSet[_Flow[ItemT]]()
        """Flows without waiting or unsettled requests, whose tags must be remembered."""
        self._turns = count()

    def enter(self, queued: QueuedRequest[ItemT]) -> None:
        flow = self._flow(queued.key)
        queued._flow = flow
        if not flow.waiting:
            self._idle.discard(flow)
            self._place(flow)
        flow.add(queued)
        self._count(1, queued)

    def first(self, skipped: Container[str], now_s: float) -> QueuedRequest[ItemT] | None:
        """Return the request that is served next, but for some keys'; None if none waits."""
        flow = self._backlogged.first()
        if flow is not None and flow.key in skipped:
            others = (each for each in self._backlogged if each.key not in skipped)
            flow = min(others, key=lambda each: (each.start, each.turn), default=None)
        return None if flow is None else flow.first(now_s)

    def leave(self, queued: QueuedRequest[ItemT], *, is_served: bool) -> None:
        """Remove a waiting request; if it is served, charge its key for it."""
        flow = queued._flow
        assert flow is not None
        flow.serve(queued) if is_served else flow.remove(queued)
        self._count(-1, queued)
        if is_served:
            flow.turn = next(self._turns)
            flow.start += queued.cost
            flow.num_unsettled += 1
        self._update(flow)

    def settle(self, queued: QueuedRequest[ItemT], difference: int) -> None:
        """Correct the charge of a request that was served, unless all was forgiven since."""
        flow, queued._flow = queued._flow, None
        if flow is not None and self.flows.get(queued.key) is flow:
            flow.num_unsettled -= 1
            flow.start += difference
            self._update(flow)

    def num_early(self, now_s: float) -> int:
        for flow in self._backlogged:
            flow.note_late(now_s)
        return sum(len(flow.early) for flow in self._backlogged)

    def ahead(self, key: str, deadline_s: float, now_s: float) -> tuple[int, int]:
        """Return the requests and tokens that go before a new request, at least."""
        own = self.flows.get(key)
        tag = self._floor()
        num = tokens = 0
        if own is not None:
            own.note_late(now_s)
            tag = own.start if own.waiting else max(own.start, tag)
            num, tokens = own.sums.before(deadline_s)
            tag += tokens
        for flow in self._backlogged:
            if flow is not own:
                share = min(flow.tokens, max(tag - flow.start, 0))
                num += len(flow.waiting) * share // flow.tokens
                tokens += share
        return num, tokens

    def _flow(self, key: str) -> _Flow[ItemT]:
        """Return a key's flow, at the floor or above if it has nothing waiting."""
        flow = self.flows.get(key)
        if flow is None:
            flow = self.flows[key] = _Flow(key, self._floor(), next(self._turns))
        elif not flow.waiting:
            flow.start = max(flow.start, self._floor())
        return flow

    def _floor(self) -> int:
        """Return the smallest tag of the keys that wait."""
        first = self._backlogged.first()
        return 0 if first is None else first.start

    def _count(self, num: int, queued: QueuedRequest[ItemT]) -> None:
        self.num += num
        self.tokens += num * queued.cost

    def _place(self, flow: _Flow[ItemT]) -> None:
        self._backlogged.place(flow, flow.start, flow.turn)

    def _update(self, flow: _Flow[ItemT]) -> None:
        """Put a flow in the order of its tag, and forget the flows that need not be remembered."""
        if flow.waiting:
            self._place(flow)
        else:
            self._backlogged.discard(flow)
            if not flow.num_unsettled:
                self._idle.place(flow, flow.start, flow.turn)
        if not self.num:
            self.flows.clear()
            self._idle = RankedSet()
        floor = self._floor()
        while (idle := self._idle.first()) is not None and idle.start <= floor:
            self._idle.discard(idle)
            del self.flows[idle.key]


class FairQueue(Generic[ItemT]):
    """The requests of one model that wait in one ingress.

    A request is added, then popped, removed or expired. One that was popped is settled when it has
    ended, so that its key is charged what it really cost; one whose replica died before it began is
    added anew. All operations take O(log n) amortised, but `ahead`, which also looks at each key
    that waits in the tier.
    """

    def __init__(self) -> None:
        ranked = sorted(Tier, key=lambda tier: -tier.rank)
        self._tiers: dict[Tier, _Shares[ItemT]] = {tier: _Shares() for tier in ranked}
        self._limits = RankedSet[QueuedRequest[ItemT]]()
        self._arrivals = count()
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def num_before(self, tier: Tier, now_s: float) -> int:
        """Return how many waiting requests go before most new ones of a tier.

        These are those of higher tiers, and of the tier those that are not late.
        """
        higher = sum(shares.num for each, shares in self._tiers.items() if each.rank > tier.rank)
        return higher + self._tiers[tier].num_early(now_s)

    def num_late(self, tier: Tier, now_s: float) -> int:
        """Return how many requests of a tier wait that are late."""
        return self._tiers[tier].num - self._tiers[tier].num_early(now_s)

    def num_of(self, tier: Tier) -> int:
        """Return how many requests of a tier wait."""
        return self._tiers[tier].num

    def add(
        self,
        item: ItemT,
        *,
        tier: Tier,
        key: str,
        cost: int,
        deadline_s: float,
        limit_s: float | None = None,
        late_s: float = math.inf,
    ) -> QueuedRequest[ItemT]:
        """Add a request; see `QueuedRequest` for the arguments. The cost is at least 1."""
        assert cost >= 1, "a request without cost would be served without end"
        queued = QueuedRequest(
            item, tier, key, cost, deadline_s, limit_s, late_s, next(self._arrivals)
        )
        self._tiers[tier].enter(queued)
        self._num += 1
        if limit_s is not None:
            self._limits.place(queued, limit_s, queued.arrival)
        return queued

    def peek(
        self, skipped: Container[str] = (), *, now_s: float = -math.inf
    ) -> QueuedRequest[ItemT] | None:
        """Return the request that is first in order; None if none waits.

        Requests of ``skipped`` keys do not count. ``now_s`` is the time on the queue's clock; it
        tells which requests are late.
        """
        for shares in self._tiers.values():
            if shares.num and (queued := shares.first(skipped, now_s)) is not None:
                return queued
        return None

    def take(self, queued: QueuedRequest[ItemT]) -> None:
        """Remove a waiting request, usually that of `peek`, and charge its key for it."""
        self._leave(queued, is_served=True)

    def pop(self, *, now_s: float = -math.inf) -> QueuedRequest[ItemT]:
        """Remove and return the request that is first in order, and charge its key for it.

        ``now_s`` is explained at `peek`.
        """
        queued = self.peek(now_s=now_s)
        if queued is None:
            raise IndexError("no request waits")
        self.take(queued)
        return queued

    def remove(self, queued: QueuedRequest[ItemT]) -> bool:
        """Remove a request without charge; return whether it waited."""
        flow = queued._flow
        if flow is None or queued not in flow.waiting:
            return False
        self._leave(queued, is_served=False)
        queued._flow = None
        return True

    def settle(self, queued: QueuedRequest[ItemT], cost: int) -> None:
        """Charge the key of an ended request ``cost``, the tokens computed; 0 if it never began."""
        is_unsettled = queued._flow is not None and queued not in queued._flow.waiting
        assert is_unsettled, "only what was popped can be settled, once"
        self._tiers[queued.tier].settle(queued, cost - queued.cost)

    def expire(self, now_s: float) -> list[QueuedRequest[ItemT]]:
        """Remove and return the requests that may wait no longer, earliest limit first."""
        expired = []
        while (limit_s := self.first_limit_s()) is not None and limit_s <= now_s:
            queued = self._limits.first()
            assert queued is not None
            self.remove(queued)
            expired.append(queued)
        return expired

    def first_limit_s(self) -> float | None:
        """Return the time at which the next request expires; None if none does."""
        first = self._limits.first()
        return None if first is None else first.limit_s

    def ahead(
        self, tier: Tier, key: str, deadline_s: float, *, now_s: float = -math.inf
    ) -> tuple[int, int]:
        """Return how many requests, and how many tokens, would go before a new request.

        The new request would have this tier, key and deadline; ``now_s`` is explained at `peek`. As
        long as no request is removed or becomes late, both numbers are lower bounds: they count
        requests of higher tiers, those of the same key that are not late and have a deadline that
        is earlier by a quarter of a second, and what fairness gives to the other keys before the
        new request's turn, as if each key's requests were of equal size.
        """
        num, tokens = self._tiers[tier].ahead(key, deadline_s, now_s)
        higher = [shares for each, shares in self._tiers.items() if each.rank > tier.rank]
        return (
            num + sum(shares.num for shares in higher),
            tokens + sum(shares.tokens for shares in higher),
        )

    def __iter__(self) -> Iterator[QueuedRequest[ItemT]]:
        for shares in self._tiers.values():
            for flow in shares.flows.values():
                yield from flow.waiting

    def _leave(self, queued: QueuedRequest[ItemT], *, is_served: bool) -> None:
        self._limits.discard(queued)
        self._num -= 1
        self._tiers[queued.tier].leave(queued, is_served=is_served)
