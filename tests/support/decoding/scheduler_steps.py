"""A scheduler's steps without a model, which check what each row reads and writes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from decoding.engine_requests import make_request
from mars_platform.method.mode import Mode
from mars_serve.engine.attention.interface import LayerGroup
from mars_serve.engine.memory import Memory, WindowPages
from mars_serve.engine.pages import PagePool
from mars_serve.engine.request import Draft, Request
from mars_serve.engine.scheduled_row import ScheduledRow
from mars_serve.engine.scheduler import ChooseMasks, Scheduler

Check = Callable[[list[ScheduledRow]], None]


def windowed(**reach: int) -> LayerGroup:
    """Layers that see the last tokens only, whose sizes do not matter."""
    return LayerGroup(1, 1, 1, 1, 1, **reach)


def make_scheduler(
    num_pages: int = 64,
    *,
    page_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 20,
    window: int = 4,
    enable_prefix_caching: bool = True,
    group: LayerGroup | None = None,
    num_spare: int = 0,
) -> Scheduler:
    """Make a scheduler; layers of ``group`` have the pages that they need, and ``num_spare``."""
    windows = None
    if group is not None:
        sizes = page_size, group.reach, max_num_seqs, max_num_batched_tokens
        pool = PagePool(min(num_pages, WindowPages.room(*sizes) + num_spare), page_size)
        windows = WindowPages(pool, group.oldest)
    pool = PagePool(num_pages, page_size)
    return Scheduler(
        Memory(pool, windows, enable_prefix_caching=enable_prefix_caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        window=window,
    )


def request_of(name: str, prompt: int | list[int], max_tokens: int = 4, **options: Any) -> Request:
    return make_request(name, prompt, max_tokens, **{"threshold": 0.5, **options})


class Steps:
    """An engine without a model; each slot holds a number that stands for its whole prefix."""

    def __init__(
        self,
        scheduler: Scheduler,
        source: random.Random | None = None,
        group: LayerGroup | None = None,
    ) -> None:
        self.scheduler, self.group = scheduler, group
        self.window_slots: dict[tuple[int, int], int] = {}
        self.source = source or random.Random(0)
        self.slots: dict[tuple[int, int], int] = {}
        self.num_computed = 0  # committed tokens fed so far

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def step(
        self,
        num_accepted: int | None = None,
        choose: ChooseMasks | None = None,
        check: Check | None = None,
        *,
        fails: bool = False,
    ) -> list[ScheduledRow]:
        rows = self.scheduler.schedule(choose)
        self.scheduler.check_integrity()
        if check is not None:
            check(rows)
        for row in rows:
            self._read(row.request)
        if fails:
            return rows
        for row in rows:
            self._write(row)
        for row in rows:
            num_right = 0
            if row.reads_logits:
                most = row.num_proposed
                num_right = self._accept(row, num_accepted or self.source.randint(1, most))
            self.scheduler.commit_cached(row, num_right)
            if row.request.num_left == 0:
                self.scheduler.finish(row.request)
        self.scheduler.check_integrity()
        return rows

    def run(self, max_steps: int = 1000) -> None:
        """Step until all requests have ended."""
        while self.scheduler.running or self.scheduler.waiting:
            assert self.step(), "requests remain and nothing moves"
            max_steps -= 1
            assert max_steps, "it does not end"
        pool = self.scheduler.memory.pool
        assert pool.num_free == pool.num_pages

    def _read(self, request: Request) -> None:
        for index, expected in enumerate(self._contents(request)[: request.num_cached]):
            assert self.slots[self._slot(request, index)] == expected, "reads another prefix"
            if self.group is not None and index >= self.group.oldest(request.num_cached):
                slot = self._slot(request, index, is_window=True)
                assert self.window_slots[slot] == expected, "reads another window"

    def _write(self, row: ScheduledRow) -> None:
        self.num_computed += row.num_tokens
        contents, start = self._contents(row.request), row.request.num_cached
        for index in range(start, start + row.num_tokens + row.num_drafts):
            page, slot = self._slot(row.request, index)
            holders = [item for item in self.scheduler.running if page in item.pages]
            assert holders == [row.request], "writes to a page that others read"
            self.slots[page, slot] = contents[index]
            if self.group is not None:
                page, slot = self._slot(row.request, index, is_window=True)
                holders = [item for item in self.scheduler.running if page in item.window_pages]
                assert holders == [row.request], "writes to a page that others read"
                self.window_slots[page, slot] = contents[index]

    def _accept(self, row: ScheduledRow, num_accepted: int) -> int:
        """Commit tokens, in mode exact leading drafts first; return the number of right drafts."""
        request = row.request
        count = min(num_accepted, row.num_proposed, request.num_left)
        if request.options.mode is not Mode.EXACT:
            request.tokens += self.source.choices([0, 1], k=count)
            return 0
        drafts = [draft.token for draft in request.drafts[: count - 1]]
        request.tokens += [*drafts, self.source.choice([0, 1])]
        tokens = self.source.choices([0, 1], k=row.masks[count - 1])
        request.drafts = [Draft(token, 0.5) for token in tokens]
        return len(drafts)

    def _slot(self, request: Request, index: int, *, is_window: bool = False) -> tuple[int, int]:
        page, offset = divmod(index, self.scheduler.memory.pool.page_size)
        return (request.window_pages if is_window else request.pages)[page], offset

    @staticmethod
    def _contents(request: Request) -> list[int]:
        """Numbers that stand for the prefixes of a request's tokens and drafts."""
        contents = [hash(request.tenant)]
        for token in [*request.tokens, *(draft.token for draft in request.drafts)]:
            contents.append(hash((contents[-1], token)))
        return contents[1:]


def ids(requests: list[Request]) -> str:
    return "".join(request.id for request in requests)
