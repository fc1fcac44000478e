"""The queue of one model in one ingress replica: requests wait here until a replica has room.

A replica grants credits for the requests that it can run, and a few to have at hand. A request
takes one at once if there is one; otherwise it waits in the order of `FairQueue`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mars_autoscale.queueing.estimate import LateRule, StartPace
from mars_autoscale.queueing.grants import even_parts, reserve_of
from mars_autoscale.queueing.order import LATE_TURN, FairQueue, QueuedRequest, late_from
from mars_autoscale.queueing.placement import has_room, load_of
from mars_platform.tier import Tier
from mars_serve.config.settings import ModelSettings
from mars_serve.deploy.router import Router
from mars_serve.engine.ipc.client import (
    DeadlineMissed,
    EngineClient,
    EngineDied,
    QueueFull,
    QueueTimeout,
)
from mars_serve.engine.ipc.messages import Demand
from mars_serve.engine.request import Request

_OBJECTIVE_S = 1.0
"""Seconds within which a request is to begin if neither it nor the model's autoscaling says so."""
_FIRST_OUTPUT_TOKENS = 256
"""Expected output of a request, in tokens, before the first one has ended."""
_ENDED_WEIGHT = 0.05
"""Weight of one ended request in the running mean of output tokens."""
_SPARE_SHARE = 4
"""One credit in so many is kept from a key that has all the others, while other keys are active.
About half of these let a request run at once; the rest are for those at hand in the engine."""
_ACTIVE_S = 60.0
"""Seconds for which a key counts as active after its latest request."""
_TELL_S = 0.1
"""Least seconds between two messages to the engines about what waits."""


class Engines(Protocol):
    """The engines of a model, as the queue sees them."""

    def usable(self) -> dict[str, EngineClient]:
        """Return the engines that may get requests, by replica."""


@dataclass(eq=False)
class _Waiting:
    request: Request
    arrived_s: float
    lease: asyncio.Future[Lease]


@dataclass(eq=False)
class Lease:
    """The permission to send a request to an engine."""

    replica: str
    client: EngineClient
    request: Request
    queued: QueuedRequest[_Waiting] | None = None
    """The request's entry in the queue; None if it did not wait."""


class RequestQueue:
    """The requests of one model that wait in this process; it belongs to one event loop.

    Metrics and inner loops see what waits as if it waited in the engines: each engine is told an
    even share of it.
    """

    def __init__(
        self,
        model: ModelSettings,
        engines: Engines,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_arrived = self.prompt_tokens = 0
        """Requests that have arrived since the start, and their prompt tokens."""
        self._engines = engines
        self._router = Router.of(model)
        self._clock = clock
        objective = model.autoscaling.objective_ttft_s if model.autoscaling else _OBJECTIVE_S
        self._objective_s = objective
        self._most_replicas = model.most_replicas
        self._max_num_seqs = model.engine.max_num_seqs
        self._reserve = reserve_of(self._max_num_seqs)
        self._queue = FairQueue[_Waiting]()
        self._pace = StartPace(clock)
        self._mean_output = float(_FIRST_OUTPUT_TOKENS)
        self._held = Counter[str]()
        """Requests that have had their lease and have not ended, by key."""
        self._active = OrderedDict[str, float]()
        """Time of the latest request of each active key, the oldest first."""
        self._reserved: dict[EngineClient, list[Lease]] = {}
        """Leases that were given and whose requests have not been sent yet, by engine."""
        self._demand: dict[EngineClient, Demand] = {}
        """The message that each engine got last."""
        self._telling: asyncio.TimerHandle | None = None
        self._expiring: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def waiting_by_tier(self) -> Counter[Tier]:
        """Return the requests that wait here, or in engines that they were sent to from here.

        Any thread may call this.
        """
        waiting = Counter({tier: self._queue.num_of(tier) for tier in Tier})
        for client in list(self._engines.usable().values()):
            waiting.update(client.waiting_tiers())
        return waiting

    async def lease(self, request: Request, arrived_s: float) -> Lease:
        """Wait until a replica has room for a request, which may have been at another one before.

        `sent` must be called once the request is sent or given up, and `ended` when it has ended.

        Raises:
            QueueFull: the request would surely come too late.
            QueueTimeout: its lease has not come within the time that it allows.
        """
        if not request.num_moves:
            self.num_arrived += 1
            self.prompt_tokens += request.num_prompt
        self._active[request.key] = self._clock()
        self._active.move_to_end(request.key)
        if self._next() is None and not self._must_wait(request):
            lease = self._give(request)
            if lease is not None:
                return lease
        waiting = _Waiting(request, arrived_s, asyncio.get_running_loop().create_future())
        queued = self._add(waiting)
        try:
            lease = await waiting.lease
        except asyncio.CancelledError:
            if not self._queue.remove(queued) and waiting.lease.done():
                self._withdraw(waiting.lease)
            raise
        finally:
            self._tell_soon()
        request.waited_s = self._clock() - arrived_s
        return lease

    def sent(self, lease: Lease) -> None:
        """Note that a lease's request has been sent, or never will be."""
        reserved = self._reserved[lease.client]
        reserved.remove(lease)
        if not reserved:
            del self._reserved[lease.client]

    def ended(self, lease: Lease, request: Request, num_output: int, num_hits: int) -> None:
        """Note that a lease's request has ended, and charge its key what it cost.

        The request got ``num_output`` tokens; ``num_hits`` tokens of its prompt were cached.
        """
        self._let_go(request.key)
        if num_output:
            self._mean_output += _ENDED_WEIGHT * (num_output - self._mean_output)
        if lease.queued is not None:
            cost = max(request.num_prompt - num_hits, 0) + num_output if num_output else 0
            self._queue.settle(lease.queued, cost)
        self.serve()

    def serve(self) -> None:
        """Give leases to waiting requests while engines have room."""
        while (queued := self._next()) is not None:
            if queued.item.lease.done():  # cancelled, and its task has not run since
                self._queue.remove(queued)
                continue
            lease = self._give(queued.item.request)
            if lease is None:
                break
            lease.queued = queued
            self._queue.take(queued)
            self._pace.began(queued.cost)
            queued.item.lease.set_result(lease)
        self._pace.note_waiting(bool(self._queue))
        if self._queue or self._is_counted:
            self._tell_soon()

    def _next(self) -> QueuedRequest[_Waiting] | None:
        """Return the request that is next to get a lease; None if none may have one."""
        now_s, skipped = self._clock(), set[str]()
        while (first := self._queue.peek(skipped, now_s=now_s)) is not None:
            if not self._must_wait(first.item.request):
                break
            skipped.add(first.key)
        return first

    def _must_wait(self, request: Request) -> bool:
        """Whether a request's key has all credits but those that are kept for other active keys,
        or enough prompts at each engine.

        So their requests find room at once. Without them, or with few credits, none are kept.
        Grammars that may still be compiled, in which time their credits are of use to nobody, never
        have more than that, and those of one key only as many as are kept.
        """
        clients = self._engines.usable().values()
        free = sum(self._num_free(client) for client in clients)
        if free and not any(self._may_get_more(client, request.key) for client in clients):
            return True
        room = free + self._held.total()
        kept = room // _SPARE_SHARE
        if request.options.grammar is not None:
            num = self._num_compiling()
            if num[request.key] >= max(kept, 1) or num.total() >= room - kept:
                return True
        return self._has_several_keys() and self._held[request.key] >= room - kept

    def _num_compiling(self) -> Counter[str]:
        """Return the requests that have a credit while their grammar may compile, by key."""
        num = Counter[str]()
        for client in self._engines.usable().values():
            num += client.num_compiling()
            reserved = (lease.request for lease in self._reserved.get(client, ()))
            num.update(each.key for each in reserved if each.options.grammar is not None)
        return num

    def _has_several_keys(self) -> bool:
        while self._active and next(iter(self._active.values())) < self._clock() - _ACTIVE_S:
            self._active.popitem(last=False)
        return len(self._active) > 1

    def _let_go(self, key: str) -> None:
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]

    def _give(self, request: Request) -> Lease | None:
        """Take a credit of the engine that suits a request best; None if none has one."""
        usable = self._engines.usable()
        self._router.retain(usable)
        loads = {
            name: self._load(client)
            for name, client in usable.items()
            if self._may_get_more(client, request.key)
        }
        if not loads:
            return None
        name = self._router.choose(request, loads)
        client = usable[name]
        lease = Lease(name, client, request)
        self._reserved.setdefault(client, []).append(lease)
        self._held[request.key] += 1
        return lease

    def _may_get_more(self, client: EngineClient, key: str) -> bool:
        """Whether an engine has room for a key's request, which takes turns with the prompts of
        other keys, and so waits for those of its own key alone.
        """
        is_free = self._num_free(client) > 0
        return is_free and has_room(self._load(client, key), self._max_num_seqs)

    def _load(self, client: EngineClient, key: str | None = None) -> float:
        """Return an engine's load with the leases that were given; if a ``key`` is given, of all
        prompts those of the key alone count.
        """
        reserved = [lease.request for lease in self._reserved.get(client, ())]
        num_tokens = client.backlog.total() if key is None else client.backlog[key]
        num_tokens += sum(each.num_prompt for each in reserved if key in (None, each.key))
        return load_of(client.num_requests + len(reserved), num_tokens)

    def _num_free(self, client: EngineClient) -> int:
        return (
            0 if client.is_overdue else client.credit.num_free - len(self._reserved.get(client, []))
        )

    def _add(self, waiting: _Waiting) -> QueuedRequest[_Waiting]:
        request = waiting.request
        wanted_s = request.deadline_s or self._objective_s
        deadline_s = waiting.arrived_s + wanted_s
        tier, key = request.options.tier, request.key
        self._refuse_late(request, deadline_s)
        late_s = late_from(waiting.arrived_s, wanted_s)
        queued = self._queue.add(
            waiting,
            tier=tier,
            key=key,
            cost=self._expected_cost(request),
            deadline_s=deadline_s,
            limit_s=self._limit_s(waiting, late_s),
            late_s=late_s,
        )
        self._pace.note_waiting(True)
        self._expire_later()
        self._tell_soon()
        return queued

    def _limit_s(self, waiting: _Waiting, late_s: float) -> float | None:
        """Return the time until which a request waits; None for as long as it takes.

        Once nothing is left to give, one that would wait in vain behind the late ones, were all
        replicas there that may be ordered, waits until it is late.
        """
        request, longest_s = waiting.request, waiting.request.options.max_queue_s
        if longest_s is None:
            return None
        each_s = max((rule.each_s for rule in self._late_rules()), default=0.0)
        num_first = LATE_TURN * self._queue.num_late(request.options.tier, self._clock())
        is_vain = num_first * each_s / self._most_replicas > longest_s and not request.num_moves
        limit_s = waiting.arrived_s + longest_s
        return min(limit_s, late_s) if is_vain else limit_s

    def _late_rules(self) -> list[LateRule]:
        """Return the replicas' rules for late requests if every one has a rule, else nothing."""
        rules = [client.late_rule for client in self._engines.usable().values()]
        found = [rule for rule in rules if rule is not None]
        return found if len(found) == len(rules) else []

    def _expected_cost(self, request: Request) -> int:
        output = min(request.options.max_tokens, round(self._mean_output))
        return max(request.num_prompt + output, 1)

    def _refuse_late(self, request: Request, deadline_s: float) -> None:
        """Refuse a request that would come too late.

        A deadline of its own counts if it surely cannot be met. The model's objective counts once
        every replica says that nothing is left to give.
        """
        usable, tier, now_s = self._engines.usable(), request.options.tier, self._clock()
        if request.deadline_s is not None:
            _, tokens_ahead = self._queue.ahead(tier, request.key, deadline_s, now_s=now_s)
            wait_s = self._pace.wait_s(tokens_ahead)
            speedup = max(self._most_replicas / max(len(usable), 1), 1.0)
            if self._pace.is_hopeless(tokens_ahead, deadline_s, speedup=speedup):
                reason = f"the request would wait about {wait_s:.1f} s"
                raise DeadlineMissed(reason, wait_s)
        if rules := self._late_rules():
            # of those that wait in engines, these alone do not begin at the next step
            num_sent = sum(
                min(client.num_waiting(tier), self._reserve) for client in usable.values()
            )
            num_ahead = (self._queue.num_before(tier, now_s) + num_sent) / len(rules)
            late_s = max(rule.late_s(num_ahead) for rule in rules)
            if late_s > 0:
                raise QueueFull(f"the request would come {late_s:.1f} s too late", late_s)

    def _withdraw(self, given: asyncio.Future[Lease]) -> None:
        if given.cancelled() or given.exception() is not None:
            return
        lease = given.result()
        assert lease.queued is not None
        self.sent(lease)
        self._let_go(lease.queued.key)
        self._queue.settle(lease.queued, 0)
        self.serve()

    # Limits of waiting

    def _expire_later(self) -> None:
        if self._expiring is not None:
            self._expiring.cancel()  # the first limit may be another one now
            self._expiring = None
        limit_s = self._queue.first_limit_s()
        if limit_s is not None:
            wait_s = max(limit_s - self._clock(), 0.0)
            self._expiring = asyncio.get_running_loop().call_later(wait_s, self._expire)

    def _expire(self) -> None:
        for queued in self._queue.expire(self._clock()):
            if not queued.item.lease.done():
                waited_s = (queued.limit_s or 0.0) - queued.item.arrived_s
                problem = QueueTimeout(f"no replica began the request within {waited_s:.3g} s")
                queued.item.lease.set_exception(problem)
        self._pace.note_waiting(bool(self._queue))
        self._expire_later()

    # The engines' view of the queue

    @property
    def _is_counted(self) -> bool:
        return any(each.share for each in self._demand.values())

    def _tell_soon(self) -> None:
        if self._telling is None:
            wait_s = 0.0 if self._queue and not self._is_counted else _TELL_S
            self._telling = asyncio.get_running_loop().call_later(wait_s, self._tell)

    def _tell(self) -> None:
        """Tell every engine how many requests wait, and its part of those.

        Nothing waits for an engine that gets no more requests; one that drains ends by this.
        """
        self._telling = None
        clients = list(self._engines.usable().values())
        for client in [each for each in self._demand if each not in clients]:
            self._tell_one(client, 0, 0)
        if not clients:
            return
        num_waiting = len(self._queue)
        for client, share in zip(clients, even_parts(num_waiting, len(clients)), strict=True):
            self._tell_one(client, num_waiting, share)

    def _tell_one(self, client: EngineClient, num_waiting: int, share: int) -> None:
        before = self._demand.get(client, Demand(0, 0))
        wanted = client.credit.report(num_waiting)
        now = Demand(before.num_wanted if wanted is None else wanted, share)
        self._demand[client] = now
        if now == before and client.is_alive:
            return
        try:
            client.note_demand(now)
        except EngineDied:
            del self._demand[client]
