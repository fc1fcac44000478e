"""Sums of requests and tokens up to a deadline.

Imports no Ray, torch or HTTP library.
"""

_TICK_S = 0.25
"""Width in seconds of the finest bins; deadlines within one are not told apart."""
_BITS = 6
"""Each bin of a level holds ``2**_BITS`` bins of the level below."""
_LEVELS = 3
"""Number of levels; a bin of the coarsest one spans 17 minutes."""


class DeadlineSums:
    """Counts requests and their tokens by deadline, in bins of several widths.

    A question sums at most 63 bins of each finer level, and the coarsest bins before the deadline,
    which are few since deadlines lie minutes ahead and not months. Empty bins take no memory.
    """

    __slots__ = ("_levels",)

    def __init__(self) -> None:
        self._levels: list[dict[int, tuple[int, int]]] = [{} for _ in range(_LEVELS)]

    def add(self, deadline_s: float, num: int, tokens: int) -> None:
        """Add ``num`` requests of ``tokens`` in all; negative numbers take them away."""
        index = int(deadline_s // _TICK_S)
        for level in self._levels:
            before = level.get(index, (0, 0))
            after = (before[0] + num, before[1] + tokens)
            if after[0]:
                level[index] = after
            else:
                del level[index]
            index >>= _BITS

    def before(self, deadline_s: float) -> tuple[int, int]:
        """Return the requests and tokens whose deadlines are earlier, by whole ticks."""
        index = int(deadline_s // _TICK_S)
        num = tokens = 0
        for level in self._levels[:-1]:
            for each in range(index >> _BITS << _BITS, index):
                if each in level:
                    num, tokens = num + level[each][0], tokens + level[each][1]
            index >>= _BITS
        for each, (num_in, tokens_in) in self._levels[-1].items():
            if each < index:
                num, tokens = num + num_in, tokens + tokens_in
        return num, tokens
