"""Which drafts and masks a row of mode exact feeds: pure functions of what they may bring.

A step that checks D drafts has D + 1 outcomes. Masks behind an outcome give the drafts of the step
after if it comes about; behind any other they are wasted. So a mask is worth the chance of its
outcome times what a draft of its depth brings, in tokens, and it costs a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from mars_serve.engine.request import Request

Floats = NDArray[np.float64]


def mask_gains(request: Request, acceptance: Floats, window: int) -> list[list[float]]:
    """Expected tokens of each mask that a request could feed: by outcome, then by depth.

    Args:
        request: in mode exact.
        acceptance: ``[depths]``, chances that a draft is right if all before it are.
        window: masks of an outcome at the most.
    """
    reach = _reach(request, acceptance)
    return _gains(request, reach, acceptance.cumprod(), window)


def chosen_masks(
    request: Request, acceptance: Floats, window: int, least_gain: float
) -> tuple[int, ...]:
    """Masks of each outcome, for as many drafts as are worth a position.

    Args:
        request: in mode exact.
        acceptance: as for :func:`mask_gains`.
        window: masks of an outcome at the most.
        least_gain: tokens that a position must be expected to bring, above 0.
    """
    reach = [chance for chance in _reach(request, acceptance) if chance >= least_gain] or [1.0]
    gains = _gains(request, reach, acceptance.cumprod(), window)
    return tuple(sum(gain >= least_gain for gain in line) for line in gains)


def _reach(request: Request, acceptance: Floats) -> list[float]:
    """Chance that so many drafts are right: 1.0 for none, and falling."""
    drafts = request.drafts[: request.num_left - 1]
    chances: Sequence[float]
    if request.options.sampling.temperature > 0 and not request.has_drafter:
        chances = acceptance[: len(drafts)].tolist()  # a mask's probability does not say it
    else:
        chances = [draft.confidence for draft in drafts]
    return list(accumulate(chances, mul, initial=1.0))


def _gains(
    request: Request, reach: list[float], by_depth: Floats, window: int
) -> list[list[float]]:
    gains = []
    for outcome, (chance, further) in enumerate(zip(reach, [*reach[1:], 0.0], strict=True)):
        num_masks = request.num_masks(window, outcome)
        gains.append([(chance - further) * gain for gain in by_depth[:num_masks].tolist()])
    return gains
