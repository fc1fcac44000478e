"""The pages of the KV cache that each request holds, and the prefixes that requests share.

Where layers see no more than the last tokens of a text, a request holds pages of a second
pool, and gives them back when no later position sees them. Where layers are recurrent, it holds
`StateSlots`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import takewhile

from mars_serve.engine.lora_slots import LoraSlots
from mars_serve.engine.pages import PagePool, page_key, root_key
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import ScheduledRow
from mars_serve.engine.state_slots import StateSlots

CACHED_SHARE = 8
"""Pages of the pool for each page that caches the window of a text that has ended, or of a prefix
that others share: so texts of eight windows are found as long as their other pages are."""


class WindowPages:
    """The pages of layers whose queries see no more than the last tokens of their text.

    A request's list has an entry for each page of its text. Those that no position behind its last
    full page sees are given back; their entries stand for none. They stay in the cache while there
    is room, the longest those at which texts part: at the ends of texts and of prompts, and behind
    what a request shared with others.
    """

    def __init__(self, pool: PagePool, oldest: Callable[[int], int]) -> None:
        """Share a pool; ``oldest`` returns the first position that the query at a position sees."""
        self.pool, self._oldest = pool, oldest
        self._none = pool.num_pages  # backends have further pages there, which hold nothing

    @staticmethod
    def room(page_size: int, window: int, num_rows: int, num_positions: int) -> int:
        """Return the most pages that rows hold if a query sees ``window`` tokens and a step feeds
        ``num_positions`` at most. They never hold more than of the pages that keep whole texts.
        """
        return num_rows * (-(-(window - 1) // page_size) + 2) - (-num_positions // page_size)

    def ends(self, begin: int, keys: Sequence[bytes]) -> set[int]:
        """Return behind how many of these pages, the first of which is page ``begin`` of a text, a
        request can go on, 0 included.
        """
        found, unbroken_from = {0}, 0
        for index, key in enumerate(keys, start=begin):
            if not self.pool.has(key):
                unbroken_from = index + 1
            elif self._first(index + 1) >= unbroken_from:
                found.add(index + 1 - begin)
        return found

    def take(self, request: Request, keys: Sequence[bytes]) -> None:
        """Hold what a request sees behind pages that continue its own, which are full."""
        begin = request.num_cached // self.pool.page_size
        first, held = self._first(begin + len(keys)), request.window_pages
        self.release(request, begin)
        self._give_back(request, min(first, begin))
        held += [self._none] * (first - begin)
        held += self.pool.match(keys[max(0, first - begin) :])

    def reserve(self, request: Request, num_tokens: int) -> None:
        """Hold pages for the next tokens, of which there are always enough."""
        held, size = request.window_pages, self.pool.page_size
        held += [self._none] * (self._first(request.num_cached // size) - len(held))  # made-up rows
        end = self.pool.pages_for(request.num_cached + num_tokens)
        held += self.pool.allocate(max(0, end - len(held)))

    def register(self, request: Request, first: int, keys: Sequence[bytes]) -> None:
        """Offer pages that became full to others, and settle."""
        for index, key in enumerate(keys, start=first):
            page = request.window_pages[index]
            request.window_pages[index] = self.pool.register(page, key)
        self.settle(request)

    def settle(self, request: Request) -> None:
        """Give back what no later position sees, and what a step has reserved and not filled."""
        self.release(request, self.pool.pages_for(request.num_cached))
        self._give_back(request, self._first(request.num_cached // self.pool.page_size))

    def release(self, request: Request, begin: int) -> None:
        """Give back all pages from ``begin`` on."""
        pages = self._held(request.window_pages[begin:])
        del request.window_pages[begin:]
        self.pool.release(pages)

    def check_integrity(self, running: Collection[Request]) -> None:
        """Prove the same as `Memory.check_integrity`."""
        self.pool.check_integrity(self._held(request.window_pages) for request in running)
        for request in running:
            first = self._first(request.num_cached // self.pool.page_size)
            held = request.window_pages
            assert held[:first] == [self._none] * first, f"{request.id} holds what it never sees"
            assert self._none not in held[first:], f"{request.id} lacks a page that it sees"
            assert self.pool.pages_for(request.num_cached) <= len(held) <= len(request.pages)
            for page, key in zip(held[first:], request.page_keys[first:], strict=False):
                assert self.pool.key_of(page) in (None, key), f"{request.id}: page {page}"

    def _first(self, num_pages: int) -> int:
        """Return the first page that positions behind the first ``num_pages`` pages see."""
        return self._oldest(num_pages * self.pool.page_size) // self.pool.page_size

    def _give_back(self, request: Request, end: int) -> None:
        held, begin = request.window_pages, end
        while begin and held[begin - 1] != self._none:
            begin -= 1
        for index in range(begin, end):
            borders = request.num_shared, request.num_prompt // self.pool.page_size
            is_useful = any(self._first(count) <= index < count for count in borders)
            self.pool.release([held[index]], goes_first=not is_useful)
            held[index] = self._none

    def _held(self, pages: Iterable[int]) -> list[int]:
        return [page for page in pages if page != self._none]


class Memory:
    """All requests' pages, slots for the states of recurrent layers, and those of adapters."""

    def __init__(
        self,
        pool: PagePool,
        windows: WindowPages | None = None,
        states: StateSlots | None = None,
        loras: LoraSlots | None = None,
        *,
        enable_prefix_caching: bool = True,
    ) -> None:
        """Share a pool, ``windows`` if some layers see no more than the last tokens, ``states``
        if some are recurrent, and ``loras`` if requests may name LoRA adapters.

        ``enable_prefix_caching`` is that of `EngineSettings`.
        """
        self.pool, self.windows, self.states, self.loras = pool, windows, states, loras
        has_snapshots = states is None or states.num_snapshots > 0
        self._enable_prefix_caching = enable_prefix_caching and has_snapshots
        self.num_computed_again = 0
        """Tokens that were computed although all pages of their prefix were found, since no state
        or no window behind them was."""

    def fits(self, kept: Iterable[Request], others: Iterable[Request]) -> bool:
        """Whether ``kept`` could run if the pages of ``others`` were free.

        Each needs pages for its committed tokens and one more. Of windows and slots there are
        enough for all.
        """
        num_free = self.pool.num_free + self.pool.num_released(other.pages for other in others)
        needed = (self.pool.pages_for(len(item.tokens) + 1) - len(item.pages) for item in kept)
        return sum(max(0, count) for count in needed) <= num_free

    def reserve(self, row: ScheduledRow) -> bool:
        """Hold what a row writes, or return False if too few pages are free."""
        request, num_tokens = row.request, row.num_tokens + row.num_drafts
        missing = self.pool.pages_for(request.num_cached + num_tokens) - len(request.pages)
        if missing > 0:
            if missing > self.pool.num_free:
                return False
            request.pages += self.pool.allocate(missing)
        if self.windows is not None:
            self.windows.reserve(request, num_tokens)
        if self.states is not None:
            self.states.reserve(row, self._keys_of_borders(row, self.states))
        return True

    def commit(self, row: ScheduledRow, num_right: int = 0) -> None:
        """Count tokens of a row that has run as cached, and offer full pages to others.

        ``num_right`` leading drafts of the row have been committed.
        """
        request, size = row.request, self.pool.page_size
        first = request.num_cached // size
        if self.states is not None:
            self.states.commit(request, num_right)
        if request.num_shared:
            begin = request.num_cached
            self.num_computed_again += max(
                0, min(row.num_tokens, request.num_shared * size - begin)
            )
        request.num_cached += row.num_tokens + num_right
        keys, end = list[bytes](), request.num_cached // size
        if self._enable_prefix_caching and end > first:
            keys = self._keys(request, first, end)
            for index, key in enumerate(keys, start=first):
                request.pages[index] = self.pool.register(request.pages[index], key)
        if self.windows is not None:
            self.windows.register(request, first, keys)

    def settle(self, requests: Iterable[Request]) -> None:
        """Give back what requests hold of windows for steps that have ended."""
        if self.windows is not None:
            for request in requests:
                self.windows.settle(request)

    def release(self, request: Request) -> None:
        """Give back all pages of a request."""
        self.pool.release(request.pages)
        if self.windows is not None:
            self.windows.release(request, 0)
        if self.states is not None:
            self.states.release(request)
        if self.loras is not None:
            self.loras.release(request)

    def lend(self, failed: Request, trial: Request) -> None:
        """Let a request of one token run in what one holds whose row has failed."""
        trial.pages, trial.window_pages = failed.pages[-1:], failed.window_pages[-1:]
        if self.states is not None:
            trial.state = self.states.trial(failed)

    def forget(self, request: Request) -> None:
        """Take a request's pages from the prefix cache, also those that it has given back."""
        keys = request.page_keys[: request.num_cached // self.pool.page_size]
        for kind in (self, self.windows, self.states):
            if kind is not None:
                kind.pool.forget(keys)

    def check_integrity(self, running: Collection[Request]) -> None:
        """Prove that no page leaks, is shared by mistake or is registered under a wrong key."""
        self.pool.check_integrity(request.pages for request in running)
        for request in running:
            assert self.pool.pages_for(request.num_cached) <= len(request.pages)
            keys = self._keys(request, 0, request.num_cached // self.pool.page_size)
            for page, key in zip(request.pages, keys, strict=False):
                assert self.pool.key_of(page) in (None, key), f"{request.id}: page {page}"
        for kind in (self.windows, self.states, self.loras):
            if kind is not None:
                kind.check_integrity(running)

    # Prefix caching

    def _keys(self, request: Request, start: int, stop: int) -> list[bytes]:
        keys, size = request.page_keys, self.pool.page_size
        for index in range(len(keys), stop):
            parent = keys[-1] if keys else root_key(*request.cache_root)
            keys.append(page_key(parent, request.tokens[index * size : (index + 1) * size]))
        return keys[start:stop]

    def _num_shareable(self, request: Request) -> int:
        """Count the leading pages of a request that may come from the prefix cache.

        The last token is always computed, because the next token is read from its forward pass. So
        are the prompt tokens whose log-probabilities are reported.
        """
        num_tokens = request.num_scored if request.scores_prompt else len(request.tokens) - 1
        return num_tokens // self.pool.page_size

    def take_cached(self, request: Request) -> int:
        """Add to a request the cached pages that continue its own; return their tokens' number."""
        size = self.pool.page_size
        first, last = request.num_cached // size, self._num_shareable(request)
        if not self._enable_prefix_caching or request.num_cached % size:
            return 0
        keys = self._common(request, self._keys(request, first, last))
        if self.windows is not None:
            self.windows.take(request, keys)
        if self.states is not None and keys:
            self.states.take(request, keys[-1])
        pages = self.pool.match(keys)
        unused = request.pages[first:]  # left by a row whose step failed
        request.pages[first:] = pages
        self.pool.release(unused)
        request.num_cached += len(pages) * size
        return len(pages) * size

    def _common(self, request: Request, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return the longest leading run of these keys of a request's further pages, behind which
        it can go on in all kinds of layers.
        """
        if self.windows is None and self.states is None:
            return keys  # of which the pool matches those that it has
        keys = list(takewhile(self.pool.has, keys))
        begin = request.num_cached // self.pool.page_size
        if keys:
            request.num_shared = max(request.num_shared, begin + len(keys))
        ends = set(range(len(keys) + 1))
        if self.windows is not None:
            ends &= self.windows.ends(begin, keys)
        if self.states is not None:
            ends &= self.states.ends(keys)
        return keys[: max(ends)]

    def waits(self, request: Request, computed: Mapping[bytes, ScheduledRow]) -> bool:
        """Return whether a request can share the page that it computes next, which a row of the
        step computes.

        ``computed`` has the rows by the keys of all pages that they compute. If layers are
        recurrent, the row takes a snapshot where the request parts from it.
        """
        first, inside = divmod(request.num_cached, self.pool.page_size)
        last = self._num_shareable(request)
        if not self._enable_prefix_caching or inside or first >= last:
            return False
        if self._keys(request, first, first + 1)[0] not in computed:
            return False
        if self.states is not None:
            keys = list(takewhile(computed.__contains__, self._keys(request, first, last)))
            computed[keys[-1]].borders += (first + len(keys),)
        return True

    def _keys_of_borders(self, row: ScheduledRow, states: StateSlots) -> Sequence[bytes]:
        """Return the keys of the pages behind which a row may take snapshots."""
        first = states.num_absorbed(row.request) // self.pool.page_size
        end = (row.request.num_cached + row.num_tokens) // self.pool.page_size
        may_share = self._enable_prefix_caching and end > first
        return self._keys(row.request, first, end) if may_share else ()

    def computed_keys(self, row: ScheduledRow) -> list[bytes]:
        """Return the keys of the pages that a row computes, in whole or in part."""
        if not self._enable_prefix_caching:
            return []
        request, size = row.request, self.pool.page_size
        end = self.pool.pages_for(request.num_cached + row.num_tokens)
        full = len(request.tokens) // size
        return self._keys(request, request.num_cached // size, min(end, full))
