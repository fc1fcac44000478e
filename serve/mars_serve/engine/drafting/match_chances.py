"""Running statistics of how often the token behind an earlier place of a text comes again."""

from __future__ import annotations

LONGEST = 16
"""Length from which on matches are taken to be equally good."""

_PRIOR_WEIGHT, _SHARED_WEIGHT = 4.0, 8.0
"""Weight of the prior against the engine's evidence, and of the engine's against a request's own,
in observations."""
_DECAY, _SHARED_DECAY = 0.5 ** (1 / 64), 0.5 ** (1 / 2000)
"""Factor of the weight of older evidence with each observation of the same length."""


class MatchChances:
    """Probability that the token behind a match comes again, by the length of the match.

    A request's evidence is shrunk towards that of all requests, and that towards a prior that rises
    with the length. Every observation counts for both.
    """

    def __init__(self, shared: MatchChances | None = None) -> None:
        """Start without evidence.

        Args:
            shared: evidence of all requests, which this request's is added to; None for that
                evidence itself.
        """
        self._shared = shared
        self._weight = _PRIOR_WEIGHT if shared is None else _SHARED_WEIGHT
        self._decay = _SHARED_DECAY if shared is None else _DECAY
        self._right = [0.0] * (LONGEST + 1)
        self._tried = [0.0] * (LONGEST + 1)

    def of(self, length: int) -> float:
        """Return the estimate for a match of ``length`` tokens, strictly between 0 and 1."""
        length = min(length, LONGEST)
        prior = _prior(length) if self._shared is None else self._shared.of(length)
        weight = self._weight
        return (self._right[length] + weight * prior) / (self._tried[length] + weight)

    def observe(self, length: int, *, is_right: bool) -> None:
        """Count a match of ``length`` tokens whose next token came again, or did not."""
        place = min(length, LONGEST)
        self._right[place] = self._right[place] * self._decay + is_right
        self._tried[place] = self._tried[place] * self._decay + 1.0
        if self._shared is not None:
            self._shared.observe(place, is_right=is_right)


def _prior(length: int) -> float:
    return (1 + length) / (LONGEST + 2)
