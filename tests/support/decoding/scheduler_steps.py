"""A scheduler's steps without a model, which check what each row reads and writes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from decoding.engine_requests import make_request
from mars_serve.engine.attention.interface import LayerGroup
from mars_serve.engine.memory import Memory, WindowPages
from mars_serve.engine.pages import PagePool
from mars_serve.engine.request import Draft, Request
from mars_serve.engine.scheduled_row import ScheduledRow
from mars_serve.engine.scheduler import ChooseMasks, Scheduler
from mars_serve.engine.state_slots import StateSlots

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
    num_snapshots: int | None = None,
) -> Scheduler:
    """Make a scheduler; layers of ``group`` have the pages that they need, and ``num_spare``.

    There are recurrent layers if ``num_snapshots`` of their states is given.
    """
    windows = states = None
    if group is not None:
        sizes = page_size, group.reach, max_num_seqs, max_num_batched_tokens
        pool = PagePool(min(num_pages, WindowPages.room(*sizes) + num_spare), page_size)
        windows = WindowPages(pool, group.oldest)
    if num_snapshots is not None:
        pool = PagePool(2 * max_num_seqs + num_snapshots, page_size)
        states = StateSlots(pool, num_snapshots)
    pool = PagePool(num_pages, page_size)
    return Scheduler(
        Memory(pool, windows, states, enable_prefix_caching=enable_prefix_caching),
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
        self.states = SlotsOfTexts(scheduler.memory.states)
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
        fails_alone: float = 0.0,
    ) -> list[ScheduledRow]:
        """Run a step, of which each row may fail alone with a chance of ``fails_alone``."""
        rows = self.scheduler.schedule(choose)
        self.scheduler.check_integrity()
        if check is not None:
            check(rows)
        for row in rows:
            self._read(row.request)
        self.states.run(rows, fails=True)
        if fails:
            return rows
        self.states.run(rows)
        for row in rows:
            self._write(row)
        for row in rows:
            if not (fails_alone and self.source.random() < fails_alone):
                self._commit(row, num_accepted)
        self.scheduler.check_integrity()
        return rows

    def _commit(self, row: ScheduledRow, num_accepted: int | None) -> None:
        num_right = 0
        if row.reads_logits:
            most = row.num_proposed
            num_right = self._accept(row, num_accepted or self.source.randint(1, most))
        self.scheduler.commit_cached(row, num_right)
        if row.request.num_left == 0:
            self.scheduler.finish(row.request)

    def run(self, max_steps: int = 1000) -> None:
        """Step until all requests have ended."""
        while self.scheduler.running or self.scheduler.waiting:
            assert self.step(), "requests remain and nothing moves"
            max_steps -= 1
            assert max_steps, "it does not end"
        check_all_free(self.scheduler)

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
        if not request.plan.checks_drafts:
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


class SlotsOfTexts:
    """A device with recurrent layers, whose states are the very tokens that they stand for."""

    def __init__(self, slots: StateSlots | None) -> None:
        self.start = None if slots is None else slots.pool.num_pages
        self.slots: dict[Any, tuple[list[Any], list[Any]]] = {self.start: ([], [])}

    def run(self, rows: list[ScheduledRow], *, fails: bool = False) -> None:
        """Run a step's rows, each of which finds its own text; a failed step leaves nonsense."""
        if self.start is None:
            return
        read = {self.start, *(row.request.state.read for row in rows)}
        written = dict[int, tuple[list[Any], list[Any]]]()
        for row in rows:
            request, state = row.request, row.request.state
            text = [(request.tenant, token) for token in request.tokens]
            drafts = [(request.tenant, draft.token) for draft in request.drafts[: row.num_drafts]]
            absorbed, log = self.slots[state.read]
            right = log[: state.num_right]
            assert [*absorbed, *right] == text[: request.num_cached], "reads another text"
            tokens = right + text[request.num_cached : request.num_cached + row.num_tokens]
            outputs = [(state.write, ([*absorbed, *tokens], drafts))]
            for count, slot in state.snapshots:
                assert 1 <= count <= len(tokens)
                outputs.append((slot, ([*absorbed, *tokens[:count]], [])))
            for slot, output in outputs:
                assert slot not in written, "a slot is written twice"
                written[slot] = ([("", -1)], []) if fails else output
        assert read.isdisjoint(written), "a row writes to a slot that is read"
        self.slots |= written


def check_all_free(scheduler: Scheduler) -> None:
    """Assert that no request holds anything any more."""
    memory = scheduler.memory
    for kind in (memory, memory.windows, memory.states):
        assert kind is None or kind.pool.num_free == kind.pool.num_pages


def ids(requests: list[Request]) -> str:
    return "".join(request.id for request in requests)
