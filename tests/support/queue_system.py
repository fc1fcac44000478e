"""A small model of ingresses and replicas that send each other messages with random delays.

Time goes in ticks. The queue, the credits and the placement are the real ones; engine and transport
are the simplest that behave like real ones. The rules that must hold at all times are asserted
where they could be broken.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mars_autoscale.queueing.grants import Credit, Grants
from mars_autoscale.queueing.order import FairQueue, QueuedRequest
from mars_autoscale.queueing.placement import Placement
from mars_platform.tier import Tier


@dataclass(eq=False)
class Job:
    """A request, and how it ended."""

    length: int
    """Ticks that it runs."""
    outcome: str | None = None
    engine: Replica | None = None
    """Replica in whose engine it is."""

    def end(self, outcome: str) -> None:
        assert self.outcome is None, f"{self.outcome}, then {outcome}"
        self.outcome = outcome


class Wire:
    """One direction of a connection, which delivers in order."""

    def __init__(self, system: System) -> None:
        self._system, self._messages = system, deque[tuple[int, Callable[[], None]]]()
        self.is_open = True

    def send(self, deliver: Callable[[], None]) -> None:
        arrival = self._system.now + self._system.source.randint(1, self._system.max_delay)
        if self._messages:
            arrival = max(arrival, self._messages[-1][0])
        self._messages.append((arrival, deliver))

    def deliver(self) -> None:
        while self.is_open and self._messages and self._messages[0][0] <= self._system.now:
            self._messages.popleft()[1]()


@dataclass(eq=False)
class Connection:
    """An ingress and a replica."""

    name: str
    ingress: Ingress
    replica: Replica
    up: Wire
    down: Wire
    credit: Credit = field(default_factory=Credit)
    sent: dict[Job, QueuedRequest[Job]] = field(default_factory=dict)
    """Requests that the replica has, as far as the ingress knows."""
    begun: set[Job] = field(default_factory=set)
    """Requests of the ingress that are known to have begun."""
    num_received: int = 0
    limit: int = 0
    """Limit that the replica has told last."""
    lowered: int = -(10**9)
    """Tick at which the limit fell last."""


class Ingress:
    """A queue, and connections to replicas."""

    def __init__(self, system: System) -> None:
        self.system, self.queue = system, FairQueue[Job]()
        self.placement = Placement(slack=2, max_sessions=4)
        self.connections = dict[str, Connection]()
        self.queued_requests = dict[Job, QueuedRequest[Job]]()
        self.served = list[QueuedRequest[Job]]()

    def dispatch(self) -> None:
        """Send what can be sent, and tell how many requests are left."""
        for queued in self.queue.expire(self.system.now):
            self._end(queued.item, "expired")
        while self.queue:
            free = {name: each for name, each in self.connections.items() if each.credit.num_free}
            if not free:
                break
            self._send(self._pop(), free)
        for connection in self.connections.values():
            self.tell_demand(connection)

    def tell_demand(self, connection: Connection) -> None:
        demand, grants = connection.credit.report(len(self.queue)), connection.replica.grants
        if demand is not None:
            connection.up.send(lambda: grants.note_demand(connection.name, demand))

    def cancel(self, job: Job) -> None:
        queued = self.queued_requests[job]
        if self.queue.remove(queued):
            self._end(job, "cancelled")
            return
        connection = next(each for each in self.connections.values() if job in each.sent)
        del connection.sent[job]
        self.queue.settle(queued, queued.cost if job in connection.begun else 0)
        connection.begun.discard(job)
        connection.up.send(lambda: connection.replica.drop(job, connection.name))
        self._end(job, "cancelled")

    def finish(self, connection: Connection, job: Job) -> None:
        if job in connection.sent:
            queued = connection.sent.pop(job)
            connection.begun.discard(job)
            self.queue.settle(queued, self.system.real_cost(queued))
            self._end(job, "finished")

    def note_begun(self, connection: Connection, job: Job) -> None:
        if job in connection.sent:
            connection.begun.add(job)

    def lose(self, connection: Connection) -> None:
        """Learn that a replica has died: what had not begun waits again."""
        del self.connections[connection.name]
        for job, queued in connection.sent.items():
            if job in connection.begun:
                self.queue.settle(queued, queued.cost)
                self._end(job, "lost with its replica")
            else:
                self.queue.settle(queued, 0)
                self.queued_requests[job] = self.queue.add(
                    job,
                    tier=queued.tier,
                    key=queued.key,
                    cost=queued.cost,
                    deadline_s=queued.deadline_s,
                    limit_s=queued.limit_s,
                )
        self.placement.retain(self.connections)

    def _pop(self) -> QueuedRequest[Job]:
        waiting = list(self.queue)
        queued = self.queue.pop()
        assert queued.tier.rank == max(each.tier.rank for each in waiting)
        own = [each for each in waiting if (each.key, each.tier) == (queued.key, queued.tier)]
        assert queued is min(own, key=lambda each: (each.deadline_s, each.arrival))
        self.served.append(queued)
        return queued

    def _send(self, queued: QueuedRequest[Job], free: dict[str, Connection]) -> None:
        loads = {name: float(len(each.sent)) for name, each in free.items()}
        connection = free[self.placement.choose([queued.key.encode()], loads, queued.key)]
        connection.credit.num_sent += 1
        connection.sent[queued.item] = queued
        connection.up.send(lambda: connection.replica.receive(queued.item, connection))

    def _end(self, job: Job, outcome: str) -> None:
        del self.queued_requests[job]
        job.end(outcome)


class Replica:
    """Grants, and an engine that runs some requests and lets others wait."""

    def __init__(self, system: System, max_num_seqs: int, reserve: int) -> None:
        self.system, self.max_num_seqs = system, max_num_seqs
        self.grants = Grants(max_num_seqs, reserve)
        self.connections = dict[str, Connection]()
        self.jobs = dict[Job, Connection]()
        """Requests in the engine, the oldest first."""
        self.left = dict[Job, int]()
        """Ticks that each running request has left."""
        self.beyond = set[Job]()
        """Requests in the engine that were sent beyond their limit."""
        self.is_short = False

    def receive(self, job: Job, connection: Connection) -> None:
        assert job.engine is None, "a request is in two engines"
        self.grants.received(connection.name)
        connection.num_received += 1
        job.engine, self.jobs[job] = self, connection
        if connection.num_received > connection.limit:
            self.beyond.add(job)
            assert self.system.now - connection.lowered <= 2 * self.system.max_delay
        assert len(self.jobs) <= self.grants.capacity + len(self.beyond)

    def drop(self, job: Job, name: str) -> None:
        """Take a request out of the engine, if it is there."""
        if job in self.jobs:
            del self.jobs[job]
            self.left.pop(job, None)
            self.beyond.discard(job)
            job.engine = None
            self.grants.ended(name)

    def forget(self, connection: Connection) -> None:
        """Learn that an ingress has died."""
        del self.connections[connection.name]
        self.grants.disconnect(connection.name)
        for job in [job for job, each in self.jobs.items() if each is connection]:
            self.drop(job, connection.name)

    def step(self) -> None:
        """Run for a tick."""
        for job in list(self.left):
            self.left[job] -= 1
            if self.left[job] <= 0:
                connection = self.jobs[job]
                self.drop(job, connection.name)
                self._tell(connection, connection.ingress.finish, job)
        for job, connection in self.jobs.items():
            if len(self.left) < self.max_num_seqs and job not in self.left and not self.is_short:
                self.left[job] = job.length
                self._tell(connection, connection.ingress.note_begun, job)

    def update(self) -> None:
        for name, limit in self.grants.update(is_short_of_pages=self.is_short).items():
            connection = self.connections[name]
            if limit < connection.limit:
                connection.lowered = self.system.now
            connection.limit = limit
            connection.down.send(lambda to=connection, limit=limit: _set_limit(to, limit))

    def _tell(
        self, connection: Connection, about: Callable[[Connection, Job], None], job: Job
    ) -> None:
        connection.down.send(lambda: about(connection, job))


def _set_limit(connection: Connection, limit: int) -> None:
    connection.credit.limit = limit


class System:
    """Ingresses and replicas, every one connected with every other."""

    def __init__(
        self, seed: int, max_delay: int, real_cost: Callable[[QueuedRequest[Job]], int]
    ) -> None:
        self.source, self.max_delay, self.real_cost = random.Random(seed), max_delay, real_cost
        self.now = 0
        self.ingresses, self.replicas = list[Ingress](), list[Replica]()
        self.jobs = list[Job]()
        self._news = deque[tuple[int, Callable[[], None]]]()
        """News of deaths, each with the tick at which it arrives."""
        self._num_connections = 0

    def add_ingress(self) -> Ingress:
        self.ingresses.append(ingress := Ingress(self))
        for replica in self.replicas:
            self._connect(ingress, replica)
        return ingress

    def add_replica(self, max_num_seqs: int = 3, reserve: int = 1) -> Replica:
        self.replicas.append(replica := Replica(self, max_num_seqs, reserve))
        for ingress in self.ingresses:
            self._connect(ingress, replica)
        return replica

    def arrive(
        self,
        ingress: Ingress,
        key: str,
        tier: Tier = Tier.DEFAULT,
        *,
        cost: int = 10,
        length: int = 3,
        limit: float | None = None,
    ) -> None:
        self.jobs.append(job := Job(length))
        ingress.queued_requests[job] = ingress.queue.add(
            job,
            tier=tier,
            key=key,
            cost=cost,
            deadline_s=self.now + self.source.random() * 20,
            limit_s=limit,
        )

    def kill_replica(self, replica: Replica) -> None:
        self.replicas.remove(replica)
        for job in replica.jobs:
            job.engine = None
        for connection in replica.connections.values():
            connection.up.is_open = connection.down.is_open = False
            if connection.ingress in self.ingresses:
                self._tell_later(lambda each=connection: each.ingress.lose(each))

    def kill_ingress(self, ingress: Ingress) -> None:
        self.ingresses.remove(ingress)
        for job in ingress.queued_requests:
            job.end("lost with its ingress")
        ingress.queued_requests.clear()
        for connection in ingress.connections.values():
            connection.sent.clear()
            connection.up.is_open = connection.down.is_open = False
            if connection.replica in self.replicas:
                self._tell_later(lambda each=connection: each.replica.forget(each))

    def tick(self, *, is_frozen: bool = False) -> None:
        """Let a tick pass; engines stand still while the system is frozen."""
        self.now += 1
        while self._news and self._news[0][0] <= self.now:
            self._news.popleft()[1]()
        for replica in self.replicas:
            for connection in list(replica.connections.values()):
                connection.up.deliver()
                connection.down.deliver()
        for ingress in self.ingresses:
            ingress.dispatch()
        for replica in self.replicas:
            if not is_frozen:
                replica.step()
            replica.update()

    def freeze(self) -> None:
        """Let all messages arrive while nothing happens, then assert that no room is left unused
        where requests wait.

        Demand, limit and request take a delay each. Room that was kept for an ingress whose
        requests have gone elsewhere takes two more, to learn of it and to grant the room anew.
        """
        for _ in range(6 * self.max_delay):
            self.tick(is_frozen=True)
        for ingress in self.ingresses:
            for connection in ingress.connections.values():
                replica = connection.replica
                has_room = replica.grants.num_free and not replica.is_short
                assert not (ingress.queue and has_room and connection.up.is_open)

    def _connect(self, ingress: Ingress, replica: Replica) -> None:
        self._num_connections += 1
        name = str(self._num_connections)
        connection = Connection(name, ingress, replica, Wire(self), Wire(self))
        ingress.connections[name] = replica.connections[name] = connection
        replica.grants.connect(name)

    def _tell_later(self, news: Callable[[], None]) -> None:
        self._news.append((self.now + self.max_delay, news))
