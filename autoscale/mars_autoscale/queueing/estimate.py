"""Estimates how long a new request would wait, and whether it would come too late.

Imports no Ray, torch or HTTP library.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_SPAN_S = 5.0
"""Seconds over which a pace is measured: long enough for a wave of requests that begin together."""
_NUM_SPANS = 24
"""Number of spans that are remembered, the latest two minutes of waiting."""
_MEMORY_S = 600.0
"""Seconds after which a span no longer tells anything, since the replicas may be others."""


@dataclass(frozen=True)
class LateRule:
    """Tells which requests would come too late."""

    each_s: float
    """Seconds that each waiting request takes on average."""
    objective_s: float
    """Seconds after which a request comes too late."""

    def late_s(self, num_ahead: float) -> float:
        """Return by how many seconds a request behind some others would come too late, or 0."""
        return max(0.0, num_ahead * self.each_s - self.objective_s)


class StartPace:
    """The pace, in tokens per second, at which waiting requests go to replicas.

    Only spans throughout which requests waited count. At other times the pace is that of the
    arrivals and says nothing about what the replicas could do.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` returns the time in seconds, the same as the queue's."""
        self._clock = clock
        self._spans = deque[tuple[float, int]](maxlen=_NUM_SPANS)  # end in seconds, tokens
        self._start_s: float | None = None
        """Start of the present span; None while no request waits."""
        self._tokens = 0

    def note_waiting(self, is_waiting: bool) -> None:
        """Tell whether requests wait from now on; to be called whenever that may have changed."""
        self._close_spans()
        if not is_waiting:
            self._start_s = None
        elif self._start_s is None:
            self._start_s, self._tokens = self._clock(), 0

    def began(self, tokens: int) -> None:
        """Count a request that goes to a replica, with its cost; before `note_waiting`."""
        self._close_spans()
        self._tokens += tokens

    def wait_s(self, tokens_ahead: int) -> float | None:
        """Return the seconds until so many tokens have begun, at the mean pace.

        None if the pace is not known.
        """
        spans = self._known_spans()
        total = sum(spans)
        return tokens_ahead * _SPAN_S * len(spans) / total if total else None

    def is_hopeless(self, tokens_ahead: int, deadline_s: float, *, speedup: float = 1.0) -> bool:
        """Whether a new request would surely begin after ``deadline_s``, with ``tokens_ahead``
        before it.

        It would even if all went at the best pace of any span, times ``speedup``, the replicas that
        there will be by those that there are. Where no pace is known, nothing is sure.
        """
        best = max(self._known_spans(), default=0) * speedup
        if not best:
            return False
        return self._clock() + tokens_ahead * _SPAN_S / best > deadline_s

    def _known_spans(self) -> list[int]:
        self._close_spans()
        oldest_s = self._clock() - _MEMORY_S
        return [tokens for end_s, tokens in self._spans if end_s >= oldest_s]

    def _close_spans(self) -> None:
        """Note the spans that are over; after the first, nothing has begun in them."""
        if self._start_s is None:
            return
        num_over = int((self._clock() - self._start_s) // _SPAN_S)
        skipped = max(num_over - 1 - _NUM_SPANS, 0)
        for index in (0, *range(1 + skipped, num_over)) if num_over else ():
            self._spans.append((self._start_s + (index + 1) * _SPAN_S, self._tokens))
            self._tokens = 0
        self._start_s += num_over * _SPAN_S
