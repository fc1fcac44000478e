"""Chooses which drafts and masks a row that checks drafts feeds, by their expected gain.

A step that checks D drafts has D + 1 outcomes. The masks behind an outcome give the drafts of the
next step if that outcome occurs, and are wasted otherwise. So the expected gain of a mask, in
tokens, is the probability of its outcome times the probability that the draft it gives is right.
Its cost is one position, and another one in the next step if its outcome occurs: a draft is fed
whether or not it is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, takewhile
from operator import mul
from typing import NamedTuple

from mars_serve.engine.request import Draft, Request


class DraftChances(NamedTuple):
    """Probabilities that a request's drafts are right, by depth from 1 on.

    They are plain lists, because every step reads single entries.
    """

    each: list[float]
    """Probability that the draft at a depth is right if all drafts before it are."""
    all_up_to: list[float]
    """Probability that the draft at a depth and all before it are right."""

    @classmethod
    def of(cls, each: Sequence[float]) -> DraftChances:
        """Build both lists from ``each``."""
        return cls(list(each), list(accumulate(each, mul)))


class Candidate(NamedTuple):
    """A position that a request could feed."""

    gain: float
    """Tokens that it is expected to give."""
    further: float
    """Positions that it is expected to add to the next step."""


def num_given_drafts(request: Request) -> int:
    """Count the drafts of the request's masks, which count as fed whatever is chosen.

    Drafts of the request's own text are candidates beside the masks, see `position_gains`.
    """
    return len(request.drafts) - request.num_lookup_drafts


def candidates_of(request: Request, chances: DraftChances, window: int) -> list[list[Candidate]]:
    """Return the positions that a request that checks drafts could feed.

    Its masks, at most ``window`` an outcome, come first, by outcome and depth; the last list is
    that of the drafts from its own text.
    """
    reach = _reach(request, chances)
    plan, num_left = request.plan, request.num_left
    masks = [
        [
            Candidate(share * gain, share)
            for gain in chances.all_up_to[: plan.num_masks(window, num_left, outcome)]
        ]
        for outcome, share in enumerate(_outcome_shares(reach))
    ]
    drafts = reach[1 + num_given_drafts(request) :]
    return [*masks, [Candidate(gain, 0.0) for gain in drafts]]


def chosen_masks(
    request: Request, chances: DraftChances, window: int, least_gain: float
) -> tuple[int, ...]:
    """Return the number of masks of each outcome; one outcome more than drafts worth checking.

    Each position must be expected to gain ``least_gain`` tokens, above 0, those of the next step
    included.
    """
    if not request.drafts and max(chances.all_up_to, default=0.0) < 2.0 * least_gain:
        return (0,)  # as below, but quicker: rows whose masks do not pay are to cost nothing
    reach = _reach(request, chances)
    kept = list(takewhile(lambda chance: chance >= least_gain, reach)) or [1.0]
    masks = []
    plan, num_left = request.plan, request.num_left
    for outcome, share in enumerate(_outcome_shares(kept)):
        least = least_gain * (1.0 + share)
        count = sum(share * gain >= least for gain in chances.all_up_to)
        masks.append(min(count, plan.num_masks(window, num_left, outcome)) if count else 0)
    return tuple(masks)


def _reach(request: Request, chances: DraftChances) -> list[float]:
    """Return the probability that at least 0, 1, 2, ... leading drafts are right."""
    drafts = request.drafts[: request.num_left - 1]
    options = request.options
    if options.sampling.temperature > 0 or options.grammar is not None:
        # The mask's probability for a draft does not say how often sampling or a grammar picks it.
        num_given = num_given_drafts(request)
        given = [1.0, *chances.all_up_to[: min(num_given, len(drafts))]]
        return [*given[:-1], *_products(drafts[num_given:], given[-1])]
    return _products(drafts, 1.0)


def _products(drafts: Sequence[Draft], first: float) -> list[float]:
    """Return ``first`` times the confidences of no draft, one draft, two drafts, and so on."""
    return list(accumulate((draft.confidence for draft in drafts), mul, initial=first))


def _outcome_shares(reach: list[float]) -> list[float]:
    """Return the probability of each outcome: that exactly so many leading drafts are right."""
    return [chance - further for chance, further in zip(reach, [*reach[1:], 0.0], strict=True)]
