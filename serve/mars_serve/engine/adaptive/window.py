"""Chooses how many masks each row feeds into the next step, so that masks never cost speed.

Knows what a step of a given size takes (measured by others at warm-up) and what was accepted so
far. Knows no tensor, no model and no scheduler.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

from mars_platform.method.mode import Mode
from mars_serve.engine.adaptive.draft_groups import DraftChances, chosen_masks, mask_gains
from mars_serve.engine.request import Request

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_FAR = 1e9
"""A grid coordinate that no step reaches."""
_PRIOR = 0.9
"""Assumed acceptance of a depth without evidence: optimistic, so that it is tried."""
_PRIOR_WEIGHT = 4.0
"""Observations that the prior counts for against those of the engine."""
_ENGINE_WEIGHT = 8.0
"""Observations that the engine's estimate counts for against those of a row."""
_CHOOSING_S, _CHOOSING_ROW_S = 200e-6, 3e-6
"""What choosing takes, and for each row, while a model's step drives it out of the caches."""
_CHOOSING_SHARE = 0.02
"""Share of a step's time that may go into it; else a choice is kept for several steps."""
_MAX_INTERVAL = 16
_OVERHEAD_WEIGHT = 0.1
"""Of the latest steps in what a step is taken to need beyond the table."""
_MAX_OVERHEAD = 2.0
"""Times the table's own figure; more than that is a pause, not a step."""
_ROW_HALF_LIFE = 20.0  # observations
_ROW_IDLE_HALF_LIFE = 200.0  # steps
_ENGINE_HALF_LIFE = 500.0  # observations
_ENGINE_IDLE_HALF_LIFE = 500.0  # steps
_NEXT_FEW = 8
"""Positions over which the cost of a further one is taken."""
_LEAST_GAIN = 0.01
"""Tokens below which no mask is worth its place in the step's bookkeeping."""
_SHORT_PROMPT = 32
"""Positions of prompts that are no reason to choose anew, which costs more than they matter; nor
are as many as the rows' masks."""
_MARGIN = 0.03
"""Tokens a step that a row's masks must be predicted to bring beyond their cost."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds that a step takes, by its positions and by the stored tokens that it reads.

    Nothing is smoothed: a step of eight positions may well be faster than one of three.
    """

    positions: tuple[int, ...]
    """Grid of positions in a step, rising."""
    stored: tuple[int, ...]
    """Grid of stored tokens read, over all rows, rising."""
    seconds: tuple[tuple[float, ...], ...]
    """Seconds at each point of the grid, ``seconds[positions][stored]``."""

    def __post_init__(self) -> None:
        for grid in (self.positions, self.stored):
            assert grid, "a grid has at least one point"
            assert all(a < b for a, b in pairwise(grid)), "a grid rises"
        assert len(self.seconds) == len(self.positions), "one line per number of positions"
        for line in self.seconds:
            assert len(line) == len(self.stored), "one time per number of stored tokens"
            assert all(0 < value < float("inf") for value in line), "times are positive and finite"

    @overload
    def at(self, positions: float, stored: float) -> float: ...
    @overload
    def at(self, positions: Floats, stored: float) -> Floats: ...
    def at(self, positions: Floats | float, stored: float) -> Floats | float:
        """Seconds of steps of ``positions`` positions (any shape) that read ``stored`` tokens.

        Between grid points the time is interpolated linearly; before the first it is the first
        point's; past the last it goes on along the last piece, or stays where that one falls.
        """
        grid = self._stored
        upper = min(max(bisect_right(grid, stored), 1), len(grid) - 1)
        low, high = grid[upper - 1], grid[upper]
        part = max(0.0, (stored - low) / (high - low))
        line = self._seconds[upper - 1] * (1 - part) + self._seconds[upper] * part  # [positions]
        seconds: Floats = np.interp(positions, self._positions, line)
        return seconds

    @cached_property
    def _positions(self) -> Floats:
        return np.array([*self.positions, _FAR])

    @cached_property
    def _stored(self) -> list[float]:
        return [*self.stored, _FAR]

    @cached_property
    def _seconds(self) -> Floats:
        """Times with a far point added to both grids, ``[stored + 1, positions + 1]``."""
        table = _extended(np.array(self.seconds), self.positions)
        return _extended(table.T, self.stored)


def _extended(table: Floats, grid: tuple[int, ...]) -> Floats:
    """``table`` ``[grid, other]`` with a last row at `_FAR`, along a slope that never falls."""
    slope = np.zeros(table.shape[1])
    if len(grid) > 1:
        slope = np.maximum(0.0, table[-1] - table[-2]) / (grid[-1] - grid[-2])
    return np.vstack([table, table[-1] + slope * (_FAR - grid[-1])])


class _Counts:
    """Decayed counts of observed and accepted depths, a slot for each key."""

    def __init__(self, num_depths: int, *, half_life: float, idle_half_life: float) -> None:
        """``half_life`` in observations of a depth, ``idle_half_life`` in steps."""
        self._decay = -1.0 / half_life
        self._idle_factor = 0.5 ** (1.0 / idle_half_life)
        self._counts = np.zeros((8, 2, num_depths))  # [slots, accepted and observed, depths]
        self._free = list(range(8))
        self._slots: dict[Hashable, int] = {}

    def slot(self, key: Hashable) -> int:
        """The key's slot; a new one is empty."""
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = self._take()
        return slot

    def forget(self, key: Hashable) -> None:
        """Empty and free the key's slot; an unknown key is no error."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._counts[slot] = 0.0
            self._free.append(slot)

    def fade(self, num_steps: int) -> None:
        """Let steps pass: all evidence grows older."""
        self._counts *= self._idle_factor**num_steps

    def add(self, slots: Ints, new: Floats) -> None:
        """Add ``new`` ``[len(slots), 2, depths]``; only depths observed push old evidence out."""
        total = np.zeros_like(self._counts)
        np.add.at(total, slots, new)
        self._counts *= np.exp2(total[:, 1:] * self._decay)
        self._counts += total

    def estimate(self, slots: Sequence[int], prior: Floats | float, weight: float) -> Floats:
        """Acceptance by depth ``[len(slots), depths]``, where the prior counts ``weight``."""
        counts = self._counts[slots]
        return np.asarray((counts[:, 0] + weight * prior) / (counts[:, 1] + weight))

    def _take(self) -> int:
        if not self._free:
            size = len(self._counts)
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._free = list(range(size, 2 * size))
        return self._free.pop()


class Acceptance:
    """Running estimate, by row and depth, of the chance that a depth is accepted.

    Entry d-1 is P(depth d accepted | it was proposed and all depths before it were accepted).
    Evidence of a row decays with a half-life of 20 observations and is shrunk towards that of all
    rows with its confidence measure and τ (to 0.05), which is itself shrunk towards an optimistic
    prior. With every step all evidence also fades, so that masks given up are tried again.

    What trying costs, simulated with one row whose masks are all refused, at the most over many
    costs of a mask: about six steps' time at the start, then 0.7 % of the time with 8 masks and
    0.6 % with 4. Rows share what is tried: with 32 of them it is a tenth of that.
    """

    def __init__(self, max_window: int) -> None:
        self._depths = np.arange(1, max_window + 1)
        self._rows = _Counts(
            max_window, half_life=_ROW_HALF_LIFE, idle_half_life=_ROW_IDLE_HALF_LIFE
        )
        self._engine = _Counts(
            max_window, half_life=_ENGINE_HALF_LIFE, idle_half_life=_ENGINE_IDLE_HALF_LIFE
        )
        self._pending: list[tuple[int, int, int, int]] = []

    def advance(self, num_steps: int) -> None:
        """Let steps pass."""
        self._flush()
        self._rows.fade(num_steps)
        self._engine.fade(num_steps)

    def observe(self, request: Request, num_masks: int, num_accepted: int) -> None:
        """Note that ``num_accepted`` tokens, 1 to ``num_masks`` + 1, were accepted in a step.

        Depths below ``num_accepted`` were accepted and that depth, where it was proposed, refused;
        of deeper ones nothing is known.
        """
        assert 1 <= num_accepted <= num_masks + 1 <= len(self._depths) + 1
        if num_masks == 0:
            return
        self._pending.append((*self._slots(request), num_masks, num_accepted))

    def forget(self, request_id: str) -> None:
        """Drop a row's state; what it taught the engine stays."""
        self._flush()
        self._rows.forget(request_id)

    def probabilities(self, rows: Sequence[Request]) -> Floats:
        """Estimates of depths 1 to the largest window, strictly between 0 and 1.

        Returns:
            ``[len(rows), max_window]``.
        """
        self._flush()
        slots = [self._slots(request) for request in rows]
        prior = self._engine.estimate([engine for _, engine in slots], _PRIOR, _PRIOR_WEIGHT)
        return self._rows.estimate([row for row, _ in slots], prior, _ENGINE_WEIGHT)

    def _slots(self, request: Request) -> tuple[int, int]:
        return self._rows.slot(request.id), self._engine.slot(_kind(request))

    def _flush(self) -> None:
        """Enter what was observed since the last time: all at once is cheaper than row by row."""
        if not self._pending:
            return
        rows, engine, num_masks, num_accepted = np.array(self._pending).T
        self._pending.clear()
        accepted = self._depths < num_accepted[:, None]  # [rows, depths]
        observed = self._depths <= np.minimum(num_accepted, num_masks)[:, None]
        new = np.stack([accepted, observed], axis=1).astype(np.float64)
        self._rows.add(rows, new)
        self._engine.add(engine, new)


def _kind(request: Request) -> tuple[str, int]:
    """Requests of a kind are taken to be accepted alike until more is known of them."""
    if request.mode is Mode.EXACT:
        temperature = round(request.options.sampling.temperature * 5)
        return f"{request.mode} {request.options.grammar is not None}", temperature
    return request.options.confidence, round(request.threshold * 20)


class WindowChooser:
    """Number of masks of each row that gives the most tokens a second, none where none pay.

    A row with w masks gains E(w) = 1 + sum over d <= w of p_1 ... p_d tokens a step and, in the
    steady state, feeds E(w) + w positions: the tokens accepted last time and the masks. The best
    steady state's rate, in tokens a second, is the price of a second. This step's positions are
    known better than that, so that its masks are those of the highest

        gained tokens x (1 - upkeep) - price x seconds of this step's positions

    where upkeep is what feeding an accepted token costs, in tokens, in the step after. After a
    lucky step, which leaves many tokens to feed, fewer masks go in than would pass a steep rise
    of the step's time.
    """

    def __init__(self, times: StepTimes, max_window: int) -> None:
        assert max_window >= 1, "without masks there is nothing to choose"
        self._times = times
        self._max_window = max_window
        self._acceptance = Acceptance(max_window)
        self._kept: dict[str, int] = {}
        self._usual = 0  # for rows that came since
        self._least_gain = float("inf")  # tokens that a position must bring
        self._optimistic = DraftChances.of([_PRIOR] * max_window)
        self._chances: dict[str, DraftChances] = {}  # of rows that check drafts
        self._interval = self._num_kept = self._other_positions = 0
        self._overhead_s = 0.0
        self._seen = np.zeros(4)  # since the last choice: steps, positions, stored tokens, seconds

    def observe(self, request: Request, num_masks: int, num_accepted: int) -> None:
        """Note a step's outcome.

        ``num_accepted`` (1 to ``num_masks`` + 1) is what the acceptance rule gave, before an end
        token or ``max_tokens`` cut it: a cut is no refusal.
        """
        self._acceptance.observe(request, num_masks, num_accepted)

    def observe_step(self, positions: int, stored: int, seconds: float) -> None:
        """Note what a whole step took, from the end of the one before.

        The table holds the forward alone, on a machine with nothing else to do. What comes on top
        is the same for every step, and makes it worth more tokens.
        """
        if positions <= self._times.positions[-1]:
            self._seen += (1, positions, stored, seconds)

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended; an unknown one is no error."""
        self._acceptance.forget(request_id)

    def expire(self) -> None:
        """Choose anew in the next step: what rows may take has changed."""
        self._interval = 0

    def choose(
        self, rows: Sequence[Request], *, other_positions: int = 0, stored: int | None = None
    ) -> list[tuple[int, ...]]:
        """Masks of each outcome of each row in the next step; called once a step.

        In mode threshold there is one outcome to each. In mode exact there is one more than drafts
        to check, and what is chosen for the others as a number of masks is for those rows the least
        that a position must bring: their drafts differ from step to step.

        Args:
            rows: The decoding rows. Those that take no masks or pin their window get what they
                ask for, and count: masks of the others slow them down. A row that still reads
                its prompt may be among them; it counts as if it decoded already.
            other_positions: Further positions of this step only: chunks of prompts.
            stored: Stored tokens that the step reads; None: those of ``rows``.

        A long step in which a prompt is read does not make masks look free: they are charged the
        time that they add to it, at the price that a second has in steps without it.

        Where steps are short, a choice is kept for some of them unless a long prompt comes; see
        `_renew`.
        """
        if not rows:
            return []
        self._num_kept += 1
        change = abs(other_positions - self._other_positions)
        is_other_step = change > max(_SHORT_PROMPT, len(rows) * self._max_window)
        if self._num_kept > self._interval or is_other_step:
            if stored is None:
                stored = sum(request.num_cached for request in rows)
            self._renew(rows, other_positions, stored)
        return [self._masks(request) for request in rows]

    def _masks(self, request: Request) -> tuple[int, ...]:
        if _is_free_checked(request):
            chances = self._chances.get(request.id, self._optimistic)
            return chosen_masks(request, chances, self._max_window, self._least_gain)
        asked = request.masks(self._max_window)
        if not request.leaves_masks:
            return asked
        return (min(self._kept.get(request.id, self._usual), asked[0]),)

    def _renew(self, rows: Sequence[Request], other_positions: int, stored: int) -> None:
        """Choose anew, and for how many steps: few percent of a step's time go into choosing."""
        self._acceptance.advance(self._num_kept - 1)
        self._learn_overhead()
        longest = self._max_window + 1
        fed = sum(min(request.num_uncached, longest) + len(request.drafts) for request in rows)
        fed += other_positions
        windows = self._choose(rows, fed, stored)
        self._kept = {request.id: window for request, window in zip(rows, windows, strict=True)}
        self._usual = round(sum(windows) / len(windows))
        step_s = float(self._times.at(fed + sum(windows), stored)) + self._overhead_s
        choosing_s = _CHOOSING_S + _CHOOSING_ROW_S * len(rows)
        self._interval = min(max(1, round(choosing_s / (_CHOOSING_SHARE * step_s))), _MAX_INTERVAL)
        self._num_kept, self._other_positions = 1, other_positions

    def _learn_overhead(self) -> None:
        num_steps, *totals = self._seen
        if num_steps:
            positions, stored, seconds = (total / num_steps for total in totals)
            expected = float(self._times.at(positions, stored))
            extra = min(max(seconds - expected, 0.0), _MAX_OVERHEAD * expected)
            self._overhead_s += _OVERHEAD_WEIGHT * (extra - self._overhead_s)
            self._seen[:] = 0

    def _choose(self, rows: Sequence[Request], fed: int, stored: int) -> list[int]:
        asked = [request.masks(self._max_window) for request in rows]
        is_free = [request.leaves_masks for request in rows]
        is_checked = np.array([request.checks_drafts for request in rows])
        limits = np.where(is_checked, 0, [sum(masks) for masks in asked])
        acceptance = self._acceptance.probabilities(rows)  # [rows, depths]
        self._chances = {
            request.id: DraftChances.of(acceptance[row].tolist())
            for row, request in enumerate(rows)
            if _is_free_checked(request)
        }
        # gains[i, d - 1]: tokens that depth d adds to row i, p_1 ... p_d; falls with d
        stages = _Stages.of(
            acceptance.cumprod(axis=1),
            np.where(is_free, 0, limits),
            np.where(is_free, limits, 0),
            {
                row: mask_gains(request, self._chances[request.id], self._max_window)
                for row, request in enumerate(rows)
                if request.id in self._chances
            },
        )
        pinned = sum(sum(asked[row]) for row in is_checked.nonzero()[0] if not is_free[row])
        best, price = self._best(stages, fed + pinned, stored)
        positions = fed + pinned + int(stages.num_masks[best])
        self._least_gain = stages.least_gain(best, price * self._position_s(positions, stored))
        return stages.masks_of_rows(best)

    def _best(self, stages: _Stages, fed: int, stored: int) -> tuple[int, float]:
        """The best stage, where the step feeds ``fed`` positions beside its masks, and the price of
        a second, in tokens.
        """
        tokens = stages.tokens
        least = np.full_like(tokens, tokens[0])
        feeds = np.stack([tokens, least, np.full_like(tokens, fed)])
        times = self._times.at(feeds + stages.num_masks, stored) + self._overhead_s
        steady, unfed, now = times  # [stages] each
        price = float((tokens / steady).max())
        peak = (tokens - price * steady - stages.margins).argmax()
        if peak == 0:
            return 0, price
        upkeep = price * max(0.0, steady[peak] - unfed[peak]) / (tokens[peak] - tokens[0])
        scores = tokens * (1 - upkeep) - price * now - stages.margins
        return int(scores.argmax()), price

    def _position_s(self, positions: int, stored: int) -> float:
        """What a further position adds to a step, over the next few."""
        near, far = self._times.at(np.array([positions, positions + _NEXT_FEW]) * 1.0, stored)
        return max(0.0, float(far - near)) / _NEXT_FEW


@dataclass(frozen=True)
class _Stages:
    """Adding masks one by one, the most promising first: stage k has k masks beside fixed ones.

    Each stage is priced later, because more positions need not take longer.
    """

    fixed: Ints  # [rows]
    rows: Ints  # row of each mask [stages - 1]
    num_masks: Ints  # [stages]
    tokens: Floats  # expected of a step [stages]
    margins: Floats  # what they must bring beyond their cost, in tokens [stages]

    @classmethod
    def of(
        cls, gains: Floats, fixed: Ints, limits: Ints, exact: Mapping[int, list[list[float]]]
    ) -> _Stages:
        """Stages of rows with ``fixed`` masks, of those that may take up to ``limits``, and of
        those of mode ``exact`` with the gains of theirs, by outcome and depth.
        """
        num_rows, num_depths = gains.shape
        depths = np.arange(num_depths)
        candidates = (depths < limits[:, None]).ravel().nonzero()[0]  # row by row, depth rising
        values, rows = gains.ravel()[candidates], candidates // num_depths
        is_first = candidates % num_depths == 0
        if exact:
            flat = [(row, gain) for row, lines in exact.items() for line in lines for gain in line]
            values = np.concatenate([values, [gain for _, gain in flat]])
            rows = np.concatenate([rows, np.array([row for row, _ in flat], dtype=rows.dtype)])
            is_first = np.concatenate([is_first, np.zeros(len(flat), dtype=bool)])
        # the gain per position, g / (g + 1), rises with g; stable: a row's depths stay in order
        order = np.argsort(-values, kind="stable")
        tokens, margins = np.zeros((2, len(order) + 1))
        tokens[0] = num_rows + gains[depths < fixed[:, None]].sum()
        tokens[1:] = values[order]
        margins[1:] = _MARGIN * is_first[order]  # a further row takes masks
        num_fixed = int(fixed.sum())
        return cls(
            fixed=fixed,
            rows=rows[order],
            num_masks=np.arange(num_fixed, num_fixed + len(tokens)),
            tokens=tokens.cumsum(),
            margins=margins.cumsum(),
        )

    def masks_of_rows(self, stage: int) -> list[int]:
        """Masks of each row at a stage."""
        added = np.bincount(self.rows[:stage], minlength=len(self.fixed))
        return [int(num_masks) for num_masks in self.fixed + added]

    def least_gain(self, stage: int, marginal: float) -> float:
        """Tokens that a position must bring: ``marginal``, as far as the masks that were chosen and
        those that were not agree with it. The next steps' masks are judged by it, too.
        """
        gains = np.diff(self.tokens)
        high = float(gains[stage - 1]) if stage else float("inf")
        low = float(np.nextafter(gains[stage], 2.0)) if stage < len(gains) else 0.0
        return max(min(max(marginal, low), high), _LEAST_GAIN)


def _is_free_checked(request: Request) -> bool:
    return request.checks_drafts and request.leaves_masks
