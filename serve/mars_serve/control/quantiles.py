"""Quantiles of what was counted in buckets over the latest seconds. Imports no Ray."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import zip_longest


def increments(now: Sequence[int], before: Sequence[int]) -> dict[int, int]:
    """Return by how much each bucket has grown, for those that have; an empty tuple counts as 0s.

    Counts that have fallen were begun anew.
    """
    pairs = list(zip_longest(now, before, fillvalue=0))
    if any(new < old for new, old in pairs):
        pairs = [(new, 0) for new, _ in pairs]
    return {index: new - old for index, (new, old) in enumerate(pairs) if new > old}


def quantile(bounds: Sequence[float], counts: Mapping[int, int], share: float) -> float | None:
    """Return the value below which a share, in (0, 1], of the counted values lies; None without
    any.

    ``bounds`` are upper ends of the buckets, rising; values above all of them count as the last.
    """
    wanted = share * sum(counts.values())
    if not wanted:
        return None
    below = 0
    for index in sorted(counts):
        if below + counts[index] >= wanted:
            break
        below += counts[index]
    if index >= len(bounds):
        return bounds[-1]
    low = bounds[index - 1] if index else 0.0
    return low + (bounds[index] - low) * (wanted - below) / counts[index]


class RecentValues:
    """The values of the latest ``seconds``, in buckets whose upper ends are ``bounds``, rising."""

    def __init__(self, seconds: int, bounds: Sequence[float]) -> None:
        self._seconds = seconds
        self._bounds = bounds
        self._kept = deque[Mapping[int, int]]()
        self._sums = Counter[int]()

    def add(self, counts: Mapping[int, int]) -> None:
        """Add what was counted in one more second, and forget the oldest one."""
        self._kept.append(counts)
        self._sums.update(counts)
        if len(self._kept) > self._seconds:
            self._sums.subtract(self._kept.popleft())
            self._sums += Counter()  # drops the zeros

    @property
    def number(self) -> int:
        """Number of values."""
        return self._sums.total()

    def quantile(self, share: float) -> float | None:
        """Return a quantile of the values; None if there are none."""
        return quantile(self._bounds, self._sums, share)
