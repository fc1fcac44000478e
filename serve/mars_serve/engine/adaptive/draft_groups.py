"""Which drafts and masks a row that checks drafts feeds: pure functions of what they may bring.

A step that checks D drafts has D + 1 outcomes. Masks behind an outcome give the drafts of the step
after if it comes about; behind any other they are wasted. So a mask is worth the chance of its
outcome times what a draft of its depth brings, in tokens, and it costs a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, takewhile
from operator import mul
from typing import NamedTuple

from mars_serve.engine.request import Request


class DraftChances(NamedTuple):
    """What is known of a request's drafts, by depth from 1 on. Plain lists: asked in every step."""

    each: list[float]
    """That a draft is right if all before it are."""
    all_up_to: list[float]
    """That it is right, and all before it."""

    @classmethod
    def of(cls, each: Sequence[float]) -> DraftChances:
        """From the first."""
        return cls(list(each), list(accumulate(each, mul)))


def mask_gains(request: Request, chances: DraftChances, window: int) -> list[list[float]]:
    """Expected tokens of each mask that a request could feed: by outcome, then by depth.

    Args:
        request: one that checks drafts.
        chances: of its drafts.
        window: masks of an outcome at the most.
    """
    return [
        [share * gain for gain in chances.all_up_to[: request.num_masks(window, outcome)]]
        for outcome, share in enumerate(_shares(_reach(request, chances)))
    ]


def chosen_masks(
    request: Request, chances: DraftChances, window: int, least_gain: float
) -> tuple[int, ...]:
    """Masks of each outcome, for as many drafts as are worth a position.

    Args:
        request: one that checks drafts.
        chances: of its drafts.
        window: masks of an outcome at the most.
        least_gain: tokens that a position must be expected to bring, above 0.
    """
    reach = _reach(request, chances)
    kept = list(takewhile(lambda chance: chance >= least_gain, reach)) or [1.0]
    masks = []
    for outcome, share in enumerate(_shares(kept)):
        count = sum(share * gain >= least_gain for gain in chances.all_up_to)
        masks.append(min(count, request.num_masks(window, outcome)) if count else 0)
    return tuple(masks)


def _reach(request: Request, chances: DraftChances) -> list[float]:
    """Chance that so many drafts are right: 1.0 for none, and falling."""
    drafts = request.drafts[: request.num_left - 1]
    options = request.options
    if (
        options.sampling.temperature > 0 or options.grammar is not None
    ) and not request.has_drafter:
        # a mask's probability says neither how often its draw is right nor what a grammar allows
        return [1.0, *chances.all_up_to[: len(drafts)]]
    return list(accumulate((draft.confidence for draft in drafts), mul, initial=1.0))


def _shares(reach: list[float]) -> list[float]:
    """Chance of each outcome: that so many drafts are right and no more."""
    return [chance - further for chance, further in zip(reach, [*reach[1:], 0.0], strict=True)]
