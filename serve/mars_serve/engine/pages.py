"""Fixed-size pages of key/value storage and who holds them. Knows no model and no request."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Hands out page numbers; a page is free or held by exactly one owner."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free pages; the caller has checked that there are as many."""
        assert count <= len(self._free), "allocation without admission check"
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def release(self, pages: list[int]) -> None:
        """Give pages back and empty the caller's list."""
        self._free.extend(pages)
        pages.clear()

    def check_integrity(self, held: Iterable[list[int]]) -> None:
        """Prove that the free and the held pages are each page exactly once.

        Raises:
            AssertionError: a page leaked or is held twice.
        """
        seen = sorted([*self._free, *(page for pages in held for page in pages)])
        assert seen == list(range(self.num_pages)), f"pages leaked or shared by mistake: {seen}"
