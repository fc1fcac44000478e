"""The inner loop: each replica sets its own τ by its own load, within the range it was given.

It goes on by itself if the outer loop is dead. τ drops at once and climbs rung by rung, because a
queue hurts at once and quality is paid by the token. Load that lasts is not the inner loop's
concern: replicas carry it, see `mars_autoscale.policy.decide`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mars_autoscale.model.capacity import Capacity, Rung
from mars_autoscale.policy.decision import ANY_THRESHOLD, ThresholdRange
from mars_autoscale.policy.settings import InnerSettings
from mars_platform.method.mode import LiveDecoding, Mode

SAMPLE_PERIOD_S = 0.5
"""Seconds between two samples of a replica's inner loop."""

_MIN_FLEX_SHARE = 0.01
"""Share of the requests below which tier flex does not get rungs of its own."""

_RungPair = tuple[int, int]
"""Indices of the rungs of tier default and tier flex; rung 0 is the base."""


@dataclass(frozen=True)
class EngineSample:
    """The state of a replica, as its inner loop sees it at one moment."""

    now_s: float
    """Time in seconds on any clock; a jump of the clock costs one sample."""
    load: float
    """Requests that run or wait."""
    allowed: ThresholdRange = ANY_THRESHOLD
    prompt_share: float = 0.0
    """Share of its recent time that the replica spent on prompts."""
    flex_share: float = 0.0
    """Share of the requests that belong to tier flex."""
    pinned_share: float = 0.0
    """Share of the requests that τ does not move: those of tier priority, and those that name a τ
    or a mode."""


class Cause(StrEnum):
    """Why τ last changed at a replica."""

    START = "start"
    """It has not changed since the replica's start."""
    LOAD = "load"
    """It fell, because more requests run and wait than the replica serves fast enough."""
    ARRIVALS = "arrivals"
    """It fell, because the arrivals need more speed than the ready replicas have."""
    EASED = "eased"
    """It rose by a rung, because the load has eased."""
    FLOOR = "floor"
    """It rose to a floor, such as when the loss budget is spent."""
    PROMPTS = "prompts"
    """It rose, because computing prompts is the load, which no τ makes faster."""
    ROWS = "rows"
    """It changed with the number of running requests, at which another rung is worth its loss."""


@dataclass(frozen=True)
class InnerLoopDecision:
    """How a replica decodes live requests, with the gain and the loss of that."""

    live: LiveDecoding
    gain: float = 1.0
    """Speed as a multiple of the base's at the present number of rows."""
    loss: float = 0.0
    """Points of quality that a token of tier default loses beyond those at the target τ."""
    is_lowest: bool = False
    """Whether no lower τ is allowed or of any use."""
    cause: Cause = Cause.START
    """Why τ last changed."""


class InnerLoop:
    """One replica's inner loop.

    It walks a path of rung pairs: tier flex goes down first, as far as it may, then tier default.
    The path begins at the base, the fastest way to decode that loses nothing, and depends on the
    number of rows, as speeds do.
    """

    def __init__(self, capacity: Capacity, settings: InnerSettings) -> None:
        self._settings = settings
        self._capacity = capacity
        self._ladders: dict[int, tuple[Rung, ...]] = {}
        """Ladder by number of rows, for those that were seen."""
        self._thresholds = (capacity.target_threshold, capacity.target_threshold)
        self._base = capacity.base(1)
        self._changed_s = -math.inf
        self._wanted_since_s: float | None = None
        """Time since which more speed has been wanted; None while it is not."""
        self._cause = Cause.START

    def update(self, sample: EngineSample, /) -> InnerLoopDecision:
        """Choose how to decode from now on. A load that is not finite counts as 0."""
        load = sample.load if math.isfinite(sample.load) else 0.0
        rows = round(min(max(load, 1.0), self._capacity.max_num_seqs))
        rungs = self._rungs(rows)
        path = self._path(rungs, sample)
        gains = self._gains(rungs, rows, path, sample)
        wanted_gain = self._wanted_gain(load / self._capacity.max_num_seqs, sample)
        lowest = self._lowest_useful(gains, sample)
        was_at = self._place(rungs, path)
        at = self._move(sample.now_s, was_at, gains, wanted_gain, lowest, load)
        before = self._thresholds
        default, flex = (rungs[index] if index else self._base for index in path[at])
        self._thresholds = (default.threshold, flex.threshold)
        if self._thresholds != before:
            is_slow = wanted_gain > sample.allowed.feed_forward
            self._cause = self._cause_of(before, sample, is_by_load=is_slow, is_climb=at < was_at)
        target_loss = self._capacity.target.loss
        return InnerLoopDecision(
            LiveDecoding(*self._thresholds, self._base.mode is Mode.EXACT),
            gain=gains[at],
            loss=max(default.loss - target_loss, 0.0),
            is_lowest=at >= lowest,
            cause=self._cause,
        )

    def _cause_of(
        self, before: tuple[float, float], sample: EngineSample, *, is_by_load: bool, is_climb: bool
    ) -> Cause:
        if self._thresholds < before:
            return Cause.LOAD if is_by_load else Cause.ARRIVALS
        if not 0.0 <= sample.prompt_share < self._settings.max_prompt_share:
            return Cause.PROMPTS
        if is_climb:
            return Cause.EASED
        floors = sample.allowed.floor_threshold, sample.allowed.flex_floor_threshold
        is_below = any(value < floor for value, floor in zip(before, floors, strict=True))
        return Cause.FLOOR if is_below else Cause.ROWS

    def _rungs(self, rows: int) -> tuple[Rung, ...]:
        """Return the ladder for a number of rows, and choose the base.

        Mode exact becomes the base only where it is faster by some percent, because the number of
        rows jitters.
        """
        capacity = self._capacity
        if rows not in self._ladders:
            self._ladders[rows] = capacity.ladder(self._settings.min_gain, rows)
        rungs = self._ladders[rows]
        gain = capacity.tokens_per_s(rungs[0], rows) / capacity.tokens_per_s(self._base, rows)
        if rungs[0].mode is not Mode.EXACT or gain >= self._settings.exact_gain:
            self._base = rungs[0]
        return rungs

    def _place(self, rungs: Sequence[Rung], path: Sequence[_RungPair]) -> int:
        """Return the index in the path of the τ in use, or of the next higher ones."""
        default, flex = self._thresholds
        return max(
            i
            for i, (first, second) in enumerate(path)
            if i == 0 or (rungs[first].threshold >= default and rungs[second].threshold >= flex)
        )

    def _wanted_gain(self, filled: float, sample: EngineSample) -> float:
        """Return the gain over the base that a load of so many full batches needs."""
        settings = self._settings
        if filled <= settings.full:
            self._wanted_since_s = None
            return 1.0
        if self._wanted_since_s is None:
            self._wanted_since_s = sample.now_s
        is_confirmed = not 0 <= sample.now_s - self._wanted_since_s < settings.confirm_s
        target = self._capacity.target_threshold
        is_at_target = min(self._thresholds) >= target
        if is_at_target and filled < settings.urgent and not is_confirmed:
            return 1.0
        # the arrivals count only here: they say little about a replica whose batch has room
        arrivals_gain = (
            sample.allowed.feed_forward if sample.allowed.feed_forward < math.inf else 1.0
        )
        return max(1.0 + settings.proportional * (filled - settings.full), arrivals_gain)

    def _path(self, rungs: Sequence[Rung], sample: EngineSample) -> list[_RungPair]:
        """Return the rung pairs that the floors allow, from the highest τ to the lowest."""
        floors = sample.allowed.floor_threshold, sample.allowed.flex_floor_threshold
        default, flex = (
            max((i for i, rung in enumerate(rungs) if rung.threshold >= floor), default=0)
            for floor in floors
        )
        default = min(default, flex)  # tier default never goes below tier flex
        flex_alone = range(flex + 1) if sample.flex_share >= _MIN_FLEX_SHARE else range(1)
        return [*((0, i) for i in flex_alone), *((i, flex) for i in range(1, default + 1))]

    def _gains(
        self, rungs: Sequence[Rung], rows: int, path: Sequence[_RungPair], sample: EngineSample
    ) -> list[float]:
        """Return each pair's gain over the base with the present rows and mixture."""
        flex = _as_share(sample.flex_share)
        pinned = min(_as_share(sample.pinned_share), 1 - flex)
        shares = (pinned, 1 - flex - pinned, flex)
        speeds = [
            self._capacity.mixed_tokens_per_s(
                [
                    (share, rungs[index])
                    for share, index in zip(shares, (0, *pair), strict=True)
                    if share > 0
                ],
                rows,
            )
            for pair in path
        ]
        # relative to the path's first pair, whose mixture differs from its rung by a rounding
        return [speed / speeds[0] for speed in speeds]

    def _lowest_useful(self, gains: Sequence[float], sample: EngineSample) -> int:
        """Return the index in the path beyond which a lower τ helps no more."""
        share = sample.prompt_share
        if not 0.0 <= share < self._settings.max_prompt_share:
            return 0
        best = max(gains)
        is_worth_it = 1 / (share + (1 - share) / best) >= self._settings.min_gain
        # the first of the fastest pairs: later ones may only lower a tier without requests
        return gains.index(best) if is_worth_it else 0

    def _move(
        self,
        now_s: float,
        at: int,
        gains: Sequence[float],
        wanted_gain: float,
        lowest: int,
        load: float,
    ) -> int:
        """Return the index in the path to go to: down to what is fast enough, or up by one."""
        fast_enough = [i for i, gain in enumerate(gains) if gain >= wanted_gain]
        wanted = min(fast_enough[0] if fast_enough else len(gains) - 1, lowest)
        if at > lowest or wanted > at:
            at, self._changed_s = wanted, now_s
        elif wanted < at and not 0 <= now_s - self._changed_s < self._settings.climb_s:
            filled_after = load / self._capacity.max_num_seqs * gains[at] / gains[at - 1]
            if filled_after <= self._settings.climb_full:
                at, self._changed_s = at - 1, now_s
        return at


def _as_share(value: float) -> float:
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0
