"""Chooses how many masks each row feeds into the next step.

Masks are chosen from measured step times and observed acceptance, such that the engine generates as
many tokens per second as possible; where masks do not pay, none are fed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mars_autoscale.model.step_times import StepTimes
from mars_serve.engine.adaptive.acceptance_statistics import PRIOR, AcceptanceStatistics
from mars_serve.engine.adaptive.draft_groups import (
    Candidate,
    DraftChances,
    candidates_of,
    chosen_masks,
    num_given_drafts,
)
from mars_serve.engine.request import Request

_Bools = NDArray[np.bool_]
_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]

_CHOOSING_SHARE = 0.02
"""Largest share of a step's time spent on choosing; a choice is kept for several short steps."""
_IDLE_SHARE = 0.0025
"""The same while no masks are fed, since choosing gains nothing then."""
_CHOOSING_S = 200e-6
"""Seconds that choosing is taken to last before the first choice."""
_CHOOSING_WEIGHT, _MAX_CHOOSING = 0.1, 4.0
"""Weight of the newest choice in the running mean of the time that choosing takes, and its largest
multiple of that mean; more counts as a pause."""
_MAX_INTERVAL = 16
"""Most steps for which a choice is kept."""
_NEXT_FEW = 8
"""Number of positions over which the cost of one further position is averaged."""
_LEAST_GAIN = 0.01
"""Expected tokens below which a mask is not worth its bookkeeping."""
_SHORT_PROMPT = 32
"""Change of the prompt positions in a step up to which a choice is kept: choosing anew would cost
more than it gains. The limit is at least the number of masks of all rows."""
_FEWER_ROWS = 0.75
"""Share of the rows at the last choice below which masks may pay that did not."""
_MARGIN = 0.03
"""Tokens per step that a row's masks must be expected to gain beyond their cost."""


class WindowChooser:
    """Chooses each row's number of masks to maximise tokens per second.

    A row with w masks gains E(w) = 1 + sum over d <= w of p_1 ... p_d tokens per step. In the
    steady state it feeds E(w) + w positions: the tokens accepted by the last step and the masks. A
    row that checks drafts feeds those of the outcome that occurred, whether or not they are right.
    The highest steady-state rate over all windows, in tokens per second, is the price of a second.
    The positions of the coming step are known, so its masks are those that maximise

        gained tokens - upkeep - price x seconds of this step's positions

    where upkeep is the price of the tokens and drafts that they make the step after feed. Thus a
    step that has to feed many tokens, accepted in a lucky step before it, gets fewer masks if the
    step time would rise steeply.
    """

    def __init__(
        self,
        times: StepTimes,
        max_window: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start without evidence.

        Args:
            times: measured times of forward passes.
            max_window: most masks of a row, or of one of its outcomes.
            clock: returns seconds; times the choices.
        """
        self._times = times
        self._clock, self._choosing_s = clock, _CHOOSING_S
        self._max_window = max_window
        self._acceptance = AcceptanceStatistics(max_window)
        self._kept: dict[str, int] = {}  # last choice by request, for rows of one outcome
        self._usual = 0  # for rows that were not there at the last choice
        self.least_gain = float("inf")
        """Expected tokens that a position of a row that checks drafts must gain to be fed."""
        self._optimistic = DraftChances.of([PRIOR] * max_window)
        self._chances: dict[str, DraftChances] = {}  # by request, for rows that check drafts
        self._interval = self._num_kept = self._other_positions = 0

    def observe(self, request: Request, num_masks: int, num_accepted: int) -> None:
        """Record the outcome of a row's step.

        ``num_accepted`` (1 to ``num_masks`` + 1) counts the tokens that the acceptance rule gave,
        before an end token or ``max_tokens`` cut them short: tokens that were cut were not
        rejected.
        """
        self._acceptance.observe(request, num_masks, num_accepted)

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended; an unknown request is ignored."""
        self._acceptance.forget(request_id)

    def expire(self) -> None:
        """Make the next step choose anew, because the rows' limits have changed."""
        self._interval = 0

    def choose(
        self, rows: Sequence[Request], *, other_positions: int = 0, cached_tokens: int | None = None
    ) -> list[tuple[int, ...]]:
        """Return the masks of each outcome of each row in the next step; called once per step.

        A row in mode threshold has one outcome. A row that checks D drafts has D + 1. For the
        former, a number of masks is chosen and kept. For the latter, the least gain of a position
        is chosen and kept, because its drafts differ from step to step.

        A long step that reads a prompt does not make masks look free: they are charged the time
        that they add to it, at the price that a second has in steps without prompts.

        If steps are short, a choice is kept for several of them unless a long prompt arrives.

        Args:
            rows: The decoding rows. Rows that take no masks or pin their window get what they
                request, and count in the step's time. A row that still reads its prompt may be
                among them; it counts as if it decoded already.
            other_positions: Further positions of this step only, from chunks of prompts.
            cached_tokens: Cached tokens that the step reads; None for the cached tokens of
                ``rows``.
        """
        if not rows:
            return []
        self._num_kept += 1
        change = abs(other_positions - self._other_positions)
        is_other_step = change > max(_SHORT_PROMPT, len(rows) * self._max_window)
        is_other_step |= len(rows) < _FEWER_ROWS * len(self._kept)
        if self._num_kept > self._interval or is_other_step:
            if cached_tokens is None:
                cached_tokens = sum(request.num_cached for request in rows)
            begin_s = self._clock()
            step_s = self._renew(rows, other_positions, cached_tokens)
            self._keep_for(step_s, self._clock() - begin_s)
        return [self._masks(request) for request in rows]

    def _masks(self, request: Request) -> tuple[int, ...]:
        if _is_free_checking(request):
            chances = self._chances.get(request.id, self._optimistic)
            return chosen_masks(request, chances, self._max_window, self.least_gain)
        requested = self._requested(request)
        if not request.plan.leaves_masks:
            return requested
        return (min(self._kept.get(request.id, self._usual), requested[0]),)

    def _requested(self, request: Request) -> tuple[int, ...]:
        """Return the masks of a row if the engine does not choose them."""
        return request.plan.masks(self._max_window, request.num_left, len(request.drafts))

    def _keep_for(self, step_s: float, choosing_s: float) -> None:
        """Set for how many steps of ``step_s`` seconds a choice is kept that has just been made."""
        choosing_s = min(choosing_s, _MAX_CHOOSING * self._choosing_s)
        self._choosing_s += _CHOOSING_WEIGHT * (choosing_s - self._choosing_s)
        share = _CHOOSING_SHARE if any(self._kept.values()) else _IDLE_SHARE
        interval = round(self._choosing_s / (share * step_s))
        self._interval = min(max(1, interval), _MAX_INTERVAL)

    def _renew(self, rows: Sequence[Request], other_positions: int, cached_tokens: int) -> float:
        """Choose anew, and return the seconds that the step is expected to take."""
        self._acceptance.advance(self._num_kept - 1)
        longest = self._max_window + 1
        num_fed = sum(
            min(request.num_uncached, longest) + num_given_drafts(request) for request in rows
        )
        num_fed += other_positions
        windows = self._choose(rows, num_fed, cached_tokens)
        self._kept = {request.id: window for request, window in zip(rows, windows, strict=True)}
        self._usual = round(sum(windows) / len(windows))
        self._num_kept, self._other_positions = 1, other_positions
        return float(self._times.at(num_fed + sum(windows), cached_tokens))

    def _choose(self, rows: Sequence[Request], num_fed: int, cached_tokens: int) -> list[int]:
        """Choose each row's number of masks, and the least gain for rows that check drafts."""
        requested = [sum(self._requested(request)) for request in rows]
        is_free = np.array([request.plan.leaves_masks for request in rows])
        is_checking = np.array([request.plan.checks_drafts for request in rows])
        limits = np.where(is_checking, 0, requested)
        probabilities = self._acceptance.probabilities(rows)  # [rows, depths]
        self._chances = {
            request.id: DraftChances.of(probabilities[row].tolist())
            for row, request in enumerate(rows)
            if _is_free_checking(request)
        }
        ranked = _RankedMasks.of(
            gains=probabilities.cumprod(axis=1),  # p_1 ... p_d, falling with the depth d
            num_fixed=np.where(is_free, 0, limits),
            limits=np.where(is_free, limits, 0),
            of_outcomes={
                row: candidates_of(request, self._chances[request.id], self._max_window)
                for row, request in enumerate(rows)
                if request.id in self._chances
            },
        )
        num_pinned = int(np.where(is_checking & ~is_free, requested, 0).sum())
        num_fed += num_pinned
        has_masks = ranked.num_masks + num_pinned > 0
        num_chosen, price = self._best(ranked, num_fed, cached_tokens, has_masks)
        positions = num_fed + int(ranked.num_masks[num_chosen])
        position_cost = price * self._position_s(positions, cached_tokens)
        self.least_gain = ranked.least_gain(num_chosen, position_cost)
        return ranked.masks_of_rows(num_chosen)

    def _best(
        self, ranked: _RankedMasks, num_fed: int, cached_tokens: int, has_masks: _Bools
    ) -> tuple[int, float]:
        """Find how many of the ranked masks to feed, and the price of a second in tokens.

        ``num_fed`` are the positions that the step feeds besides the ranked masks. ``has_masks``
        says for each number of them whether the step feeds masks, bool [candidates + 1].
        """
        tokens, fed = ranked.tokens, ranked.fed
        feeds = np.stack(
            [
                fed,  # the steady state
                np.full_like(fed, fed[0]),  # the same without what masks make the next step feed
                np.full_like(fed, num_fed),  # this step
            ]
        )
        times = self._times.at(feeds + ranked.num_masks, cached_tokens, has_masks)
        steady, without_gain, now = times  # [candidates + 1] each
        price = float((tokens / steady).max())
        peak = (tokens - price * steady - ranked.margins).argmax()
        if peak == 0:
            return 0, price
        extra_s = max(0.0, steady[peak] - without_gain[peak])
        upkeep = price * extra_s / max(fed[peak] - fed[0], _LEAST_GAIN)
        scores = tokens - upkeep * fed - price * now - ranked.margins
        return int(scores.argmax()), price

    def _position_s(self, positions: int, cached_tokens: int) -> float:
        """Return the seconds that one further position adds to a step."""
        grid = np.array([positions, positions + _NEXT_FEW]) * 1.0
        near, far = self._times.at(grid, cached_tokens)
        return max(0.0, float(far - near)) / _NEXT_FEW


@dataclass(frozen=True)
class _RankedMasks:
    """Candidate masks of a step, most promising first.

    Index k of ``num_masks``, ``tokens``, ``fed`` and ``margins`` describes a step that feeds the
    first k candidates beside the fixed masks. All k are priced, because the step time need not rise
    with the number of positions.
    """

    num_fixed: _Ints  # fixed masks of each row [rows]
    rows: _Ints  # row of each candidate [candidates]
    num_masks: _Ints  # masks of the step, fixed ones included [candidates + 1]
    tokens: _Floats  # expected tokens of the step [candidates + 1]
    fed: _Floats  # positions that the next step feeds besides its masks [candidates + 1]
    returns: _Floats  # expected tokens of each candidate per position, falling [candidates]
    margins: _Floats  # tokens that the masks must gain beyond their cost [candidates + 1]

    @classmethod
    def of(
        cls,
        *,
        gains: _Floats,
        num_fixed: _Ints,
        limits: _Ints,
        of_outcomes: Mapping[int, list[list[Candidate]]],
    ) -> _RankedMasks:
        """Rank the candidate masks of all rows.

        ``gains``, [rows, depths], are a mask's expected tokens for its row. ``num_fixed`` masks are
        fed in any case, and ``limits`` are the most candidates, [rows] each. ``of_outcomes`` has
        the candidates of rows that check drafts, by outcome and depth.
        """
        num_rows, num_depths = gains.shape
        depths = np.arange(num_depths)
        rows, places = (depths < limits[:, None]).nonzero()  # row by row, depth rising
        values, is_first = gains[rows, places], places == 0
        further = values  # an accepted token is fed in the next step
        if of_outcomes:
            flat = [
                (row, *candidate)
                for row, outcomes in of_outcomes.items()
                for outcome in outcomes
                for candidate in outcome
            ]
            checking, gained, adding = np.array(flat).reshape(-1, 3).T
            rows = np.concatenate([rows, checking.astype(rows.dtype)])
            values, further = np.concatenate([values, gained]), np.concatenate([further, adding])
            is_first = np.concatenate([is_first, np.zeros(len(flat), dtype=bool)])
        returns = values / (1.0 + further)
        # Returns fall with the depth, and a stable sort keeps equal ones in order.
        order = np.argsort(-returns, kind="stable")
        tokens, fed, margins = np.zeros((3, len(order) + 1))
        tokens[0] = fed[0] = num_rows + gains[depths < num_fixed[:, None]].sum()
        tokens[1:], fed[1:] = values[order], further[order]
        margins[1:] = _MARGIN * is_first[order]  # one margin for each row that takes masks
        total_fixed = int(num_fixed.sum())
        return cls(
            num_fixed=num_fixed,
            rows=rows[order],
            num_masks=np.arange(total_fixed, total_fixed + len(tokens)),
            tokens=tokens.cumsum(),
            fed=fed.cumsum(),
            returns=returns[order],
            margins=margins.cumsum(),
        )

    def masks_of_rows(self, num_chosen: int) -> list[int]:
        """Return each row's masks if the first ``num_chosen`` candidates are fed."""
        chosen = np.bincount(self.rows[:num_chosen], minlength=len(self.num_fixed))
        return [int(num_masks) for num_masks in self.num_fixed + chosen]

    def least_gain(self, num_chosen: int, position_cost: float) -> float:
        """Return the tokens that a position must gain in the steps until the next choice.

        It is ``position_cost``, in tokens, limited to values that would give the same choice: at
        most the return of the last chosen candidate and above that of the first rejected one.
        """
        returns = self.returns
        high = float(returns[num_chosen - 1]) if num_chosen else float("inf")
        low = float(np.nextafter(returns[num_chosen], 2.0)) if num_chosen < len(returns) else 0.0
        return max(min(max(position_cost, low), high), _LEAST_GAIN)


def _is_free_checking(request: Request) -> bool:
    return request.plan.checks_drafts and request.plan.leaves_masks
