"""Chooses the replica for a request: one that has cached the prompt's beginning, or the least busy.

Each ingress replica has a router of its own, which only sees the requests that pass through it.
Imports no Ray or HTTP library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from mars_autoscale.queueing.placement import Placement, load_of, slack_of
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.pages import page_key, root_key
from mars_serve.engine.request import Request

_MAX_PAGES = 128
"""Number of leading pages that are compared; prompts that share so many go to the same replica."""


class Engine(Protocol):
    """An engine, as a router sees it."""

    @property
    def num_requests(self) -> int:
        """Requests that this process has sent and that have not ended."""

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens of those requests that have no output yet."""

    @property
    def is_overdue(self) -> bool:
        """Whether the engine shows no sign of life."""


def prompt_keys(tenant: str, tokens: Sequence[int], page_size: int, salt: str = "") -> list[bytes]:
    """Return the keys of a prompt's leading full pages, computed as in the engine's page pool."""
    num_pages = min(len(tokens) // page_size, _MAX_PAGES)
    pages = (tokens[page * page_size : (page + 1) * page_size] for page in range(num_pages))
    return list(accumulate(pages, page_key, initial=root_key(tenant, salt)))[1:]


class Router:
    """Chooses replicas for the requests of one model."""

    def __init__(self, page_size: int | None, slack: int) -> None:
        """Start without knowledge; a ``page_size`` of None means that prefix caching is off.

        ``slack`` is explained at `Placement`.
        """
        self._page_size = page_size
        self._placement = Placement(slack, tokens_per_key=page_size or 0)
        self._known = frozenset[str]()

    @classmethod
    def of(cls, model: ModelSettings) -> Router:
        """Make the router of a model."""
        page_size = model.engine.page_size_on("cuda" if model.num_gpus else "cpu")
        slack = slack_of(model.engine.max_num_seqs)
        return cls(page_size if model.engine.enable_prefix_caching else None, slack)

    def retain(self, replicas: frozenset[str]) -> None:
        """Forget all replicas except these."""
        if replicas != self._known:
            self._known = replicas
            self._placement.retain(replicas)

    def choose(self, request: Request, engines: Mapping[str, Engine]) -> str:
        """Return the replica for a request among ``engines``, those that may get it, at least one.

        Replicas that are overdue, or that failed with this request, are avoided if there are
        others.
        """
        sound = [name for name, engine in engines.items() if not engine.is_overdue]
        fresh = [name for name in sound if name not in request.failed_on]
        loads = {name: _load(engines[name]) for name in fresh or sound or engines}
        if len(self._known) == 1 and len(loads) == 1:
            return next(iter(loads))
        keys = list[bytes]()
        if self._page_size is not None:
            keys = prompt_keys(request.tenant, request.tokens, self._page_size, request.cache_salt)
        return self._placement.choose(keys, loads, request.session)


def _load(engine: Engine) -> float:
    return load_of(engine.num_requests, engine.backlog_tokens)
