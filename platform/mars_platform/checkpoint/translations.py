"""Fits what thresholds of other confidences mean, from tokens that masks proposed.

A threshold τ accepts the proposals of a cursor up to the first whose confidence is below it. What
it costs is the share of cursors with a wrong token among those accepted, for each token generated::

    loss(τ) = cursors with a wrong accepted token / (cursors + accepted tokens)

A threshold of ``probability`` translates to the lowest threshold of the other confidence from which
on the loss is nowhere higher. The proposals are the same for both, so that most of the chance in
them cancels out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mars_platform.method.mode import Confidence
from mars_platform.method.translation import Translation

KNOTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.96, 0.97, 0.98,
         0.99, 0.995, 0.999)  # fmt: skip
"""Thresholds of ``probability`` that are translated."""
_FEW = 10
"""Wrong tokens below which a loss is too uncertain to go by."""
_DIGITS = 6


@dataclass(frozen=True)
class ProposedRuns:
    """What masks proposed at some cursors, without the ordinary prediction at depth 0."""

    num_cursors: int
    cursor: Tensor
    """int64 [tokens], number of each token's cursor, from 0, never falling."""
    correct: Tensor
    """bool [tokens], whether each token is right; depths rise from 1 within a cursor."""

    def lowest(self, confidence: Tensor) -> Tensor:
        """Return the highest τ that accepts each token: the lowest ``confidence`` up to it.

        ``confidence`` is float32 [tokens], and the result float64 [tokens].
        """
        lowest = confidence.double().clone()
        same = self.cursor[1:] == self.cursor[:-1]
        depth = 1
        while bool(same.any()):  # once for each depth
            lowest[depth:] = torch.where(
                same, torch.minimum(lowest[depth:], confidence.double()[:-depth]), lowest[depth:]
            )
            depth += 1
            same = self.cursor[depth:] == self.cursor[:-depth]
        return lowest


def fit_translation(
    runs: ProposedRuns,
    probability: Tensor,
    confidence: Tensor,
    measure: Confidence,
    *,
    calibrated: bool,
) -> Translation:
    """Translate the thresholds `KNOTS` of ``probability`` to thresholds of another confidence.

    ``probability``, which is uncorrected, and ``confidence``, which is corrected if ``calibrated``,
    are float32 [tokens]; ``measure`` names the latter. Where too few wrong tokens were seen to
    compare losses, the threshold also accepts no more tokens than that of ``probability``. Where
    nothing is accepted by ``probability``, the threshold is 1.
    """
    reference, other = _Losses.of(runs, probability), _Losses.of(runs, confidence)
    thresholds = list[float]()
    for knot in KNOTS:
        wrong, accepted = reference.at(knot)
        loss = wrong / max(runs.num_cursors + accepted, 1)
        within = other.highest <= loss
        if wrong < _FEW:
            within &= other.accepted <= accepted
        # the candidates rise, so that all from the first one within on are
        first = int(within.int().argmax()) if bool(within.any()) else -1
        found = 1.0 if first < 0 or not accepted else float(other.candidates[first])
        thresholds.append(max([found, *thresholds[-1:]]))
    rounded = tuple(min(round(each, _DIGITS), 1.0) or 10.0**-_DIGITS for each in thresholds)
    return Translation(measure, calibrated, KNOTS, rounded)


@dataclass(frozen=True)
class _Losses:
    """Wrong and accepted tokens of a confidence at candidate thresholds, which rise."""

    candidates: Tensor  # float64 [candidates]
    wrong: Tensor  # int64 [candidates]
    accepted: Tensor  # int64 [candidates]
    highest: Tensor  # float64 [candidates], the highest loss at this threshold or above

    @classmethod
    def of(cls, runs: ProposedRuns, confidence: Tensor) -> _Losses:
        lowest = runs.lowest(confidence)
        # a cursor's first wrong token is the one that the highest τ accepts
        wrong = torch.full((runs.num_cursors,), -1.0, dtype=torch.float64)
        wrong.scatter_reduce_(0, runs.cursor[~runs.correct], lowest[~runs.correct], "amax")
        candidates = torch.cat([lowest, torch.ones(1, dtype=torch.float64)]).sort().values
        num_wrong = _num_from(wrong, candidates)
        num_accepted = _num_from(lowest, candidates)
        losses = num_wrong / (runs.num_cursors + num_accepted)
        highest = losses.flip(0).cummax(0).values.flip(0)
        return cls(candidates, num_wrong, num_accepted, highest)

    def at(self, threshold: float) -> tuple[int, int]:
        """Return the wrong tokens (at most one a cursor) and the accepted ones at a threshold."""
        index = int(torch.searchsorted(self.candidates, threshold))
        index = min(index, len(self.candidates) - 1)
        return int(self.wrong[index]), int(self.accepted[index])


def _num_from(values: Tensor, thresholds: Tensor) -> Tensor:
    """Return how many values reach each threshold."""
    return len(values) - torch.searchsorted(values.sort().values, thresholds)
