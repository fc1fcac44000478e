"""Decides what each request feeds into the next step, and which requests hold pages.

Decoding has no phases: under one budget of positions a step, every running request feeds what it
can, either a chunk of its prompt or its uncached tokens and masks. Requests are ordered by tier,
audits behind all tiers, then by arrival. Pages are held for committed tokens and drafts only; if
the pages run out, the last request in order is preempted: it gives up its pages and waits again.

The first running request in order gets a row in every step, or in one of a few where the rows of a
key take turns (`KeyTurns`), and all pages that it needs. So every request whose longest possible
length fits the pool ends.
"""

from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import groupby

from mars_serve.engine.key_turns import KeyTurns
from mars_serve.engine.memory import Memory
from mars_serve.engine.prompt_room import PromptRoom
from mars_serve.engine.request import MAX_AUDIT_DRAFTS, Request
from mars_serve.engine.scheduled_row import Masks, ScheduledRow

ChooseMasks = Callable[[list[Request]], list[Masks]]
"""Function that returns the masks of running requests whose masks the engine chooses."""


class Scheduler:
    """Admits, chunks and preempts requests, and finds the prefixes that they share.

    A step is `schedule`, the forward pass, then `commit_cached` for each row whose keys and values
    were written. A row without it, because its step failed, is scheduled again. Requests may be
    added and finished between two steps.
    """

    def __init__(
        self,
        memory: Memory,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        window: int,
        max_drafts: int | None = None,
    ) -> None:
        """Start without requests; ``window`` is the block size, 0 for a plain AR model."""
        assert max_num_batched_tokens > window, "one row and its window must fit a step"
        self.memory = memory
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.window = window
        self.max_drafts = window if max_drafts is None else max_drafts
        self.waiting: list[Request] = []  # in order, as is `running`
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_prefix_hit_tokens = 0
        """Tokens found in the prefix cache, at admissions and between chunks of prompts."""
        self.audit_positions = max_num_batched_tokens
        """Most positions of an audit in a step; at 0 audits keep their pages and wait."""
        self.prompt_room: PromptRoom | None = None
        """Bounds the prompts of a step for which others wait; None if nothing does."""
        self._num_arrived = 0
        self._num_computed: dict[str, int] = {}
        """Prompt tokens computed for each key that has prompts to compute, see `_by_turns`."""
        self._turns: KeyTurns | None = None
        """Chooses among the rows of the step; None while one key alone is active."""
        self._was_quarantine = False
        """Whether the last step was that of a request in quarantine."""

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.arrival = self._num_arrived
        self._num_arrived += 1
        insort(self.waiting, request, key=_order)
        if self.prompt_room is not None and not request.is_audit:
            self.prompt_room.note(request)

    def finish(self, request: Request) -> None:
        """Remove a running or waiting request and release its pages."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.memory.release(request)

    def discard(self, request: Request) -> None:
        """Remove a request, and its pages from the prefix cache: they may hold wrong numbers."""
        self.memory.forget(request)
        self.finish(request)

    def schedule(self, choose_masks: ChooseMasks | None = None) -> list[ScheduledRow]:
        """Return the rows of the next step, in order, with pages allocated for each.

        Without ``choose_masks`` requests whose masks the engine chooses get the full window.
        """
        self.memory.settle(self.running)
        self._admit()
        for request in self.running:
            if request.in_prefill(self.window):
                self._count_prefix_hit(request, self.memory.take_cached(request))
        room = self.prompt_room
        self._turns = room.turns if room and room.has_several(self.running) else None
        members = self._turns.members(self._members()) if self._turns else self._members()
        masks = self._masks(members, choose_masks)
        return self._give_pages(self._plan(members, masks, may_shrink=choose_masks is not None))

    def commit_cached(self, row: ScheduledRow, num_right: int = 0) -> None:
        """Count tokens of a row that has run as cached, and offer pages that became full to others.

        ``num_right`` leading drafts of the row have been committed.
        """
        self.memory.commit(row, num_right)

    def check_integrity(self) -> None:
        """Prove that no page leaks, is shared by mistake or is registered under a wrong key."""
        self.memory.check_integrity(self.running)
        waiting = self.waiting
        assert not any(item.pages or item.num_cached or item.state for item in waiting)
        assert self.running == sorted(self.running, key=_order)
        assert self.waiting == sorted(self.waiting, key=_order)
        for request in self.running:
            # A request that follows the live τ may have been in mode exact before.
            may_draft = request.plan.checks_drafts or request.options.threshold is None
            most_drafts = MAX_AUDIT_DRAFTS if request.is_audit else self.max_drafts
            drafts = most_drafts if may_draft else 0
            most = self.memory.pool.pages_for(len(request.tokens) + drafts)
            assert len(request.pages) <= most

    # Admission and preemption

    def _admit(self) -> None:
        """Admit waiting requests in order, up to the first that does not fit; those for whose LoRA
        adapter there is no slot are passed over.

        A request fits if the free pages suffice for the committed tokens of all running requests
        and its own, and for one more token of each. It preempts requests of a lower tier only if it
        fits then.
        """
        index, drained, loras = 0, set[str](), self.memory.loras
        while index < len(self.waiting):
            request = self.waiting[index]
            num_kept = bisect_right(self.running, -request.rank, key=lambda item: -item.rank)
            if num_kept == self.max_num_seqs:
                return
            if loras is not None and not loras.may_hold(request, drained):
                index += 1
                continue
            num_prefix_hit_tokens = self.memory.take_cached(request)
            if not self._fits(request, num_kept):
                self._release(request)
                return
            del self.waiting[index]
            while not self._fits(request, len(self.running)):
                self._preempt_last()
            if loras is not None:
                loras.hold(request)
            insort(self.running, request, key=_order)
            self._count_prefix_hit(request, num_prefix_hit_tokens)

    def _fits(self, request: Request, num_kept: int) -> bool:
        kept = [*self.running[:num_kept], request]
        return num_kept < self.max_num_seqs and self.memory.fits(kept, self.running[num_kept:])

    def _preempt_last(self) -> None:
        request = self.running.pop()
        self._release(request)
        request.num_preemptions += 1
        self.num_preemptions += not request.is_audit
        insort(self.waiting, request, key=_order)

    def _release(self, request: Request) -> None:
        self.memory.release(request)
        request.num_cached = 0

    def _count_prefix_hit(self, request: Request, num_tokens: int) -> None:
        if request.is_audit:
            return
        self.num_prefix_hit_tokens += num_tokens
        if request.num_preemptions == 0:
            request.num_prefix_hit_tokens += num_tokens

    # Rows

    def _members(self) -> list[Request]:
        """Return the running requests that may be in the next step, in order.

        The first request in quarantine and all requests that are not take turns.
        """
        suspects = [request for request in self.running if request.is_quarantined]
        others = [request for request in self.running if not request.is_quarantined]
        self._was_quarantine = bool(suspects) and not (others and self._was_quarantine)
        return suspects[:1] if self._was_quarantine else others

    def _masks(
        self, members: list[Request], choose_masks: ChooseMasks | None
    ) -> dict[Request, Masks]:
        masks = dict[Request, Masks]()
        adaptive = [request for request in members if request.plan.leaves_masks]
        if adaptive and choose_masks is not None:
            masks.update(zip(adaptive, choose_masks(adaptive), strict=True))
        for request in members:
            if request not in masks:
                num_left, num_drafts = request.num_left, len(request.drafts)
                masks[request] = request.plan.masks(self.window, num_left, num_drafts)
        return masks

    def _plan(
        self, members: list[Request], masks: Mapping[Request, Masks], *, may_shrink: bool
    ) -> dict[Request, ScheduledRow]:
        """Divide the step's positions: decoding requests first, in order, then prompts by turns.

        So a long prompt never keeps decoding requests out of a step, and `PromptRoom` bounds by how
        much it lengthens the step. If the first request in order is still in its prompt, one
        position is reserved for it.

        A prompt whose next page an earlier prompt computes in this step is passed over, and takes
        that page from the prefix cache in a later step. So requests that arrive together compute a
        common prefix once.

        With ``may_shrink``, masks that the engine chose shrink to the budget. Pinned masks are fed
        whole or not at all: if they shrank, the output would depend on other requests. In mode
        exact it does not depend on the masks, so there they always shrink.
        """

        def plan_row(request: Request, budget: int) -> ScheduledRow | None:
            return self._row(request, masks[request], budget, may_shrink=may_shrink)

        prompts = [request for request in members if request.in_prefill(self.window)]
        decoding = [request for request in members if not request.in_prefill(self.window)]
        num_reserved = 1 if prompts and prompts[0] is members[0] else 0
        budget = self.max_num_batched_tokens - num_reserved
        plan = dict[Request, ScheduledRow]()
        for request in decoding:
            if row := plan_row(request, budget):
                plan[request] = row
                budget -= row.num_positions
        budget += self._turns.take_out(plan) if self._turns else 0
        bound, is_shared = self.prompt_room if prompts else None, self._turns is not None
        room = bound if bound and bound.begin(plan.values(), prompts, is_shared=is_shared) else None
        computed = dict[bytes, ScheduledRow]()
        for request in self._by_turns(prompts):
            least = num_reserved if request is members[0] else 0
            budget += least
            if not least and self.memory.waits(request, computed):
                continue
            most = room.positions(request, budget) if room else budget
            if row := plan_row(request, max(most, least)):
                plan[request] = row
                budget -= row.num_positions
                self._num_computed[request.key] += row.num_tokens
                computed |= dict.fromkeys(self.memory.computed_keys(row), row)
                if room:
                    room.take(row)
        return plan

    def _by_turns(self, prompts: list[Request]) -> Iterator[Request]:
        """Yield prompts by tier, then those of the key for which least was computed, in order.

        So one key's many prompts hardly delay another's. A key without prompts is forgotten; when
        it comes back, it goes first once.
        """
        before, keys = self._num_computed, {request.key for request in prompts}
        least = min((before[key] for key in keys if key in before), default=1) - 1
        counts = self._num_computed = {key: before.get(key, least) for key in keys}
        for _, group in groupby(prompts, key=lambda request: request.rank):
            queues = defaultdict[str, deque[Request]](deque)
            for request in group:
                queues[request.key].append(request)
            turns = [(counts[key], queue[0].arrival, key) for key, queue in queues.items()]
            heapify(turns)
            while turns:
                *_, key = heappop(turns)
                yield queues[key].popleft()
                if queues[key]:
                    heappush(turns, (counts[key], queues[key][0].arrival, key))

    def _row(
        self, request: Request, fed: Masks, budget: int, *, may_shrink: bool
    ) -> ScheduledRow | None:
        if request.is_audit:
            budget = min(budget, self.audit_positions)
        if request.plan.checks_drafts or (may_shrink and request.plan.leaves_masks):
            fed = fit_masks(fed, max(0, budget - request.num_uncached))
        return fit_row(request, fed, budget)

    def _give_pages(self, plan: Mapping[Request, ScheduledRow]) -> list[ScheduledRow]:
        """Allocate each row's pages, in order of the requests, and return the rows that can run.

        If pages run out, the last running request is preempted. It is either a later one, which has
        no new pages yet, or the request itself; so no request loses pages allocated here.
        """
        rows: list[ScheduledRow] = []
        index = 0
        while index < len(self.running):
            request = self.running[index]
            row = plan.get(request)
            if row is not None:
                if not self.memory.reserve(row):
                    self._preempt_last()
                    continue
                rows.append(row)
            index += 1
        return rows


def _order(request: Request) -> tuple[int, int]:
    return -request.rank, request.arrival


def fit_masks(masks: Masks, budget: int) -> Masks:
    """Cut a row's drafts and masks to ``budget`` positions.

    Masks of the likeliest outcome, that all drafts are right, are cut last.
    """
    num_drafts = min(len(masks) - 1, budget)
    budget -= num_drafts
    kept = []
    for count in reversed(masks[: num_drafts + 1]):
        kept.append(min(count, budget))
        budget -= kept[-1]
    return tuple(reversed(kept))


def fit_row(request: Request, masks: Masks, budget: int) -> ScheduledRow | None:
    """Return a row of at most ``budget`` positions.

    The row reaches the cursor, with all drafts and masks, if that fits; otherwise it holds as many
    tokens before the cursor as fit, and there is none if that is not one.
    """
    if request.num_uncached + len(masks) - 1 + sum(masks) <= budget:
        return ScheduledRow(request, request.num_uncached, masks, reads_logits=True)
    num_tokens = min(request.num_uncached - 1, budget)
    if num_tokens < 1:
        return None
    return ScheduledRow(request, num_tokens, masks=(0,), reads_logits=False)
