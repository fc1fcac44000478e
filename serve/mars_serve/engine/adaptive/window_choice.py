"""Chooses how many masks each row feeds into the next step.

Masks are chosen from measured step times and observed acceptance, such that the engine generates as
many tokens per second as possible; where masks do not pay, none are fed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mars_autoscale.model.step_times import StepTimes
from mars_serve.engine.adaptive.acceptance_statistics import AcceptanceStatistics
from mars_serve.engine.adaptive.draft_groups import (
    Candidate,
    Chances,
    candidates_of,
    chosen_masks,
    num_given_drafts,
)
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import ScheduledRow

_Floats = NDArray[np.float64]

_CHOOSING_SHARE = 0.0025
"""Largest share of a step's time spent on choosing; a choice is kept for several short steps."""
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
_FAR_OFF = 1.5
"""Factor by which the time of a step may fall short of what was measured. A larger one shows that
other programs held up the measurement; by less, the speed of machines drifts."""
_FEWER_ROWS = 0.75
"""Share of the rows at the last choice, or of those that came since, below which it is no longer
right."""
_MOST_TRIES = 16
"""Most steps for which no masks are chosen, so that the time of one without masks can be noted:
prompts may leave none."""


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
        self._times = self._measured = times
        self._clock, self._choosing_s = clock, _CHOOSING_S
        self._max_window = max_window
        self._acceptance = AcceptanceStatistics(max_window)
        self.least_gain = float("inf")
        """Expected tokens that a position must gain to be fed."""
        self._chances: dict[str, Chances] = {}  # by request, at the last choice
        (self._usual,) = self._chances_of(self._acceptance.prior[None])
        """Chances of rows that were not there at the last choice."""
        self._interval = self._num_kept = self._other_positions = self._num_rows = 0
        self._feeds_masks = False  # by the last choice
        self._tries_none = False  # until a step without masks is noted
        self._num_tries = 0  # steps since then
        self._seen_s = dict[int, float]()  # by positions, once the measured times are dropped
        self._choice_s = 0.0  # seconds of choosing a sampled token, in the last steps
        self._sampling_s = 0.0  # the same for a position of any row

    def observe(self, request: Request, num_masks: int, num_accepted: int) -> None:
        """Record the outcome of a row's step.

        ``num_accepted`` (1 to ``num_masks`` + 1) counts the tokens that the acceptance rule gave,
        before an end token or ``max_tokens`` cut them short: tokens that were cut were not
        rejected.
        """
        self._acceptance.observe(request, num_masks, num_accepted)

    def note_step(self, rows: Sequence[ScheduledRow], seconds: float) -> None:
        """Drop the measured times if a step with masks took ``seconds`` and should have taken far
        longer.

        From then on, times are those of steps that proved the times before them wrong, beginning
        with that step and one without masks. Where no such step comes soon, the measured times hold
        again.
        """
        seconds = max(seconds, 1e-6)
        positions = sum(row.num_positions for row in rows)
        cached_tokens = sum(row.request.num_cached for row in rows)
        has_masks = any(row.num_masks for row in rows)
        factor = self._times.at(positions, cached_tokens, has_masks) / seconds
        is_wrong = factor >= _FAR_OFF or (self._seen_s and factor <= 1 / _FAR_OFF)
        is_wanted = self._tries_none and not has_masks
        is_new = is_wanted or (is_wrong and (has_masks or self._seen_s))
        if is_new and all(
            row.reads_logits and row.num_tokens <= self._max_window + 1 for row in rows
        ):
            self._see(positions, seconds)
            self._tries_none = has_masks
        self._num_tries = self._num_tries + 1 if self._tries_none else 0
        if self._num_tries > _MOST_TRIES:
            if len(self._seen_s) == 1:  # by one time, masks would be free
                self._times, self._seen_s = self._measured, {}
            self._tries_none, self._num_tries = False, 0
            self.expire()

    def _see(self, positions: int, seconds: float) -> None:
        """Replace the measured times by those that were seen, of which this is one."""
        for size, before_s in self._seen_s.items():
            # Wider steps take no less time.
            ends = (0.0, seconds) if size < positions else (seconds, np.inf)
            self._seen_s[size] = float(np.clip(before_s, *ends))
        self._seen_s[positions] = seconds
        sizes = sorted(self._seen_s)
        table = tuple((self._seen_s[size],) for size in sizes)
        self._times = StepTimes(tuple(sizes), (0,), table)
        self.expire()

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

        A row in mode threshold has one outcome. A row that checks D drafts has D + 1. What is
        chosen and kept is the least gain of a position, because drafts differ from step to step.

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
        fewer, more = sorted([len(rows), self._num_rows])
        is_other_step |= fewer < _FEWER_ROWS * more
        # Before any token was chosen, positions of sampled rows looked too cheap.
        is_other_step |= not self._choice_s and any(request.num_choices for request in rows)
        if self._num_kept > self._interval or is_other_step:
            if cached_tokens is None:
                cached_tokens = sum(request.num_cached for request in rows)
            begin_s = self._clock()
            step_s = self._renew(rows, other_positions, cached_tokens)
            self._keep_for(step_s, self._clock() - begin_s)
        if self._tries_none:
            return [(0,) if each.plan.leaves_masks else self._masks(each) for each in rows]
        return [self._masks(request) for request in rows]

    def _masks(self, request: Request) -> tuple[int, ...]:
        plan = request.plan
        if not plan.leaves_masks:
            return plan.masks(self._max_window, request.num_left, len(request.drafts))
        if not (self._feeds_masks or request.drafts):
            return (0,)  # as all rows got by the last choice
        chances = self._chances.get(request.id, self._usual)
        return chosen_masks(request, chances, self._max_window, self.least_gain)

    def _keep_for(self, step_s: float, choosing_s: float) -> None:
        """Set for how many steps of ``step_s`` seconds a choice is kept that has just been made."""
        choosing_s = min(choosing_s, _MAX_CHOOSING * self._choosing_s)
        self._choosing_s += _CHOOSING_WEIGHT * (choosing_s - self._choosing_s)
        interval = round(self._choosing_s / (_CHOOSING_SHARE * step_s))
        self._interval = min(max(1, interval), _MAX_INTERVAL)

    def _renew(self, rows: Sequence[Request], other_positions: int, cached_tokens: int) -> float:
        """Choose anew, and return the seconds that the step is expected to take."""
        self._acceptance.advance(self._num_kept - 1)
        self._num_kept, self._other_positions, self._num_rows = 1, other_positions, len(rows)
        if num_choices := sum(each.num_choices for each in rows):
            self._choice_s = sum(each.sampling_s for each in rows) / num_choices
        num_sampled = sum(not each.options.is_plain for each in rows)
        self._sampling_s = self._choice_s * num_sampled / len(rows)
        free = [request for request in rows if request.plan.leaves_masks]
        num_pinned = sum(sum(self._masks(row)) for row in rows if not row.plan.leaves_masks)
        longest = self._max_window + 1
        num_fed = other_positions + sum(
            min(request.num_uncached, longest) + num_given_drafts(request) for request in rows
        )
        ranked = _Ranked.of(self._candidates(free), len(rows))
        num_chosen, price = self._best(ranked, num_fed, num_pinned, cached_tokens)
        positions = num_fed + num_pinned + num_chosen
        self._feeds_masks = num_pinned + num_chosen > 0
        self.least_gain = ranked.least_gain(
            num_chosen, price * self._position_s(positions, cached_tokens)
        )
        return float(self._times.at(positions, cached_tokens))

    def _candidates(self, free: Sequence[Request]) -> list[Candidate]:
        """Note the chances of rows whose masks are chosen, and return all their candidates."""
        self._chances = {}
        if not free:
            return []
        probabilities = self._acceptance.probabilities(free)
        usual = probabilities.mean(axis=0)
        *chances, self._usual = self._chances_of(np.vstack([probabilities, usual]))
        self._chances = {request.id: own for request, own in zip(free, chances, strict=True)}
        return [
            candidate
            for request, own in zip(free, chances, strict=True)
            for candidate in candidates_of(request, own, self._max_window)
        ]

    def _chances_of(self, probabilities: _Floats) -> list[Chances]:
        """Build chances from what `AcceptanceStatistics.probabilities` returns."""
        masks, drafts = np.split(probabilities, [self._max_window], axis=1)
        return list(map(Chances, masks.cumprod(axis=1).tolist(), drafts.tolist()))

    def _best(
        self, ranked: _Ranked, num_fed: int, num_pinned: int, cached_tokens: int
    ) -> tuple[int, float]:
        """Find how many of the ranked candidates to feed, and the price of a second in tokens.

        ``num_fed`` are the positions that the step feeds besides them and ``num_pinned`` masks.
        """
        tokens, fed = ranked.tokens, ranked.fed
        num_masks = num_pinned + np.arange(len(tokens))
        feeds = np.stack(
            [
                fed,  # the steady state
                np.full_like(fed, fed[0]),  # the same without what masks make the next step feed
                np.full_like(fed, num_fed),  # this step
            ]
        )
        times = self._times.at(feeds + num_masks, cached_tokens, num_masks > 0)
        times += self._sampling_s * (feeds + num_masks)
        steady, without_gain, now = times  # [candidates + 1] each
        price = float((tokens / steady).max())
        peak = (tokens - price * steady).argmax()
        if peak == 0:
            return 0, price
        extra_s = max(0.0, steady[peak] - without_gain[peak])
        upkeep = price * extra_s / max(fed[peak] - fed[0], _LEAST_GAIN)
        return int((tokens - upkeep * fed - price * now).argmax()), price

    def _position_s(self, positions: int, cached_tokens: int) -> float:
        """Return the seconds that one further position adds to a step."""
        grid = np.array([positions, positions + _NEXT_FEW]) * 1.0
        near, far = self._times.at(grid, cached_tokens)
        return max(0.0, float(far - near)) / _NEXT_FEW + self._sampling_s


class _Ranked(NamedTuple):
    """Candidates of a step, most promising first.

    Index k of ``tokens`` and ``fed`` describes a step that feeds the first k of them. All k are
    priced, because the step time need not rise with the number of positions.
    """

    tokens: _Floats  # expected tokens of the step [candidates + 1]
    fed: _Floats  # positions that the next step feeds besides its masks [candidates + 1]
    returns: _Floats  # expected tokens of each candidate per position, falling [candidates]

    @classmethod
    def of(cls, candidates: Sequence[Candidate], num_rows: int) -> _Ranked:
        """Rank candidates of all of a step's rows."""
        gains, further = np.array(candidates).reshape(-1, 2).T
        returns = gains / (1.0 + further)
        order = np.argsort(-returns)
        tokens, fed = (np.cumsum([num_rows, *each[order]]) for each in (gains, further))
        return cls(tokens, fed, returns[order])

    def least_gain(self, num_chosen: int, position_cost: float) -> float:
        """Return the tokens that a position must gain in the steps until the next choice.

        It is ``position_cost``, in tokens, limited to values that would give the same choice: at
        most the return of the last chosen candidate and above that of the first rejected one.
        """
        returns = self.returns
        high = float(returns[num_chosen - 1]) if num_chosen else float("inf")
        low = float(np.nextafter(returns[num_chosen], 2.0)) if num_chosen < len(returns) else 0.0
        return max(min(max(position_cost, low), high), _LEAST_GAIN)
