"""Chooses how many masks each row feeds into the next step.

Masks are chosen from measured step times and observed acceptance, such that the engine generates as
many tokens per second as possible; where masks do not pay, none are fed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mars_serve.engine.adaptive.acceptance_statistics import PRIOR, AcceptanceStatistics
from mars_serve.engine.adaptive.draft_groups import (
    DraftChances,
    chosen_masks,
    num_given_drafts,
    position_gains,
)
from mars_serve.engine.adaptive.step_times import StepTimes
from mars_serve.engine.request import Request

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]

_CHOOSING_S, _CHOOSING_ROW_S = 200e-6, 3e-6
"""Seconds that one choice takes, and further seconds for each row, with cold caches."""
_CHOOSING_SHARE = 0.02
"""Largest share of a step's time spent on choosing; a choice is kept for several short steps."""
_MAX_INTERVAL = 16
"""Most steps for which a choice is kept."""
_OVERHEAD_WEIGHT = 0.1
"""Weight of the newest steps in the running mean of the measured overhead."""
_MAX_OVERHEAD = 2.0
"""Largest overhead of a step, as a multiple of its time in the table; more counts as a pause."""
_NEXT_FEW = 8
"""Number of positions over which the cost of one further position is averaged."""
_LEAST_GAIN = 0.01
"""Expected tokens below which a mask is not worth its bookkeeping."""
_SHORT_PROMPT = 32
"""Change of the prompt positions in a step up to which a choice is kept: choosing anew would cost
more than it gains. The limit is at least the number of masks of all rows."""
_MARGIN = 0.03
"""Tokens per step that a row's masks must be expected to gain beyond their cost."""


class WindowChooser:
    """Chooses each row's number of masks to maximise tokens per second.

    A row with w masks gains E(w) = 1 + sum over d <= w of p_1 ... p_d tokens per step. In the
    steady state it feeds E(w) + w positions: the tokens accepted by the last step and the masks.
    The highest steady-state rate over all windows, in tokens per second, is the price of a second.
    The positions of the coming step are known, so its masks are those that maximise

        gained tokens x (1 - upkeep) - price x seconds of this step's positions

    where upkeep is the price of feeding one accepted token in the step after. Thus a step that has
    to feed many tokens, accepted in a lucky step before it, gets fewer masks if the step time would
    rise steeply.
    """

    def __init__(self, times: StepTimes, max_window: int) -> None:
        self._times = times
        self._max_window = max_window
        self._acceptance = AcceptanceStatistics(max_window)
        self._kept: dict[str, int] = {}  # last choice by request, for rows of one outcome
        self._usual = 0  # for rows that were not there at the last choice
        self.least_gain = float("inf")
        """Expected tokens that a position of a row that checks drafts must gain to be fed."""
        self._optimistic = DraftChances.of([PRIOR] * max_window)
        self._chances: dict[str, DraftChances] = {}  # by request, for rows that check drafts
        self._interval = self._num_kept = self._other_positions = 0
        self._overhead_s = 0.0
        # sums since the last choice: steps, positions, cached tokens, seconds
        self._seen = np.zeros(4)

    def observe(self, request: Request, num_masks: int, num_accepted: int) -> None:
        """Record the outcome of a row's step.

        ``num_accepted`` (1 to ``num_masks`` + 1) counts the tokens that the acceptance rule gave,
        before an end token or ``max_tokens`` cut them short: tokens that were cut were not
        rejected.
        """
        self._acceptance.observe(request, num_masks, num_accepted)

    def observe_step(self, positions: int, cached_tokens: int, seconds: float) -> None:
        """Record the duration of a whole step, from the end of the step before.

        The table holds the time of the forward pass alone, on an otherwise idle machine. The
        overhead beyond it does not depend on the step's size, and makes larger steps pay more.
        """
        if positions <= self._times.positions[-1]:
            self._seen += (1, positions, cached_tokens, seconds)

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
        if self._num_kept > self._interval or is_other_step:
            if cached_tokens is None:
                cached_tokens = sum(request.num_cached for request in rows)
            self._renew(rows, other_positions, cached_tokens)
        return [self._masks(request) for request in rows]

    def _masks(self, request: Request) -> tuple[int, ...]:
        if _is_free_checking(request):
            chances = self._chances.get(request.id, self._optimistic)
            return chosen_masks(request, chances, self._max_window, self.least_gain)
        requested = request.masks(self._max_window)
        if not request.leaves_masks:
            return requested
        return (min(self._kept.get(request.id, self._usual), requested[0]),)

    def _renew(self, rows: Sequence[Request], other_positions: int, cached_tokens: int) -> None:
        """Choose anew, and set for how many steps the choice is kept."""
        self._acceptance.advance(self._num_kept - 1)
        self._learn_overhead()
        longest = self._max_window + 1
        num_fed = sum(
            min(request.num_uncached, longest) + num_given_drafts(request) for request in rows
        )
        num_fed += other_positions
        windows = self._choose(rows, num_fed, cached_tokens)
        self._kept = {request.id: window for request, window in zip(rows, windows, strict=True)}
        self._usual = round(sum(windows) / len(windows))
        step_s = float(self._times.at(num_fed + sum(windows), cached_tokens)) + self._overhead_s
        choosing_s = _CHOOSING_S + _CHOOSING_ROW_S * len(rows)
        self._interval = min(max(1, round(choosing_s / (_CHOOSING_SHARE * step_s))), _MAX_INTERVAL)
        self._num_kept, self._other_positions = 1, other_positions

    def _learn_overhead(self) -> None:
        num_steps, *totals = self._seen
        if num_steps:
            positions, cached_tokens, seconds = (total / num_steps for total in totals)
            expected = float(self._times.at(positions, cached_tokens))
            overhead = min(max(seconds - expected, 0.0), _MAX_OVERHEAD * expected)
            self._overhead_s += _OVERHEAD_WEIGHT * (overhead - self._overhead_s)
            self._seen[:] = 0

    def _choose(self, rows: Sequence[Request], num_fed: int, cached_tokens: int) -> list[int]:
        """Choose each row's number of masks, and the least gain for rows that check drafts."""
        requested = [sum(request.masks(self._max_window)) for request in rows]
        is_free = np.array([request.leaves_masks for request in rows])
        is_checking = np.array([request.checks_drafts for request in rows])
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
            outcome_gains={
                row: position_gains(request, self._chances[request.id], self._max_window)
                for row, request in enumerate(rows)
                if request.id in self._chances
            },
        )
        num_fed += int(np.where(is_checking & ~is_free, requested, 0).sum())
        num_chosen, price = self._best(ranked, num_fed, cached_tokens)
        positions = num_fed + int(ranked.num_masks[num_chosen])
        position_cost = price * self._position_s(positions, cached_tokens)
        self.least_gain = ranked.least_gain(num_chosen, position_cost)
        return ranked.masks_of_rows(num_chosen)

    def _best(self, ranked: _RankedMasks, num_fed: int, cached_tokens: int) -> tuple[int, float]:
        """Find how many of the ranked masks to feed, and the price of a second in tokens.

        ``num_fed`` are the positions that the step feeds besides the ranked masks.
        """
        tokens = ranked.tokens
        feeds = np.stack(
            [
                tokens,  # the steady state: every accepted token is fed in the step after
                np.full_like(tokens, tokens[0]),  # the same without the tokens gained by masks
                np.full_like(tokens, num_fed),  # this step
            ]
        )
        times = self._times.at(feeds + ranked.num_masks, cached_tokens) + self._overhead_s
        steady, without_gain, now = times  # [candidates + 1] each
        price = float((tokens / steady).max())
        peak = (tokens - price * steady - ranked.margins).argmax()
        if peak == 0:
            return 0, price
        extra_s = max(0.0, steady[peak] - without_gain[peak])
        upkeep = price * extra_s / (tokens[peak] - tokens[0])
        scores = tokens * (1 - upkeep) - price * now - ranked.margins
        return int(scores.argmax()), price

    def _position_s(self, positions: int, cached_tokens: int) -> float:
        """Return the seconds that one further position adds to a step."""
        grid = np.array([positions, positions + _NEXT_FEW]) * 1.0
        near, far = self._times.at(grid, cached_tokens)
        return max(0.0, float(far - near)) / _NEXT_FEW


@dataclass(frozen=True)
class _RankedMasks:
    """Candidate masks of a step, most promising first.

    Index k of ``num_masks``, ``tokens`` and ``margins`` describes a step that feeds the first k
    candidates beside the fixed masks. All k are priced, because the step time need not rise with
    the number of positions.
    """

    num_fixed: _Ints  # fixed masks of each row [rows]
    rows: _Ints  # row of each candidate [candidates]
    num_masks: _Ints  # masks of the step, fixed ones included [candidates + 1]
    tokens: _Floats  # expected tokens of the step [candidates + 1]
    margins: _Floats  # tokens that the masks must gain beyond their cost [candidates + 1]

    @classmethod
    def of(
        cls,
        *,
        gains: _Floats,
        num_fixed: _Ints,
        limits: _Ints,
        outcome_gains: Mapping[int, list[list[float]]],
    ) -> _RankedMasks:
        """Rank the candidate masks of all rows.

        Args:
            gains: expected tokens of a mask for its row, ``[rows, depths]``.
            num_fixed: masks that are fed in any case, ``[rows]``.
            limits: most candidates of each row, ``[rows]``.
            outcome_gains: for rows that check drafts, the candidates' gains by outcome and depth.
        """
        num_rows, num_depths = gains.shape
        depths = np.arange(num_depths)
        rows, places = (depths < limits[:, None]).nonzero()  # row by row, depth rising
        values, is_first = gains[rows, places], places == 0
        if outcome_gains:
            flat = [
                (row, gain)
                for row, outcomes in outcome_gains.items()
                for outcome in outcomes
                for gain in outcome
            ]
            values = np.concatenate([values, [gain for _, gain in flat]])
            rows = np.concatenate([rows, np.array([row for row, _ in flat], dtype=rows.dtype)])
            is_first = np.concatenate([is_first, np.zeros(len(flat), dtype=bool)])
        # The gain per position, g / (g + 1), rises with g. A stable sort keeps depths in order.
        order = np.argsort(-values, kind="stable")
        tokens, margins = np.zeros((2, len(order) + 1))
        tokens[0] = num_rows + gains[depths < num_fixed[:, None]].sum()
        tokens[1:] = values[order]
        margins[1:] = _MARGIN * is_first[order]  # one margin for each row that takes masks
        total_fixed = int(num_fixed.sum())
        return cls(
            num_fixed=num_fixed,
            rows=rows[order],
            num_masks=np.arange(total_fixed, total_fixed + len(tokens)),
            tokens=tokens.cumsum(),
            margins=margins.cumsum(),
        )

    def masks_of_rows(self, num_chosen: int) -> list[int]:
        """Return each row's masks if the first ``num_chosen`` candidates are fed."""
        chosen = np.bincount(self.rows[:num_chosen], minlength=len(self.num_fixed))
        return [int(num_masks) for num_masks in self.num_fixed + chosen]

    def least_gain(self, num_chosen: int, position_cost: float) -> float:
        """Return the tokens that a position must gain in the steps until the next choice.

        It is ``position_cost``, in tokens, limited to values that would give the same choice: at
        most the gain of the last chosen candidate and above that of the first rejected one.
        """
        gains = np.diff(self.tokens)
        high = float(gains[num_chosen - 1]) if num_chosen else float("inf")
        low = float(np.nextafter(gains[num_chosen], 2.0)) if num_chosen < len(gains) else 0.0
        return max(min(max(position_cost, low), high), _LEAST_GAIN)


def _is_free_checking(request: Request) -> bool:
    return request.checks_drafts and request.leaves_masks
