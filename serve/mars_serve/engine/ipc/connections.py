"""The connections of an engine's process, and the requests that came over each."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from mars_autoscale.queueing.grants import Grants
from mars_serve.engine.ipc.channel import Channel, ChannelClosed
from mars_serve.engine.ipc.messages import Condition, CreditGrant, Demand, Heartbeat, SetLateRule

_ItemT = TypeVar("_ItemT")

_BEAT_S = 2.0
"""Seconds between two signs of life; an `EngineClient` may miss a few of them before it takes the
engine for dead."""


@dataclass(eq=False)
class Connection:
    """One connection."""

    channel: Channel
    name: str
    demand: Demand = field(default_factory=lambda: Demand(0, 0))
    """Latest message about the requests that wait at the other end."""


class Connections:
    """All connections; any thread may call any method.

    The starter's connection must not break: sending to it raises, sending to others does not. The
    others get credits for requests, which `Grants` divides among them.
    """

    def __init__(self, starter: Channel, grants: Grants) -> None:
        self.starter = Connection(starter, "starter")
        self._grants = grants
        self._others: list[Connection] = []
        self._num_ever = 0
        self._of_request: dict[str, Connection] = {}
        self._condition = Condition()
        self._late_rule = SetLateRule(None)
        self._is_short_of_pages = False
        self._lock = threading.Lock()
        self._is_closed = threading.Event()

    @property
    def num_waiting(self) -> int:
        """Requests that wait at the other ends and are counted here."""
        return sum(each.demand.share for each in list(self._others))

    def add(self, channel: Channel, greeting: object) -> Connection:
        """Add a connection and send it a first message, and what others know by now."""
        with self._lock:
            self._num_ever += 1
            added = Connection(channel, f"ingress-{self._num_ever}")
            self.send(added, greeting)
            self.send(added, self._condition)
            self.send(added, self._late_rule)
            self._others.append(added)
            self._grants.connect(added.name)
            self._tell_limits()
        return added

    def remove(self, connection: Connection) -> list[str]:
        """Close a connection and return the ids of its requests, which are to be cancelled."""
        connection.channel.close()
        with self._lock:
            if connection in self._others:
                self._others.remove(connection)
                self._grants.disconnect(connection.name)
                self._tell_limits()
        return [name for name, sender in list(self._of_request.items()) if sender is connection]

    def received(self, request_id: str, connection: Connection) -> None:
        """Remember over which connection a request came."""
        self._of_request[request_id] = connection
        if connection is not self.starter:
            with self._lock:
                self._grants.received(connection.name)

    def ended(self, request_id: str) -> None:
        """Forget a request that has ended; `regrant` gives its room to others."""
        connection = self._of_request.pop(request_id, None)
        if connection is not None and connection is not self.starter:
            with self._lock:
                self._grants.ended(connection.name)

    def note_demand(self, connection: Connection, demand: Demand) -> None:
        """Note what waits at the other end of a connection."""
        with self._lock:
            connection.demand = demand
            if connection in self._others:
                self._grants.note_demand(connection.name, demand.num_wanted)
                self._tell_limits()

    def regrant(self, *, is_short_of_pages: bool) -> None:
        """Give room that has become free to those who want it, unless pages are short."""
        with self._lock:
            self._is_short_of_pages = is_short_of_pages
            self._tell_limits()

    def by_sender(
        self, items: Iterable[_ItemT], id_of: Callable[[_ItemT], str]
    ) -> dict[Connection, list[_ItemT]]:
        """Return items by the connection that their requests came over; ``id_of`` names these."""
        found = defaultdict[Connection, list[_ItemT]](list)
        for item in items:
            connection = self._of_request.get(id_of(item))
            if connection is not None:
                found[connection].append(item)
        return found

    def send(self, connection: Connection, message: object) -> None:
        """Send a message; what a closed connection would have got is lost.

        Raises:
            ChannelClosed: the starter's connection is closed.
        """
        try:
            connection.channel.send(message)
        except ChannelClosed:
            if connection is self.starter:
                raise

    def tell(self, told: Condition | SetLateRule) -> None:
        """Send what the starter says to all others, and to those who come later."""
        with self._lock:
            if isinstance(told, Condition):
                self._condition = told
            else:
                self._late_rule = told
            for connection in self._others:
                self.send(connection, told)

    def beat(self) -> None:
        """Send signs of life until `close`, to the starter only while it waits for outputs."""
        with suppress(ChannelClosed):
            while not self._is_closed.wait(_BEAT_S):
                for connection in {*self._of_request.values(), *self._others}:
                    self.send(connection, Heartbeat())

    def close(self) -> None:
        """Close all connections."""
        self._is_closed.set()
        for connection in [self.starter, *self._others]:
            connection.channel.close()

    def _tell_limits(self) -> None:
        changed = self._grants.update(is_short_of_pages=self._is_short_of_pages)
        for connection in self._others:
            if connection.name in changed:
                self.send(connection, CreditGrant(changed[connection.name]))
