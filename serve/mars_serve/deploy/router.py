"""Chooses the replica for a request: one that has cached the prompt's beginning, or the least busy.

Each ingress replica has a router of its own, which only sees the requests that pass through it.
Imports no Ray or HTTP library.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from mars_autoscale.queueing.placement import Placement, slack_of
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.pages import page_key, root_key
from mars_serve.engine.request import Request

_MAX_PAGES = 128
"""Number of leading pages that are compared; prompts that share so many go to the same replica."""


def prompt_keys(
    tenant: str, tokens: Sequence[int], page_size: int, salt: str = "", lora: str = ""
) -> list[bytes]:
    """Return the keys of a prompt's leading full pages, computed as in the engine's page pool."""
    num_pages = min(len(tokens) // page_size, _MAX_PAGES)
    pages = (tokens[page * page_size : (page + 1) * page_size] for page in range(num_pages))
    return list(accumulate(pages, page_key, initial=root_key(tenant, salt, lora)))[1:]


class Router:
    """Chooses replicas for the requests of one model."""

    def __init__(self, page_size: int | None, slack: int) -> None:
        """Start without knowledge; a ``page_size`` of None means that prefix caching is off.

        ``slack`` is explained at `Placement`.
        """
        self._page_size = page_size
        self._placement = Placement(slack, tokens_per_key=page_size or 0)

    @classmethod
    def of(cls, model: ModelSettings) -> Router:
        """Make the router of a model."""
        page_size = model.engine.page_size_on("cuda" if model.num_gpus else "cpu")
        slack = slack_of(model.engine.max_num_seqs)
        return cls(page_size if model.engine.enable_prefix_caching else None, slack)

    def retain(self, replicas: Collection[str]) -> None:
        """Forget all replicas except these."""
        self._placement.retain(replicas)

    def choose(self, request: Request, loads: Mapping[str, float]) -> str:
        """Return the replica for a request among those that may get it, at least one.

        Replicas that failed with this request are avoided if there are others. ``loads`` are those
        of `mars_autoscale.queueing.placement.load_of`.
        """
        fresh = {name: load for name, load in loads.items() if name not in request.failed_on}
        loads = fresh or loads
        if len(self._placement.known) == 1 and len(loads) == 1:
            return next(iter(loads))
        keys = list[bytes]()
        if self._page_size is not None:
            tenant, *others = request.cache_root
            keys = prompt_keys(tenant, request.tokens, self._page_size, *others)
        return self._placement.choose(keys, loads, request.session)
