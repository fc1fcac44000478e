"""An index of one growing text, which finds the earlier place that is most like its end.

The places of all runs of two tokens are kept in chains by hash, as in zlib's deflate (RFC 1951,
section 4): 4 bytes a token beside a table of at most 128 KiB, and a few comparisons in a search.
"""

from array import array
from collections.abc import Sequence

_RUN = 2
"""Tokens of the shortest match that a search finds."""
_MAX_TRIED = 16
"""Most places that a search compares, the newest first."""
_MAX_BITS = 15
"""Most bits of a hash; longer texts have longer chains."""
_MAX_INDEXED = 2048
"""Most tokens that are indexed at once, so that a long prompt holds a step up for about a
millisecond."""


class TokenIndex:
    """The places of all runs of two tokens in a text that grows at its end.

    A place is the number of tokens before it. The text itself is the caller's.
    """

    def __init__(self, max_length: int) -> None:
        """Start without tokens of a text that is expected to reach ``max_length``."""
        bits = min(max(8, max_length.bit_length()), _MAX_BITS)
        self._mask = (1 << bits) - 1
        self._newest = array("i", [0]) * (1 << bits)
        """Newest place behind a run of each hash; 0 for none."""
        self._older = array("i", [0]) * _RUN
        """For each place, the one before it with the same hash."""

    @property
    def num_indexed(self) -> int:
        """Number of leading tokens of the text whose places are found; never less than 2."""
        return len(self._older)

    def extend(self, tokens: Sequence[int]) -> None:
        """Index up to 2048 more places of the whole text ``tokens``, but not its end."""
        first, newest, older, mask = self.num_indexed, self._newest, self._older, self._mask
        for place in range(first, min(len(tokens), first + _MAX_INDEXED)):
            key = _hash(tokens[place - 2], tokens[place - 1]) & mask
            older.append(newest[key])
            newest[key] = place

    def longest_match(self, tokens: Sequence[int], end: Sequence[int]) -> tuple[int, int]:
        """Return the newest indexed place before which most tokens agree with ``end``, and how many
        do.

        ``end`` are the last tokens of the text, or drafts behind them, too. Two zeros are returned
        if not even two tokens agree.
        """
        best = length = 0
        if len(end) >= _RUN:
            place = self._newest[_hash(*end[-_RUN:]) & self._mask]
            for _ in range(_MAX_TRIED):
                if not place or length == len(end):
                    break
                agreed = num_agreed(tokens, place, end)
                if agreed > length:
                    best, length = place, agreed
                place = self._older[place]
        return (best, length) if length >= _RUN else (0, 0)


def num_agreed(tokens: Sequence[int], place: int, end: Sequence[int]) -> int:
    """Count how many tokens before a place of a text agree with the last ones of ``end``."""
    count, most = 0, min(len(end), place)
    while count < most and tokens[place - 1 - count] == end[-1 - count]:
        count += 1
    return count


def _hash(first: int, second: int) -> int:
    mixed = (first * 0x9E3779B1 + second * 0x85EBCA77) & 0xFFFFFFFF
    return mixed ^ mixed >> 15
