"""The pool of fixed-size KV cache pages: references to each page, and the prefix cache's index.

A page whose tokens are all cached can be registered under a key of its content, by which other
requests with the same leading tokens find it. It stays after its last holder has released it, until
its space is needed; the least recently used page is evicted first.

Imports no Ray, torch or HTTP library.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import chain

_KEY_BYTES = 16


def root_key(tenant: str, salt: str = "", lora: str = "") -> bytes:
    """Return the parent key of the first pages of a tenant's requests with a salt and a LoRA
    adapter, given by the sum of its files.

    Pages of other tenants, or with another salt or adapter, never have the same key.
    """
    root = blake2b(tenant.encode(), digest_size=_KEY_BYTES, person=b"tenant").digest()
    for text, person in ((salt, b"salt"), (lora, b"lora")):
        if text:
            root = blake2b(root + text.encode(), digest_size=_KEY_BYTES, person=person).digest()
    return root


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of a full page; ``parent``, the previous page's key, stands for all before."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=_KEY_BYTES).digest()


class PagePool:
    """Counts the references to each page and finds pages by the key of their content.

    A page without references is cached if it is registered, and otherwise free. Both can be
    allocated, cached pages only once no free page is left.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached = OrderedDict[int, None]()  # the next to be evicted first
        self._page_of = dict[bytes, int]()
        self._key_of = dict[int, bytes]()

    @property
    def num_free(self) -> int:
        """Pages that can be allocated, free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_registered(self) -> int:
        """Pages that are found by the key of their content."""
        return len(self._page_of)

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take one reference to each of ``count`` pages; the caller has checked `num_free`."""
        assert count <= self.num_free, "allocation without a check of num_free"
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def has(self, key: bytes) -> bool:
        """Whether a page is registered under a key."""
        return key in self._page_of

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Take one reference to each page of the longest leading run of registered ``keys``."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            self._hold(page)
            pages.append(page)
        return pages

    def register(self, page: int, key: bytes) -> int:
        """Register a full, held page under the key of its content; return the page to keep.

        If another page is registered under the key, a reference moves from ``page`` to that one.
        """
        assert self._references[page] > 0, "only a held page is registered"
        known = self._page_of.setdefault(key, page)
        if known == page:
            assert self._key_of.setdefault(page, key) == key, "a full page never changes"
        else:
            self._hold(known)
            self._drop(page)
        return known

    def forget(self, keys: Iterable[bytes]) -> None:
        """Unregister the pages under these keys, so that no later request finds them."""
        for key in keys:
            page = self._page_of.pop(key, None)
            if page is not None:
                del self._key_of[page]
                if page in self._cached:
                    del self._cached[page]
                    self._free.append(page)

    def release(self, pages: list[int], *, goes_first: bool = False) -> None:
        """Drop one reference to each page and empty the caller's list.

        The last page is dropped first, so that a prefix is evicted from its end: a page is found
        only if all pages before it are. Pages that are less likely to be found again go first: they
        are evicted before all others.
        """
        while pages:
            page = pages.pop()
            self._drop(page)
            if goes_first and page in self._cached:
                self._cached.move_to_end(page, last=False)

    def num_released(self, held: Iterable[list[int]]) -> int:
        """Count the pages that would become free if all these lists were released."""
        counts = Counter(chain.from_iterable(held))
        return sum(self._references[page] == count for page, count in counts.items())

    def key_of(self, page: int) -> bytes | None:
        """Return the key that the page is registered under, or None."""
        return self._key_of.get(page)

    def check_integrity(self, held: Iterable[list[int]]) -> None:
        """Prove that each page is free, cached or held, and has as many references as holders.

        ``held`` has the pages of each holder.
        """
        counts = Counter(chain.from_iterable(held))
        pages = sorted([*self._free, *self._cached, *counts])
        assert pages == list(range(self.num_pages)), f"pages leaked or shared by mistake: {pages}"
        assert all(counts[page] == n for page, n in enumerate(self._references)), (
            f"pages leaked or shared by mistake: {self._references} references, held {counts}"
        )
        assert {page: key for key, page in self._page_of.items()} == self._key_of
        assert len(self._page_of) == len(self._key_of)
        assert self._key_of.keys().isdisjoint(self._free), "a free page is registered"
        assert self._key_of.keys() >= self._cached.keys(), "a cached page is not registered"

    def _hold(self, page: int) -> None:
        if self._references[page] == 0:
            del self._cached[page]
        self._references[page] += 1

    def _drop(self, page: int) -> None:
        assert self._references[page] > 0, "a page is not released more often than it is held"
        self._references[page] -= 1
        if self._references[page] == 0:
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page
