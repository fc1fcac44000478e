"""Decides what each request feeds into the next step, and which requests hold pages. No tensor.

There are no phases: every running request gets the positions it can use, the rest of its prompt
in chunks or its unstored tokens plus masks, under one budget of positions a step. Requests are
ordered by tier, then by arrival. Pages are held for committed tokens only; where they run
out, the last request in order gives its own up and waits again.

The first running request in order gets work in every step, and whatever pages it needs. So every
request whose longest possible length fits the pool ends.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable

from mars_platform.method.mode import Mode
from mars_serve.engine.pages import PagePool, page_key, root_key
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import Masks, ScheduledRow

ChooseMasks = Callable[[list[Request]], list[Masks]]
"""Gives the masks of running requests that leave them to the engine."""


class Scheduler:
    """Admits, chunks and preempts requests, and finds what they can share.

    Between two steps the engine may add and finish requests. A step is `schedule`, the forward
    pass, then `stored` for each work whose keys and values were written. A work that is not
    reported as stored (its step failed) is scheduled again.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        window: int,
        max_drafts: int | None = None,
        enable_prefix_caching: bool = True,
    ) -> None:
        """Share ``pool`` out.

        Args:
            pool: pages.
            max_num_seqs: rows of a step at the most.
            max_num_batched_tokens: positions of a step at the most.
            window: the model's block size, 0 where it has none.
            max_drafts: of a row at the most; by default as many as the window.
            enable_prefix_caching: see `EngineSettings`.
        """
        assert max_num_batched_tokens > window, "one row and its window must fit a step"
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.window = window
        self.max_drafts = window if max_drafts is None else max_drafts
        self.enable_prefix_caching = enable_prefix_caching
        self.waiting: list[Request] = []  # in order, as is `running`
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_prefix_hit_tokens = 0
        """Tokens found stored, over all admissions and while prompts were being fed."""
        self._num_arrived = 0

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.arrival = self._num_arrived
        self._num_arrived += 1
        insort(self.waiting, request, key=_order)

    def finish(self, request: Request) -> None:
        """Forget a request, wherever it stands, and release its pages."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.pool.release(request.pages)

    def discard(self, request: Request) -> None:
        """`finish` a request whose pages may hold what is not to be reused."""
        self.pool.forget(request.pages)
        self.finish(request)

    def schedule(self, choose: ChooseMasks | None = None) -> list[ScheduledRow]:
        """ScheduledRow of the next step, in order; each request's pages suffice for it.

        Args:
            choose: gives the masks of each of the running requests that leave them to the
                engine. Without it they get the full window.
        """
        self._admit()
        for request in self.running:
            if self._in_prefill(request):
                self._reuse(request, self._match(request))
        return self._give_pages(self._plan(self._masks(choose), may_shrink=choose is not None))

    def stored(self, work: ScheduledRow, num_drafts: int = 0) -> None:
        """Note that a work's tokens are stored, and share the pages that became full.

        Args:
            work: what was fed.
            num_drafts: leading drafts of it that have been committed.
        """
        request = work.request
        first = request.num_cached // self.pool.page_size
        request.num_cached += work.num_tokens + num_drafts
        if self.enable_prefix_caching:
            last = request.num_cached // self.pool.page_size
            for index, key in enumerate(self._keys(request, first, last), start=first):
                request.pages[index] = self.pool.register(request.pages[index], key)

    def check_integrity(self) -> None:
        """Prove that no page leaks, is shared by mistake or holds what its key does not say.

        Raises:
            AssertionError: one does.
        """
        self.pool.check_integrity(request.pages for request in self.running)
        assert all(not request.pages and not request.num_cached for request in self.waiting)
        assert self.running == sorted(self.running, key=_order)
        assert self.waiting == sorted(self.waiting, key=_order)
        for request in self.running:
            # one that follows what is live may have been in mode exact before
            may_draft = request.checks_drafts or request.options.threshold is None
            drafts = self.max_drafts if may_draft else 0
            most = self.pool.pages_for(len(request.tokens) + drafts)
            assert self.pool.pages_for(request.num_cached) <= len(request.pages) <= most
            keys = self._keys(request, 0, request.num_cached // self.pool.page_size)
            for page, key in zip(request.pages, keys, strict=False):
                assert self.pool.key_of(page) in (None, key), f"{request.id}: page {page}"

    # Who runs

    def _admit(self) -> None:
        """Admit waiting requests in order until one does not fit: nobody overtakes it.

        A request fits if free pages remain for the committed tokens of all that run, and one
        more each. It preempts requests of a lower tier if, and only if, it fits then.
        """
        while self.waiting:
            request = self.waiting[0]
            rank = -request.options.tier.rank
            num_kept = bisect_right(self.running, rank, key=lambda item: _order(item)[0])
            if num_kept == self.max_num_seqs:
                return
            num_prefix_hit_tokens = self._match(request)
            if not self._fits(request, num_kept):
                self._let_go(request)
                return
            del self.waiting[0]
            while not self._fits(request, len(self.running)):
                self._preempt_last()
            insort(self.running, request, key=_order)
            self._reuse(request, num_prefix_hit_tokens)

    def _fits(self, request: Request, num_kept: int) -> bool:
        """Whether a request could run beside the first ``num_kept`` of those that run now."""
        kept, others = self.running[:num_kept], self.running[num_kept:]
        num_free = self.pool.num_free + self.pool.num_released(other.pages for other in others)
        return num_kept < self.max_num_seqs and self._num_lacking([*kept, request]) <= num_free

    def _num_lacking(self, requests: Iterable[Request]) -> int:
        """Pages that the committed tokens, and one more each, need beyond those held."""
        pages_for = self.pool.pages_for
        needs = ((pages_for(len(item.tokens) + 1), len(item.pages)) for item in requests)
        return sum(max(0, needed - held) for needed, held in needs)

    def _preempt_last(self) -> None:
        request = self.running.pop()
        self._let_go(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=_order)

    def _let_go(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.num_cached = 0

    # What is shared

    def _keys(self, request: Request, start: int, stop: int) -> list[bytes]:
        """Keys of a request's pages from ``start`` to before ``stop``, all full."""
        keys, size = request.page_keys, self.pool.page_size
        for index in range(len(keys), stop):
            parent = keys[-1] if keys else root_key(request.tenant)
            keys.append(page_key(parent, request.tokens[index * size : (index + 1) * size]))
        return keys[start:stop]

    def _reuse(self, request: Request, num_tokens: int) -> None:
        """Count tokens that were found stored."""
        self.num_prefix_hit_tokens += num_tokens
        if request.num_preemptions == 0:
            request.num_prefix_hit_tokens += num_tokens

    def _last_shared(self, request: Request) -> int:
        """Pages of a request, from its first, that may be another's.

        At least the last token stays unstored: what follows it is read from its own forward pass.
        So are the log-probabilities of a prompt.
        """
        num_tokens = request.num_scored if request.scores_prompt else len(request.tokens) - 1
        return num_tokens // self.pool.page_size

    def _match(self, request: Request) -> int:
        """Take over stored pages that continue a request's own; return how many tokens they
        hold.
        """
        size = self.pool.page_size
        first, last = request.num_cached // size, self._last_shared(request)
        if not self.enable_prefix_caching or request.num_cached % size:
            return 0
        pages = self.pool.match(self._keys(request, first, last))
        unused = request.pages[first:]  # of a work that was not stored
        request.pages[first:] = pages
        self.pool.release(unused)
        request.num_cached += len(pages) * size
        return len(pages) * size

    def _next_key(self, request: Request) -> bytes | None:
        """Key of the page that a request computes next, where it could take over another's."""
        index, inside = divmod(request.num_cached, self.pool.page_size)
        if not self.enable_prefix_caching or inside or index >= self._last_shared(request):
            return None
        return self._keys(request, index, index + 1)[0]

    def _computed_keys(self, work: ScheduledRow) -> list[bytes]:
        """Keys of the pages that a work computes, in whole or in part."""
        if not self.enable_prefix_caching:
            return []
        request, size = work.request, self.pool.page_size
        end = self.pool.pages_for(request.num_cached + work.num_tokens)
        full = len(request.tokens) // size
        return self._keys(request, request.num_cached // size, min(end, full))

    # What is fed

    def _in_prefill(self, request: Request) -> bool:
        """Whether more is unstored than one step's acceptance can leave."""
        return request.num_uncached > self.window + 1

    def _masks(self, choose: ChooseMasks | None) -> dict[Request, Masks]:
        masks = {request: request.masks(self.window) for request in self.running}
        if choose is not None:
            adaptive = [request for request in self.running if request.leaves_masks]
            if adaptive:
                masks.update(zip(adaptive, choose(adaptive), strict=True))
        return masks

    def _plan(
        self, masks: dict[Request, Masks], *, may_shrink: bool
    ) -> dict[Request, ScheduledRow]:
        """Share the step's positions out: to decoding requests first, then to prompts, in order.

        So a long prompt never holds the decoding ones up. Where the first request in order is
        still in its prompt, one position is set aside for it.

        A prompt whose next page an earlier one computes in this step is passed over: it finds
        that page later. So requests that come together compute a common prefix once.

        With ``may_shrink``, windows that were left to the engine give way to the budget. Others are
        fed whole or not at all: one cut short by its neighbours' needs would make its output
        depend on them. In mode exact it never does.
        """

        def share(request: Request, budget: int) -> ScheduledRow | None:
            fed = masks[request]
            if request.mode is Mode.EXACT or (may_shrink and request.leaves_masks):
                fed = _shrunk(fed, max(0, budget - request.num_uncached))
            return _share(request, fed, budget)

        prompts = [request for request in self.running if self._in_prefill(request)]
        decoding = [request for request in self.running if not self._in_prefill(request)]
        set_aside = 1 if prompts and prompts[0] is self.running[0] else 0
        plan = dict[Request, ScheduledRow]()
        budget = self.max_num_batched_tokens - set_aside
        for request in decoding:
            if work := share(request, budget):
                plan[request] = work
                budget -= work.num_positions
        budget += set_aside
        computed = set[bytes]()
        for request in prompts:
            if self._next_key(request) in computed:
                continue
            if work := share(request, budget):
                plan[request] = work
                budget -= work.num_positions
                computed.update(self._computed_keys(work))
        return plan

    def _give_pages(self, plan: dict[Request, ScheduledRow]) -> list[ScheduledRow]:
        """Allocate each work's pages, in order of the requests, and return what can run.

        Where pages run out, the last running request is preempted. That is one whose turn has
        not come yet or, at the last, the request itself: nothing that has its pages loses them.
        """
        works: list[ScheduledRow] = []
        index = 0
        while index < len(self.running):
            request = self.running[index]
            work = plan.get(request)
            if work is not None:
                num_kept = work.num_tokens + work.num_drafts
                end = self.pool.pages_for(request.num_cached + num_kept)
                missing = end - len(request.pages)
                if missing > 0:
                    if missing > self.pool.num_free:
                        self._preempt_last()
                        continue
                    request.pages += self.pool.allocate(missing)
                works.append(work)
            index += 1
        return works


def _order(request: Request) -> tuple[int, int]:
    return -request.options.tier.rank, request.arrival


def _shrunk(masks: Masks, room: int) -> Masks:
    """``masks`` cut to ``room`` positions, their drafts included: the likeliest outcome, that of
    all drafts right, is cut last.
    """
    num_drafts = min(len(masks) - 1, room)
    room -= num_drafts
    kept = []
    for count in reversed(masks[: num_drafts + 1]):
        kept.append(min(count, room))
        room -= kept[-1]
    return tuple(reversed(kept))


def _share(request: Request, masks: Masks, budget: int) -> ScheduledRow | None:
    """Row of a request within ``budget`` positions, up to its cursor with all drafts and masks if
    they fit, or None.
    """
    if request.num_uncached + len(masks) - 1 + sum(masks) <= budget:
        return ScheduledRow(request, request.num_uncached, masks, reads_logits=True)
    num_tokens = min(request.num_uncached - 1, budget)
    if num_tokens < 1:
        return None
    return ScheduledRow(request, num_tokens, masks=(0,), reads_logits=False)
