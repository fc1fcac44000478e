"""Queues before the simulated replicas, which bind each request to a replica.

A policy brings the queue of the system that it runs on: marsray's or Ray Serve's.
"""

from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Protocol

from mars_autoscale.queueing.order import FairQueue, late_from
from mars_autoscale.queueing.placement import Placement, has_room, load_of, slack_of
from mars_autoscale.simulation.cluster import Replica, Served
from mars_autoscale.traces.files import PREFIX_BLOCK_TOKENS
from mars_platform.tier import Tier

_MAX_BLOCKS = 64
"""Leading blocks of a prompt that the router compares: its 128 pages of 256 tokens on a GPU."""


class Dispatch(Protocol):
    """Holds requests that wait before the replicas, and binds them to replicas."""

    is_by_tier: bool
    """Whether a replica serves higher tiers first; otherwise it serves in order of arrival."""

    def __len__(self) -> int:
        """Return the number of requests that are not bound to a replica yet."""

    def num_ahead(self, tier: Tier, now_s: float, /) -> int:
        """Return the number of those that go before a new request of a tier."""

    def add(self, served: Served, objective_s: float, limit_s: float | None, /) -> None:
        """Take in a request that should have its first token within some seconds.

        If it still waits at ``limit_s``, `expire` takes it out.
        """

    def expire(self, now_s: float, /) -> list[Served]:
        """Remove and return the requests that have waited for too long."""

    def send(self, ready: Sequence[Replica], now_s: float, /) -> list[Replica]:
        """Send the requests that may go now to replicas that are ready; return these replicas."""


class ServerQueue:
    """The server's own queue with one ingress.

    Credits take no time to travel here, so a replica's credits are its free room. Traces name no
    keys, so there is one; and a request's cost is known from the start. Requests are placed as by
    the server's router, which looks at no more than the beginning of a prompt.
    """

    is_by_tier = True

    def __init__(self) -> None:
        self._queue = FairQueue[Served]()
        self._placement: Placement | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def num_ahead(self, tier: Tier, now_s: float, /) -> int:
        """Return the number of waiting requests that go before a new one of a tier."""
        return self._queue.num_before(tier, now_s)

    def add(self, served: Served, objective_s: float, limit_s: float | None, /) -> None:
        """Let a request wait in the order of `FairQueue`."""
        request = served.request
        self._queue.add(
            served,
            tier=request.tier,
            key="",
            cost=request.prompt_tokens + request.output_tokens,
            deadline_s=request.arrival_s + objective_s,
            limit_s=limit_s,
            late_s=late_from(request.arrival_s, objective_s),
        )

    def expire(self, now_s: float, /) -> list[Served]:
        """Remove and return the requests that have waited for too long."""
        return [queued.item for queued in self._queue.expire(now_s)]

    def send(self, ready: Sequence[Replica], now_s: float, /) -> list[Replica]:
        """Send requests in order, each to the replica with a credit that `Placement` chooses."""
        free = {each.name: each for each in ready if _has_credit(each)} if self._queue else {}
        if not free:
            return []
        placement = self._placement_among(ready)
        loads = {name: _load(each) for name, each in free.items()}
        sent = list[Replica]()
        while loads and self._queue:
            queued = self._queue.pop(now_s=now_s)
            self._queue.settle(queued, queued.cost)
            chosen = free[placement.choose(queued.item.request.prefix[:_MAX_BLOCKS], loads)]
            chosen.enqueue(queued.item)
            sent.append(chosen)
            loads[chosen.name] = _load(chosen)
            if not _has_credit(chosen):
                del loads[chosen.name]
        return sent

    def _placement_among(self, ready: Sequence[Replica]) -> Placement:
        """Return the placement, which forgets the replicas that are not ready any more."""
        if self._placement is None:
            slack = slack_of(ready[0].capacity.max_num_seqs)
            self._placement = Placement(slack, tokens_per_key=PREFIX_BLOCK_TOKENS)
        self._placement.retain([each.name for each in ready])
        return self._placement


def _has_credit(replica: Replica) -> bool:
    return not replica.is_short_of_pages and has_room(_load(replica), replica.capacity.max_num_seqs)


def _load(replica: Replica) -> float:
    return load_of(replica.load, replica.backlog_tokens)


class TwoChoices:
    """Ray Serve's routing with the limits of Ray Serve LLM.

    Ray Serve's ``PowerOfTwoChoicesRequestRouter`` looks at two random replicas and binds a request
    to the one with fewer requests. It would hold requests back once replicas have
    ``max_ongoing_requests``, but Ray Serve LLM sets this to a billion, so requests wait inside the
    engines. Both are as in Ray 2.60: ``ray.serve._private.request_router.pow_2_router`` and
    ``ray.llm._internal.serve.constants``. Requests of all tiers are served in order of arrival.
    """

    is_by_tier = False

    def __init__(self, seed: int) -> None:
        """Start empty; ``seed`` determines which replicas are looked at."""
        self._waiting = deque[Served]()
        """Requests that came while no replica was ready."""
        self._random = Random(seed)

    def __len__(self) -> int:
        return len(self._waiting)

    def num_ahead(self, _: Tier, __: float, /) -> int:
        """Return the number of all requests that wait."""
        return len(self._waiting)

    def add(self, served: Served, _: float, __: float | None, /) -> None:
        """Let a request wait behind all others, whatever its deadline, without a limit."""
        self._waiting.append(served)

    def expire(self, _: float, /) -> list[Served]:
        """Return nothing, since Ray Serve sets no limit to waiting."""
        return []

    def send(self, ready: Sequence[Replica], _: float, /) -> list[Replica]:
        """Bind all requests at once."""
        sent = list[Replica]()
        while ready and self._waiting:
            candidates = self._random.sample(ready, min(2, len(ready)))
            chosen = min(candidates, key=lambda each: each.load)
            chosen.enqueue(self._waiting.popleft())
            sent.append(chosen)
        return sent
