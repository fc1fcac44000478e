"""Routes a request to a replica that has cached the prompt's beginning, or to the least busy one.

`PrefixMap` decides; `PrefixRouter` connects it to Ray Serve. Each handle has its own router, which
only sees the requests that pass through it.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from mars_serve.engine.pages import page_key, root_key
from mars_serve.engine.request import Request

_MAX_PAGES = 128
"""Number of leading pages that are compared; prompts that share so many go to the same replica."""
_MAX_KEYS = 65_536
"""Number of pages remembered, about 15 MB; the least recently used are forgotten first."""
_AVOID_S = 5.0
"""Seconds in which a replica gets no requests once its engine has died or did not answer. By then
Ray Serve knows of a death; a request that finds the engine still overdue is sent elsewhere."""


def prompt_keys(tenant: str, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Return the keys of a prompt's leading full pages, computed as in the engine's page pool."""
    num_pages = min(len(tokens) // page_size, _MAX_PAGES)
    pages = (tokens[page * page_size : (page + 1) * page_size] for page in range(num_pages))
    return list(accumulate(pages, page_key, initial=root_key(tenant)))[1:]


class PrefixMap:
    """Remembers which replicas received which beginnings of prompts."""

    def __init__(self, slack: int, max_keys: int = _MAX_KEYS) -> None:
        self.slack = slack
        """Number of requests above the least busy replica's from which on prefixes do not count:
        waiting then takes longer than computing the prefix again."""
        self._max_keys = max_keys
        self._holders = OrderedDict[bytes, tuple[str, ...]]()  # least recently used first

    def __len__(self) -> int:
        return len(self._holders)

    def choose(self, keys: Sequence[bytes], loads: Mapping[str, int]) -> str:
        """Return a replica for a prompt, and remember it as a holder of the prompt's pages.

        Args:
            keys: Keys of the prompt's leading pages, see `prompt_keys`.
            loads: Number of requests of each live replica; not empty.
        """
        least = min(loads.values())
        chosen = min(self._deepest(keys, loads) or loads, key=loads.__getitem__)
        if loads[chosen] > least + self.slack:
            chosen = min(loads, key=loads.__getitem__)
        self._record(keys, chosen)
        return chosen

    def retain(self, replicas: Collection[str]) -> None:
        """Forget all replicas except these."""
        for key, holders in list(self._holders.items()):
            left = tuple(holder for holder in holders if holder in replicas)
            if left:
                self._holders[key] = left
            else:
                del self._holders[key]

    def _deepest(self, keys: Sequence[bytes], loads: Mapping[str, int]) -> list[str]:
        """Return the live holders of the longest known beginning."""
        for key in reversed(keys):
            live = [holder for holder in self._holders.get(key, ()) if holder in loads]
            if live:
                return live
        return []

    def _record(self, keys: Sequence[bytes], replica: str) -> None:
        for key in reversed(keys):  # ends are then forgotten before beginnings
            holders = self._holders.pop(key, ())
            self._holders[key] = holders if replica in holders else (*holders, replica)
        while len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)


class FailedReplicas:
    """Remembers which replicas have lately died or not answered.

    A replica whose engine is dead fails its requests at once, so it would look the least busy.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns the time in seconds."""
        self._clock = clock
        self._ends_s = dict[str, float]()

    def note(self, names: Iterable[str]) -> None:
        """Avoid replicas for some seconds from now on."""
        self._ends_s.update(dict.fromkeys(names, self._clock() + _AVOID_S))

    def without(self, names: Collection[str]) -> Collection[str]:
        """Return the replicas that need not be avoided; all of them if each one has failed."""
        now_s = self._clock()
        self._ends_s = {name: end_s for name, end_s in self._ends_s.items() if end_s > now_s}
        return [name for name in names if name not in self._ends_s] or names


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Ray Serve's request router, which chooses replicas with a `PrefixMap`."""

    def initialize_state(self, *, page_size: int | None, slack: int) -> None:
        """Prepare the router; Ray Serve calls this once with ``request_router_kwargs``.

        Args:
            page_size: Tokens per page of the KV cache; None if prefix caching is off.
            slack: See `PrefixMap.slack`.
        """
        self._page_size = page_size
        self._map = PrefixMap(slack)
        self._sent = Counter[ReplicaID]()
        # Requests that arrive together are all routed before the first is sent, so routed ones
        # count. An entry ends with its request, so a request cancelled in between is not counted
        # forever.
        self._chosen = Counter[ReplicaID]()
        self._failed = FailedReplicas()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica first, then the others in case it does not answer."""
        request = _request_of(pending_request)
        if request is not None:
            self._failed.note(request.failed_on)
        names = self._failed.without([each.replica_id.unique_id for each in candidate_replicas])
        candidate_replicas = [
            each for each in candidate_replicas if each.replica_id.unique_id in names
        ]
        if request is not None and request.num_silent:
            # One of the replicas is lost, but which is unknown. Ray Serve probes replicas of
            # unknown load and takes one that answers.
            for each in candidate_replicas:
                self.on_replica_actor_unavailable(each.replica_id)
            return [candidate_replicas]
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        loads = {
            name: self._sent[each.replica_id] + self._chosen[each.replica_id]
            for name, each in by_name.items()
        }
        keys = list[bytes]()
        if request is not None and self._page_size is not None:
            keys = prompt_keys(request.tenant, request.tokens, self._page_size)
        chosen = by_name.pop(self._map.choose(keys, loads))
        if pending_request is not None:
            self._chosen[chosen.replica_id] += 1
            weakref.finalize(pending_request, self._chosen.subtract, [chosen.replica_id])
        return [[chosen], list(by_name.values())]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request; Ray Serve calls this when it is sent."""
        super().on_send_request(replica_id)
        self._sent[replica_id] += 1

    def decrement_queue_len_cache(self, replica_id: ReplicaID) -> None:
        """Count a request as ended; Ray Serve calls this when it has ended."""
        super().decrement_queue_len_cache(replica_id)
        self._sent[replica_id] -= 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget replicas that are gone; Ray Serve calls this when replicas change."""
        super().update_replicas(replicas)
        self._retain()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a dead replica; Ray Serve calls this when a request failed on it."""
        super().on_replica_actor_died(replica_id)
        self._retain()

    def _retain(self) -> None:
        self._map.retain({each.unique_id for each in self.curr_replicas})
        for counter in (self._sent, self._chosen):
            for gone in counter.keys() - self.curr_replicas.keys():
                del counter[gone]


def _request_of(pending_request: PendingRequest | None) -> Request | None:
    """Return the request to decode; None for a call that asks about the replica itself."""
    arguments: Sequence[Any] = pending_request.args if pending_request else ()
    return arguments[0] if arguments and isinstance(arguments[0], Request) else None
