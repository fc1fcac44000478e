"""Copies of the keys and values of decoding rows that last from step to step, on a CPU.

Matrix products want a row's keys side by side. To copy them from pages for every step takes longer
than to attend once texts are long. So a row has a place in a rectangle of rows with about as many
keys, to which each step adds only its own; it is copied from pages when it comes, moves, or has
outgrown its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from mars_serve.engine.batch import BatchRow
from mars_serve.engine.request import Request

_FEWEST_KEYS = 64
"""Keys of the smallest places; sizes differ by half of it at least."""
_MOST_PADDING = 2
"""Most keys of a place that a row is put into, over those that it needs."""


@dataclass(eq=False)
class Rectangle:
    """Places of equal size in every layer; the first ones are in use."""

    copies: Tensor
    """[layers, parts, places, kv_heads, keys, head_dim]; the parts are keys and values."""
    owners: list[Request] = field(default_factory=list)
    """Requests that have the first places."""

    @property
    def num_keys(self) -> int:
        """Keys of a place."""
        return self.copies.shape[4]


@dataclass(frozen=True)
class KeptRows:
    """Rows of a step that attend together, in the order of their places."""

    copies: Tensor
    """Keys and values of all places of the rows' `Rectangle`, in every layer."""
    rows: list[BatchRow]
    fresh: list[int]
    """Places into which the cached tokens have yet to be copied from pages."""


class KeptCopies:
    """The rectangles of one group of layers, which are no larger than its pages together."""

    def __init__(self, pages: Tensor) -> None:
        """Start without rows; pages are [layers, parts, pages, kv_heads, page_size, head_dim]."""
        self._pages, self._num_left = pages, pages.numel()
        self._rectangles: list[Rectangle] = []
        self._num_valid: dict[Request, int] = {}
        """Leading tokens, for each request that has a place, that are in it after the last step."""
        self.is_complete = True
        """Whether all layers of the last step have attended; otherwise some lack copies."""

    def clear(self) -> None:
        """Take all places back."""
        for rectangle in self._rectangles:
            rectangle.owners.clear()
        self._num_valid.clear()

    def place(self, rows: Sequence[BatchRow]) -> tuple[list[KeptRows], list[BatchRow]]:
        """Return how the rows of the next step are kept, and those for which there is no room.

        Requests without a row lose their places.
        """
        if not self.is_complete:
            self.clear()
        by_owner = {row.owner: row for row in rows if row.owner is not None}
        fresh = self._close_up(by_owner)
        held = {owner for rectangle in self._rectangles for owner in rectangle.owners}
        coming = {owner: _num_keys(row) for owner, row in by_owner.items() if owner not in held}
        sizes = list(coming.values())
        for index, owner in enumerate(coming):
            if rectangle := self._find(sizes[index:]):
                rectangle.owners.append(owner)
                fresh.add(owner)
        kept = [
            KeptRows(
                each.copies,
                [by_owner[owner] for owner in each.owners],
                [place for place, owner in enumerate(each.owners) if owner in fresh],
            )
            for each in self._rectangles
            if each.owners
        ]
        placed = [row for each in kept for row in each.rows]
        self._num_valid = {
            row.owner: row.num_cached + row.num_tokens for row in placed if row.owner is not None
        }
        self.is_complete = not placed
        return kept, [row for row in rows if row.owner not in self._num_valid]

    def _close_up(self, by_owner: Mapping[Request, BatchRow]) -> set[Request]:
        """Take places back from requests whose cached tokens are not there, that have outgrown
        theirs, or that have no row; return those that move up from the end into their places.
        """
        moved = set[Request]()
        for rectangle in self._rectangles:
            staying = [
                owner if self._stays(by_owner.get(owner), rectangle) else None
                for owner in rectangle.owners
            ]
            while None in staying:
                last = staying.pop()
                if last is not None:
                    staying[staying.index(None)] = last
                    moved.add(last)
            rectangle.owners = [owner for owner in staying if owner is not None]
        # Without those that are empty, a request alone has the same places, and so the same bits.
        self._num_left += sum(each.copies.numel() for each in self._rectangles if not each.owners)
        self._rectangles = [each for each in self._rectangles if each.owners]
        return moved

    def _stays(self, row: BatchRow | None, rectangle: Rectangle) -> bool:
        if row is None or row.owner is None or _num_keys(row) > rectangle.num_keys:
            return False
        return row.num_cached <= self._num_valid.get(row.owner, -1)

    def _find(self, sizes: Sequence[int]) -> Rectangle | None:
        """Return the rectangle with the smallest free place that is large enough for the first of
        the rows that come, by their keys, or a new one with room for those like it.
        """
        fitting = [each for each in self._rectangles if _fits(sizes[0], each.num_keys)]
        found = min(fitting, key=lambda each: each.num_keys, default=None)
        num_keys = found.num_keys if found else self._capacity(sizes[0])
        places = len(found.owners) if found else 0
        if found is None or places == found.copies.shape[2]:
            room = self._num_left // self._elements(1, num_keys)
            if room <= places:
                return None
            more = sum(_fits(size, num_keys) for size in sizes)
            copies = self._new(min(room, places + max(1, places, more)), num_keys)
            if found is None:
                found = Rectangle(copies)
                self._rectangles.append(found)
            else:
                copies[:, :, :places] = found.copies
                self._num_left += found.copies.numel()
                found.copies = copies
        return found

    def _capacity(self, num_keys: int) -> int:
        """Return the keys of a place for at least so many: one of few numbers, in whole pages."""
        count, page_size = max(num_keys, _FEWEST_KEYS), self._pages.shape[4]
        step = max(_FEWEST_KEYS // 2, 1 << ((count - 1).bit_length() - 3))
        step += -step % page_size
        return -(-count // step) * step

    def _elements(self, num_places: int, num_keys: int) -> int:
        layers, parts, _, heads, _, head_dim = self._pages.shape
        return layers * parts * num_places * heads * num_keys * head_dim

    def _new(self, num_places: int, num_keys: int) -> Tensor:
        """Reserve places, for which there has to be room."""
        layers, parts, _, heads, _, head_dim = self._pages.shape
        self._num_left -= self._elements(num_places, num_keys)
        return self._pages.new_empty(layers, parts, num_places, heads, num_keys, head_dim)


def _fits(num_keys: int, place: int) -> bool:
    """Whether a row with so many keys may have a place with so many."""
    return num_keys <= place <= max(_FEWEST_KEYS, _MOST_PADDING * num_keys)


def _num_keys(row: BatchRow) -> int:
    return row.num_cached + row.length
