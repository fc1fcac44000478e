"""Which replica of a model gets a request: one that has computed the prompt's beginning, or the
least busy one.

`PrefixMap` decides and knows nothing of Ray; `PrefixRouter` is Ray Serve's face of it. Each handle
has a router of its own, which sees only the requests that came through it.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from mars_serve.engine.pages import page_key, root_key
from mars_serve.engine.request import Request

_MAX_PAGES = 128
"""Leading pages of a prompt that are looked at: whoever shares so many goes the same way."""
_MAX_KEYS = 65_536
"""Pages remembered, some 15 MB; those not seen for longest go first."""


def prompt_keys(tenant: str, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Keys of a prompt's leading full pages, as the engine's page pool has them."""
    num_pages = min(len(tokens) // page_size, _MAX_PAGES)
    pages = (tokens[page * page_size : (page + 1) * page_size] for page in range(num_pages))
    return list(accumulate(pages, page_key, initial=root_key(tenant)))[1:]


class PrefixMap:
    """Remembers which replicas were given which beginnings of prompts."""

    def __init__(self, slack: int, max_keys: int = _MAX_KEYS) -> None:
        self.slack = slack
        """A replica is too busy for its prefixes to count once it has this many requests more than
        the least busy one: then waiting costs more than computing the prefix again."""
        self._max_keys = max_keys
        self._holders = OrderedDict[bytes, tuple[str, ...]]()  # least recently used first

    def __len__(self) -> int:
        return len(self._holders)

    def choose(self, keys: Sequence[bytes], loads: Mapping[str, int]) -> str:
        """Replica for a prompt; from now on it counts as a holder of all the prompt's pages.

        Args:
            keys: of the prompt's leading pages, see `prompt_keys`.
            loads: requests that each live replica has; not empty.
        """
        least = min(loads.values())
        chosen = min(self._deepest(keys, loads) or loads, key=loads.__getitem__)
        if loads[chosen] > least + self.slack:
            chosen = min(loads, key=loads.__getitem__)
        self._record(keys, chosen)
        return chosen

    def retain(self, replicas: Collection[str]) -> None:
        """Forget all replicas but these."""
        for key, holders in list(self._holders.items()):
            left = tuple(holder for holder in holders if holder in replicas)
            if left:
                self._holders[key] = left
            else:
                del self._holders[key]

    def _deepest(self, keys: Sequence[bytes], loads: Mapping[str, int]) -> list[str]:
        """Live holders of the longest known beginning."""
        for key in reversed(keys):
            live = [holder for holder in self._holders.get(key, ()) if holder in loads]
            if live:
                return live
        return []

    def _record(self, keys: Sequence[bytes], replica: str) -> None:
        for key in reversed(keys):  # so that ends are forgotten before beginnings
            holders = self._holders.pop(key, ())
            self._holders[key] = holders if replica in holders else (*holders, replica)
        while len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Ray Serve's request router over a `PrefixMap`."""

    def initialize_state(self, *, page_size: int | None, slack: int) -> None:
        """Called once by Ray Serve with the deployment's ``request_router_kwargs``; there is no
        ``page_size`` where replicas keep no prefixes.
        """
        self._page_size = page_size
        self._map = PrefixMap(slack)
        self._sent = Counter[ReplicaID]()
        # Many are chosen before the first is sent, when they arrive together. An entry leaves with
        # its request, so that one cancelled in between is not counted for ever.
        self._chosen = Counter[ReplicaID]()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The chosen replica first; the others, should it not answer."""
        request = _request_of(pending_request)
        if request is not None and request.num_silent:
            # One of them is gone, and nobody knows which: Ray Serve asks those first whose load it
            # does not know, and takes one that answers.
            for each in candidate_replicas:
                self.on_replica_actor_unavailable(each.replica_id)
            return [candidate_replicas]
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        loads = {name: self._load(each.replica_id) for name, each in by_name.items()}
        chosen = by_name.pop(self._map.choose(self._keys(request), loads))
        if pending_request is not None:
            self._chosen[chosen.replica_id] += 1
            weakref.finalize(pending_request, self._chosen.subtract, [chosen.replica_id])
        return [[chosen], list(by_name.values())]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Called by Ray Serve with each request that is sent."""
        super().on_send_request(replica_id)
        self._sent[replica_id] += 1

    def decrement_queue_len_cache(self, replica_id: ReplicaID) -> None:
        """Called by Ray Serve when a request that was sent has ended."""
        super().decrement_queue_len_cache(replica_id)
        self._sent[replica_id] -= 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray Serve when replicas came or went."""
        super().update_replicas(replicas)
        self._retain()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Ray Serve when a request found its replica dead."""
        super().on_replica_actor_died(replica_id)
        self._retain()

    def _retain(self) -> None:
        self._map.retain({each.unique_id for each in self.curr_replicas})
        for counter in (self._sent, self._chosen):
            for gone in counter.keys() - self.curr_replicas.keys():
                del counter[gone]

    def _load(self, replica_id: ReplicaID) -> int:
        return self._sent[replica_id] + self._chosen[replica_id]

    def _keys(self, request: Request | None) -> list[bytes]:
        if request is None or self._page_size is None:
            return []
        return prompt_keys(request.tenant, request.tokens, self._page_size)


def _request_of(pending_request: PendingRequest | None) -> Request | None:
    """What is to be decoded; None of a question about the replica itself."""
    arguments: Sequence[Any] = pending_request.args if pending_request else ()
    return arguments[0] if arguments and isinstance(arguments[0], Request) else None
