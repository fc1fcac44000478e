"""Estimates how long outputs are, from the requests that run as well as from those that have ended.

Ended requests alone say nothing in the first seconds, and then too little: the short ones end
first. So the tokens of an output are divided into spans, each half as long again as those before or
longer, and of each span three things are counted: tokens in it, requests that went on to the next
one, and requests that ended in it. A request that runs counts in the spans that it has left behind.
The mean length follows as in a life table (Kaplan and Meier, "Nonparametric estimation from
incomplete observations", 1958), in spans instead of at each time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

_STARTS = (1, *(start for i in range(1, 17) for start in (2**i, 3 * 2 ** (i - 1))), 2**17)
"""First token of each span, the first token of an output being 1; the last span has no end."""
NUM_SPANS = len(_STARTS)
USUAL_TOKENS = 256
"""Tokens that an output is expected to have yet while nothing is known."""

_HALF_LIFE_REQUESTS = 100
"""Number of new requests after which what was counted before them counts half."""
_PRIOR_REQUESTS = 0.2
"""Number of requests whose weight the expectation has in each span."""
_PRIOR_SHARE = 0.25
"""Least that an output is expected to have yet, as a share of what it has: long ones go on long."""
_NO_LIMIT_TOKENS = 2**18
"""A ``max_tokens`` that no output reaches."""

Spans = tuple[float, ...]

_NONE: Spans = (0,) * NUM_SPANS


@dataclass(frozen=True)
class LengthCounts:
    """Counts of the outputs of requests; those of a replica since its start, if not said otherwise.

    The numbers are whole except where they have been weighted.
    """

    num_begun: float = 0
    """Requests that came to the engine."""
    limits: float = 0
    """Sum of their ``max_tokens``."""
    tokens: Spans = _NONE
    passed: Spans = _NONE
    """Requests with more output than the span holds."""
    ended: Spans = _NONE
    """Requests that had output and whose last token is in the span."""

    @property
    def is_valid(self) -> bool:
        """Whether every number is finite and not negative."""
        spans = (self.tokens, self.passed, self.ended, (self.num_begun, self.limits))
        return all(min(each) >= 0 and sum(each) < math.inf for each in spans)

    def __sub__(self, other: LengthCounts) -> LengthCounts:
        """Return what was counted between another moment and this one."""
        return self._with(other, 1.0, -1.0)

    def followed_by(self, new: LengthCounts) -> LengthCounts:
        """Return counts in which these are weighted less, the more requests came since."""
        return self._with(new, 0.5 ** (new.num_begun / _HALF_LIFE_REQUESTS), 1.0)

    def _with(self, other: LengthCounts, weight: float, other_weight: float) -> LengthCounts:
        def mixed(one: Spans, two: Spans) -> Spans:
            return tuple(
                weight * a + other_weight * b if a or b else 0.0
                for a, b in zip(one, two, strict=True)
            )

        return LengthCounts(
            weight * self.num_begun + other_weight * other.num_begun,
            weight * self.limits + other_weight * other.limits,
            mixed(self.tokens, other.tokens),
            mixed(self.passed, other.passed),
            mixed(self.ended, other.ended),
        )

    @property
    def mean(self) -> float:
        """Mean length of an output in tokens, at least 1 and at most the mean ``max_tokens``.

        Where nothing is known of a span, as many requests are taken to leave it behind as if what
        they have yet were exponential with a mean of `USUAL_TOKENS`, or of a share of what they
        have.
        """
        limit = max(self.limits / self.num_begun, 1.0) if self.num_begun else math.inf
        mean, reached = 0.0, 1.0
        widths = [end - start for start, end in pairwise(_STARTS)]
        for i, width in enumerate((*widths, _NO_LIMIT_TOKENS)):
            yet = max(min(USUAL_TOKENS, limit), _PRIOR_SHARE * _STARTS[i])
            likely = math.exp(-width / yet)
            left = self.passed[i] + self.ended[i] + _PRIOR_REQUESTS
            tokens = self.tokens[i] + _PRIOR_REQUESTS * yet * (1 - likely)
            mean += reached * min(tokens / left, width)
            reached *= (self.passed[i] + _PRIOR_REQUESTS * likely) / left
        return max(1.0, min(mean, limit))


class LengthCounter:
    """Counts outputs as they grow."""

    def __init__(self) -> None:
        self._num_begun = self._limits = 0
        self._tokens = [0] * NUM_SPANS
        self._passed = [0] * NUM_SPANS
        self._ended = [0] * NUM_SPANS

    @property
    def counts(self) -> LengthCounts:
        """Counts since the start."""
        spans = (tuple(each) for each in (self._tokens, self._passed, self._ended))
        return LengthCounts(self._num_begun, self._limits, *spans)

    def begun(self, max_tokens: int) -> None:
        """Count a request that may have so many output tokens."""
        self._num_begun += 1
        self._limits += max_tokens

    def grown(self, before: int, after: int) -> None:
        """Count the tokens of an output that had ``before`` and has ``after`` tokens."""
        span, last = _span_of(max(before, 1)), _span_of(max(after, 1))
        while span < last:
            end = _STARTS[span + 1] - 1
            self._tokens[span] += end - before
            self._passed[span] += 1
            before, span = end, span + 1
        self._tokens[span] += after - before

    def ended(self, num_tokens: int) -> None:
        """Count the end of an output with so many tokens."""
        self._ended[_span_of(max(num_tokens, 1))] += 1


def counts_of(
    ended: Iterable[int],
    running: Iterable[int] = (),
    num_begun: int = 0,
    max_tokens: int = _NO_LIMIT_TOKENS,
) -> LengthCounts:
    """Return the counts of outputs that have ended, and of those that are still growing.

    ``ended`` and ``running`` have the tokens of each so far, ``num_begun`` counts the requests that
    came, and ``max_tokens`` is the limit of each; by default one that no output reaches.
    """
    counter = LengthCounter()
    for _ in range(num_begun):
        counter.begun(max_tokens)
    for length in ended:
        counter.grown(0, length)
        counter.ended(length)
    for length in running:
        counter.grown(0, length)
    return counter.counts


def _span_of(position: int) -> int:
    if position >= _STARTS[-1]:
        return NUM_SPANS - 1
    octave = position.bit_length() - 1
    return 2 * octave - (position < 3 << octave >> 1) if octave else 0
