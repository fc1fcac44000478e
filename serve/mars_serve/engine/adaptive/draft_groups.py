"""Lists the drafts and masks that a row could feed, by their expected gain, and picks among them.

A step that checks D drafts has D + 1 outcomes. The masks behind an outcome give the drafts of the
next step if that outcome occurs, and are wasted otherwise. So the expected gain of a mask, in
tokens, is the probability of its outcome times the probability that the draft it gives is right.
Its cost is one position, and another one in the next step if its outcome occurs: a draft is fed
whether or not it is right. In mode threshold there is one outcome, and of what masks give only the
accepted tokens are fed in the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, takewhile
from operator import mul
from typing import NamedTuple

from mars_serve.engine.adaptive.acceptance_statistics import bin_of
from mars_serve.engine.request import Request


class Chances(NamedTuple):
    """Probabilities for a request; plain lists, because every step reads single entries."""

    masks: Sequence[float]
    """Probability, by depth from 1 on, that all that masks give up to there is right."""
    drafts: Sequence[float]
    """Probability, by bin of confidence, that a mask's draft is right if all before it are."""


Candidate = tuple[float, float]
"""A position that a request could feed: the tokens that it is expected to give, and the positions
that it is expected to add to the next step."""


def num_given_drafts(request: Request) -> int:
    """Count the drafts of the request's masks, which count as fed whatever is chosen.

    Drafts of the request's own text are candidates beside the masks, see `candidates_of`.
    """
    return len(request.drafts) - request.num_lookup_drafts


def candidates_of(request: Request, chances: Chances, window: int) -> list[Candidate]:
    """Return the positions that a request could feed: masks by outcome and depth, at most
    ``window`` an outcome, then the drafts from its own text.
    """
    checks_drafts = request.plan.checks_drafts
    if not (checks_drafts and request.drafts):
        most = _most_masks(request, window, 0)
        return [(gain, 1.0 if checks_drafts else gain) for gain in chances.masks[:most]]
    reach = _reach(request, chances)
    masks = [
        (share * gain, share)
        for outcome, share in enumerate(_outcome_shares(reach))
        for gain in chances.masks[: _most_masks(request, window, outcome)]
    ]
    return masks + [(gain, 0.0) for gain in reach[1 + num_given_drafts(request) :]]


def chosen_masks(
    request: Request, chances: Chances, window: int, least_gain: float
) -> tuple[int, ...]:
    """Return the number of masks of each outcome; one outcome more than drafts worth checking.

    Each position must be expected to gain ``least_gain`` tokens, above 0, for itself and for what
    it adds to the next step.
    """
    shares = [1.0]
    if not request.plan.checks_drafts:
        counts = [sum(gain / (1.0 + gain) >= least_gain for gain in chances.masks)]
    else:
        if request.drafts:
            reach = takewhile(least_gain.__le__, _reach(request, chances))
            shares = _outcome_shares(list(reach) or [1.0])
        counts = [
            sum(share * gain / (1.0 + share) >= least_gain for gain in chances.masks)
            for share in shares
        ]
    return tuple(
        min(count, _most_masks(request, window, outcome)) if count else 0
        for outcome, count in enumerate(counts)
    )


def _most_masks(request: Request, window: int, outcome: int) -> int:
    """Return the most masks that are of use behind an outcome: none if it ends the output."""
    if outcome == len(request.drafts) and request.drafts_end:
        return 0
    return request.plan.num_masks(window, request.num_left, outcome)


def _reach(request: Request, chances: Chances) -> list[float]:
    """Return the probability that at least 0, 1, 2, ... leading drafts are right."""
    drafts, own = request.drafts[: request.num_left - 1], request.num_own_drafts
    each = [chances.drafts[bin_of(draft.confidence)] for draft in drafts[:own]]
    each += [draft.confidence for draft in drafts[own:]]
    return list(accumulate(each, mul, initial=1.0))


def _outcome_shares(reach: list[float]) -> list[float]:
    """Return the probability of each outcome: that exactly so many leading drafts are right."""
    return [chance - further for chance, further in zip(reach, [*reach[1:], 0.0], strict=True)]
