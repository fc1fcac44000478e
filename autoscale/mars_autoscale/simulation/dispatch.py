"""Queues before the simulated replicas, which bind each request to a replica.

A policy brings the queue of the system that it runs on: marsray's, Ray Serve's or Knative's.
"""

from __future__ import annotations

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
_MATCH_RATE = 0.1
"""Share of a prompt that a replica must have got for `PrefixAware` to prefer it: Ray's default."""


class Dispatch(Protocol):
    """Holds requests that wait before the replicas, and binds them to replicas."""

    is_by_tier: bool
    """Whether a replica serves higher tiers first; otherwise it serves in order of arrival."""

    def __len__(self) -> int:
        """Return the number of requests that are not bound to a replica yet."""

    def num_ahead(self, tier: Tier, now_s: float, /) -> int:
        """Return the number of those that go before a new request of a tier."""

    def add(self, served: Served, objective_s: float, /) -> None:
        """Take in a request that should have its first token within some seconds."""

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
        self._known = frozenset[str]()
        """Names of the replicas that were ready last."""

    def __len__(self) -> int:
        return len(self._queue)

    def num_ahead(self, tier: Tier, now_s: float, /) -> int:
        """Return the number of waiting requests that go before a new one of a tier."""
        return self._queue.num_before(tier, now_s)

    def add(self, served: Served, objective_s: float, /) -> None:
        """Let a request wait in the order of `FairQueue`."""
        request = served.request
        self._queue.add(
            served,
            tier=request.tier,
            key="",
            cost=request.prompt_tokens + request.output_tokens,
            deadline_s=request.arrival_s + objective_s,
            late_s=late_from(request.arrival_s, objective_s),
        )

    def send(self, ready: Sequence[Replica], now_s: float, /) -> list[Replica]:
        """Send requests in order, each to the replica with a credit that `Placement` chooses."""
        free = {each.name: each for each in ready if _has_credit(each)} if self._queue else {}
        if not free:
            return []
        placement = self._placement_among(ready)
        loads = {name: _load(each) for name, each in free.items()}
        sent = list[Replica]()
        while loads and self._queue:
            ticket = self._queue.pop(now_s=now_s)
            self._queue.settle(ticket, ticket.cost)
            chosen = free[placement.choose(ticket.item.request.prefix[:_MAX_BLOCKS], loads)]
            chosen.enqueue(ticket.item)
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
        names = frozenset(each.name for each in ready)
        if names != self._known:
            self._known = names
            self._placement.retain(names)
        return self._placement


def _has_credit(replica: Replica) -> bool:
    return has_room(_load(replica), replica.capacity.max_num_seqs)


def _load(replica: Replica) -> float:
    return load_of(replica.load, replica.backlog_tokens)


class _ArrivalOrder:
    """Requests of all tiers in order of arrival."""

    is_by_tier = False

    def __init__(self) -> None:
        self._waiting = deque[Served]()

    def __len__(self) -> int:
        return len(self._waiting)

    def num_ahead(self, _: Tier, __: float, /) -> int:
        """Return the number of all requests that wait."""
        return len(self._waiting)

    def add(self, served: Served, _: float, /) -> None:
        """Let a request wait behind all others, whatever its deadline."""
        self._waiting.append(served)


class TwoChoices(_ArrivalOrder):
    """Ray Serve's routing with the limits of Ray Serve LLM.

    Ray Serve's ``PowerOfTwoChoicesRequestRouter`` looks at two random replicas and binds a request
    to the one with fewer requests. It would hold requests back once replicas have
    ``max_ongoing_requests``, but Ray Serve LLM sets this to a billion, so requests wait inside the
    engines. Both are as in Ray 2.60: ``ray.serve._private.request_router.pow_2_router`` and
    ``ray.llm._internal.serve.constants``.
    """

    def __init__(self, seed: int) -> None:
        """Start empty; ``seed`` determines which replicas are looked at."""
        super().__init__()
        self._random = Random(seed)

    def send(self, ready: Sequence[Replica], _: float, /) -> list[Replica]:
        """Bind all requests at once."""
        sent = list[Replica]()
        while ready and self._waiting:
            chosen = self._choose(self._waiting[0], ready)
            chosen.enqueue(self._waiting.popleft())
            sent.append(chosen)
        return sent

    def _choose(self, _: Served, ready: Sequence[Replica]) -> Replica:
        return self._choose_of_two(ready)

    def _choose_of_two(self, ready: Sequence[Replica]) -> Replica:
        candidates = self._random.sample(ready, min(2, len(ready)))
        return min(candidates, key=lambda each: each.load)


class PrefixAware(TwoChoices):
    """Ray Serve LLM's router that knows what prompts each replica got.

    It follows ``PrefixCacheAffinityRouter`` of Ray 2.60 and Ray's guide on it: a request goes to
    the replicas that got the longest beginning of its prompt, and if that is less than a tenth of
    it, to those that got the fewest different tokens; of several, to the one with the fewest
    requests. While the largest and the smallest number of requests differ by more than
    ``imbalanced_threshold``, two random replicas are compared. Ray's default for that threshold is
    infinite; a replica that has just started then gets all prompts that are new.
    """

    def __init__(self, seed: int, imbalanced_threshold: float) -> None:
        """Start without memory; see the class for ``imbalanced_threshold``."""
        super().__init__(seed)
        self._imbalanced_threshold = imbalanced_threshold
        self._received = dict[str, set[int]]()
        """Blocks of prompts that each ready replica got."""

    def send(self, ready: Sequence[Replica], now_s: float, /) -> list[Replica]:
        """Bind all requests at once."""
        self._received = {each.name: self._received.get(each.name, set()) for each in ready}
        return super().send(ready, now_s)

    def _choose(self, served: Served, ready: Sequence[Replica]) -> Replica:
        chosen = self._choose_by_prefix(served.request.prefix, ready)
        self._received[chosen.name].update(served.request.prefix)
        return chosen

    def _choose_by_prefix(self, prefix: Sequence[int], ready: Sequence[Replica]) -> Replica:
        loads = [each.load for each in ready]
        if not prefix or max(loads) - min(loads) > self._imbalanced_threshold:
            return self._choose_of_two(ready)
        matched, holders = 0, list(ready)
        for block in prefix:
            others = [each for each in holders if block in self._received[each.name]]
            if not others:
                break
            matched, holders = matched + 1, others
        if matched < _MATCH_RATE * len(prefix):
            sizes = {each.name: len(self._received[each.name]) for each in ready}
            holders = [each for each in ready if sizes[each.name] == min(sizes.values())]
        return min(holders, key=lambda each: each.load)


class Activator(_ArrivalOrder):
    """Knative's activator, which holds back what replicas cannot run at once.

    Knative's documentation ("Load balancing", "Configuring concurrency") and
    ``pkg/activator/net/lb_policy.go`` of knative/serving say: with a ``containerConcurrency``, a
    replica never has more requests than that, the others wait in the activator, and above a
    ``containerConcurrency`` of 3 replicas with room take turns. Here it is the number of requests
    that a replica runs, which is what the targets of `Knative` are a share of. Knative takes the
    activator out of the way while room for a burst is left; here it always stays, as with a
    ``target-burst-capacity`` of -1.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next = 0
        """Index of the replica whose turn is next."""

    def send(self, ready: Sequence[Replica], _: float, /) -> list[Replica]:
        """Send requests in order of arrival while replicas have room."""
        sent = list[Replica]()
        while self._waiting and (chosen := self._take_turn(ready)) is not None:
            chosen.enqueue(self._waiting.popleft())
            sent.append(chosen)
        return sent

    def _take_turn(self, ready: Sequence[Replica]) -> Replica | None:
        """Return the next replica with room, if any has room, and end its turn."""
        start = self._next if self._next < len(ready) else 0
        for offset in range(len(ready)):
            index = (start + offset) % len(ready)
            if ready[index].load < ready[index].capacity.max_num_seqs:
                self._next = index + 1
                return ready[index]
        return None
