"""Credits: how many requests each ingress may send to a replica.

A replica tells each ingress a limit: how many requests the ingress may have sent it since the two
were connected. An ingress tells a replica how many it would have sent by now if it might. Both are
counts from the beginning of the connection, so they mean the same while requests are on their way,
and may be repeated or overtaken by newer ones; "one more" would not.

The limit falls when another ingress needs the room, but never below what the replica has received.
An ingress that learns of it too late has sent more than it may; the engine queues the excess, and
the replica grants that much less until it has ended.

Bound: a replica holds at most ``capacity`` requests that were sent within their limits, and beside
them those sent beyond a limit that had fallen, which are at most the credits taken back within one
message's delay. With one ingress there are none.

Imports no Ray, torch or HTTP library.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

_RESERVE_SHARE = 64
"""A request waits in the engine for every so many that run, to be there when one of them ends. So
many steps, or more, an output takes, so that about one of them ends in a step; more would wait in
the engine where neither the order among requests nor another replica can help them."""


def reserve_of(max_num_seqs: int) -> int:
    """Return how many requests may wait in an engine that runs so many at once."""
    return max_num_seqs // _RESERVE_SHARE


def even_parts(total: int, num: int) -> list[int]:
    """Divide a number into equal parts, the first ones larger by one if need be."""
    return [total // num + (index < total % num) for index in range(num)]


@dataclass
class Credit:
    """An ingress's credit with one replica, from the time they were connected."""

    num_sent: int = 0
    limit: int = 0
    """Latest limit that the replica has told."""
    num_wanted: int = 0
    """Latest demand that the replica was told, see `report`."""

    @property
    def num_free(self) -> int:
        """Number of requests that may be sent now."""
        return max(self.limit - self.num_sent, 0)

    def report(self, num_waiting: int) -> int | None:
        """Return the demand to tell the replica: what was sent to it and what waits.

        None if the replica knows already, or will once what was sent has arrived. So a request
        that is sent at once, or that waited and was reported, needs no message.
        """
        if num_waiting == max(self.num_wanted - self.num_sent, 0):
            return None
        self.num_wanted = self.num_sent + num_waiting
        return self.num_wanted


@dataclass
class _Share:
    """One ingress, as a replica knows it."""

    num_received: int = 0
    num_held: int = 0
    """Requests of this ingress in the engine, whether they run or wait there."""
    num_wanted: int = 0
    """Requests that it would have sent by now if it might, as it has told last."""
    limit: int = 0
    """Limit that was told last."""

    @property
    def demand(self) -> int:
        return max(self.num_wanted - self.num_received, 0)

    @property
    def credit(self) -> int:
        return max(self.limit - self.num_received, 0)


class Grants:
    """Divides a replica's free room among the ingresses that are connected to it.

    Room goes first to ingresses where requests wait, one at a time to the one that has least of the
    replica, so that shares are fair in the sense of max-min; among equals, to the one that has sent
    a request longest ago. What is left stands ready as credits
    for requests that have not arrived yet, so that they need not ask.

    To avoid messages, standing credits stay where they are. Room that becomes free goes to the
    ingress with the fewest; room that is needed is taken from the one with the most; and they are
    divided evenly anew only when some ingress has less than half of an even share. With one ingress
    the limit then moves only when a request ends, and with several a request within its limit moves
    no limit but at every halving of its ingress's credits.
    """

    def __init__(self, max_num_seqs: int, reserve: int) -> None:
        """Start without connections.

        At most ``max_num_seqs`` requests run in the engine at once; ``reserve`` more may wait
        there, to be at hand when a running one ends.
        """
        self.capacity = max_num_seqs + reserve
        self._shares = dict[str, _Share]()
        """Connections by name, the one that has sent a request longest ago first."""
        self._num_held = 0

    def connect(self, ingress: str) -> None:
        """Begin a connection; each has a name that is never used again."""
        assert ingress not in self._shares, "a new connection needs a new name"
        self._shares[ingress] = _Share()

    def disconnect(self, ingress: str) -> None:
        """Forget a connection; its requests take room until they have ended."""
        del self._shares[ingress]

    def received(self, ingress: str) -> None:
        """Count a request that has arrived from an ingress, within its limit or beyond it."""
        share = self._shares[ingress] = self._shares.pop(ingress)
        share.num_received += 1
        share.num_held += 1
        self._num_held += 1

    def ended(self, ingress: str) -> None:
        """Count a request as ended, however it ended, even if its ingress is gone."""
        self._num_held -= 1
        if ingress in self._shares:
            self._shares[ingress].num_held -= 1

    def note_demand(self, ingress: str, num_wanted: int) -> None:
        """Note how many requests an ingress would have sent by now, see `Credit.report`."""
        self._shares[ingress].num_wanted = num_wanted

    @property
    def num_free(self) -> int:
        """Number of requests for which there is room, credits not subtracted."""
        return max(self.capacity - self._num_held, 0)

    def update(self, *, is_short_of_pages: bool) -> dict[str, int]:
        """Divide the room anew, and return the limits that have changed, by the ingress that is to
        be told.

        If ``is_short_of_pages``, requests wait in the engine because pages of the KV cache are
        short, and no more are to come.
        """
        free = 0 if is_short_of_pages else self.num_free
        needed = self._needed(free)
        standing = self._standing(needed, free - sum(needed.values()))
        changed = dict[str, int]()
        for name, share in self._shares.items():
            limit = share.num_received + needed[name] + standing[name]
            if limit != share.limit:
                share.limit = changed[name] = limit
        return changed

    def _needed(self, free: int) -> dict[str, int]:
        wanted = {name: share.demand for name, share in self._shares.items()}
        held = {name: share.num_held for name, share in self._shares.items()}
        return _fill(held, wanted, free)

    def _standing(self, needed: Mapping[str, int], left: int) -> dict[str, int]:
        if not self._shares:
            return {}
        even = left // len(self._shares)
        kept = {name: max(each.credit - needed[name], 0) for name, each in self._shares.items()}
        if min(kept.values()) < even // 2:
            kept = dict.fromkeys(self._shares, even)
        for _ in range(sum(kept.values()) - left):
            kept[max(kept, key=kept.__getitem__)] -= 1
        more = _fill(kept, dict.fromkeys(kept, left), left - sum(kept.values()))
        return {name: kept[name] + more[name] for name in kept}


def _fill(levels: Mapping[str, int], wanted: Mapping[str, int], room: int) -> dict[str, int]:
    """Divide room one by one, each to the name with the lowest level that wants more.

    ``levels`` is what each name has, ``wanted`` the most that it gets; ties go to the first name.
    """
    given = dict.fromkeys(levels, 0)
    order = enumerate(levels.items())
    heap = [(level, place, name) for place, (name, level) in order if wanted[name] > 0]
    heapq.heapify(heap)
    for _ in range(room):
        if not heap:
            break
        level, place, name = heap[0]
        given[name] += 1
        if given[name] < wanted[name]:
            heapq.heapreplace(heap, (level + 1, place, name))
        else:
            heapq.heappop(heap)
    return given
