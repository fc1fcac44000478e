"""Decides what each request feeds into the next step. Knows no tensor.

There are no phases: every running request gets the positions it can use, the rest of its prompt
in chunks or its unstored tokens plus masks, under one budget of positions a step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from mars_serve.engine.pages import PagePool
from mars_serve.engine.request import Request


@dataclass(frozen=True)
class Work:
    """One request's share of a step: ``num_tokens`` committed tokens, then ``num_masks`` masks."""

    request: Request
    num_tokens: int
    num_masks: int
    reads_logits: bool
    """Whether the share reaches the cursor, so that the step proposes tokens."""


class Scheduler:
    """First come, first served; a request is admitted once its worst case fits the free pages."""

    def __init__(self, pool: PagePool, *, max_batch: int, max_positions: int, window: int) -> None:
        assert max_positions > window, "one row and its window must fit a step"
        self.pool = pool
        self.max_batch = max_batch
        self.max_positions = max_positions
        self.window = window
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """Forget a request, wherever it stands, and free its pages."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.pool.release(request.pages)

    def schedule(self) -> list[Work]:
        """Work of the next step: running requests in order of arrival, then admitted ones.

        Decoding requests go first, so that a long prompt never holds the others up by more than
        what the budget leaves for its chunk.
        """
        self._admit()
        budget = self.max_positions
        works = []
        for request in sorted(self.running, key=lambda item: item.num_unstored > self.window + 1):
            work = self._share(request, budget)
            if work is not None:
                works.append(work)
                budget -= work.num_tokens + work.num_masks
        return works

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_batch:
            needed = self.pool.pages_for(self.waiting[0].max_length)
            if needed > self.pool.num_free:
                return
            request = self.waiting.popleft()
            request.pages = self.pool.allocate(needed)
            self.running.append(request)

    def _share(self, request: Request, budget: int) -> Work | None:
        """Work within ``budget`` positions, or None.

        A row reaches its cursor with its whole window or not at all: a window cut short by its
        neighbours' needs would make its output depend on them.
        """
        num_masks = request.num_masks(self.window)
        if request.num_unstored + num_masks <= budget:
            return Work(request, request.num_unstored, num_masks, reads_logits=True)
        num_tokens = min(request.num_unstored - 1, budget)
        if num_tokens < 1:
            return None
        return Work(request, num_tokens, num_masks=0, reads_logits=False)
