"""A set whose smallest member is found fast, and from which any member can be removed.

Imports no Ray, torch or HTTP library.
"""

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

MemberT = TypeVar("MemberT")

_MIN_STALE = 16
"""Stale entries of the heap that are tolerated however small the set is."""


class RankedSet(Generic[MemberT]):
    """Members in the order of their ranks.

    A binary heap holds them. A member that is removed or placed anew leaves its old entry there;
    once stale entries outnumber the others, the heap is built anew. So every operation takes
    O(log n) amortised, and memory stays in proportion to the number of members.
    """

    __slots__ = ("_entries", "_heap")

    def __init__(self) -> None:
        self._heap = list[tuple[float, int, MemberT]]()
        self._entries = dict[MemberT, tuple[float, int, MemberT]]()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, member: object) -> bool:
        return member in self._entries

    def __iter__(self) -> Iterator[MemberT]:
        return iter(self._entries)

    def place(self, member: MemberT, rank: float, then: int) -> None:
        """Add a member, or move it to another rank.

        Members with a smaller ``rank`` come first. ``then`` decides between equal ranks, smaller
        first, and is different for different members.
        """
        entry = (rank, then, member)
        self._entries[member] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _MIN_STALE:
            self._rebuild()

    def discard(self, member: MemberT) -> None:
        """Remove a member if it is there."""
        if self._entries.pop(member, None) is not None and (
            len(self._heap) > 2 * len(self._entries) + _MIN_STALE
        ):
            self._rebuild()

    def first(self) -> MemberT | None:
        """Return the smallest member; None if there is none."""
        heap = self._heap
        while heap:
            entry = heap[0]
            if self._entries.get(entry[2]) is entry:
                return entry[2]
            heapq.heappop(heap)
        return None

    def _rebuild(self) -> None:
        self._heap = list(self._entries.values())
        heapq.heapify(self._heap)
