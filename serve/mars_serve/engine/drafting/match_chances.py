"""Running statistics of how often the token behind an earlier place of a text comes again."""

from __future__ import annotations

LONGEST = 16
"""Length from which on matches are taken to be equally good."""
REJECTED = LONGEST + 1
"""Stands in the place of a length for drafts behind one that was rejected."""

_PRIOR_WEIGHT, _SHARED_WEIGHT = 4.0, 8.0
"""Weight of the prior against the engine's evidence, and of the engine's against a request's own,
in observations."""
_DECAY, _SHARED_DECAY = 0.5 ** (1 / 64), 0.5 ** (1 / 2000)
"""Factor of the weight of older evidence with each observation of the same length."""
_PRIOR = [*((1 + length) / (LONGEST + 2) for length in range(LONGEST + 1)), 0.5]


class MatchChances:
    """Probability that the token behind a match comes again, by the length of the match.

    A request's evidence is shrunk towards that of all requests, and that towards a prior that rises
    with the length. Every observation counts for both.
    """

    def __init__(self, shared: MatchChances | None = None) -> None:
        """Start without evidence; observations also count for ``shared``, that of all requests.

        For the evidence of all requests itself, ``shared`` is None.
        """
        self.of: list[float] = list(_PRIOR if shared is None else shared.of)
        """Estimate for each length from 0 to 16, and for `REJECTED`, strictly between 0 and 1."""
        self._shared = shared
        self._weight, self._decay = _SHARED_WEIGHT, _DECAY
        if shared is None:
            self._weight, self._decay = _PRIOR_WEIGHT, _SHARED_DECAY
        self._right = [0.0] * len(_PRIOR)
        self._tried = [0.0] * len(_PRIOR)

    def observe(self, length: int, *, is_right: bool) -> None:
        """Count a match of ``length``, or `REJECTED`, and whether its next token came again."""
        prior = _PRIOR[length]
        if self._shared is not None:
            self._shared.observe(length, is_right=is_right)
            prior = self._shared.of[length]
        right = self._right[length] = self._right[length] * self._decay + is_right
        tried = self._tried[length] = self._tried[length] * self._decay + 1.0
        self.of[length] = (right + self._weight * prior) / (tried + self._weight)
