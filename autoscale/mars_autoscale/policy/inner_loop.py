"""The inner loop: each replica sets its own τ by its own load, within the range it was given.

It goes on by itself if the outer loop is dead. τ drops at once and climbs rung by rung, because a
queue hurts at once and quality is paid by the token. Load that lasts is not the inner loop's
concern: replicas carry it, see `mars_autoscale.policy.decide`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mars_autoscale.model.capacity import Capacity, mixed
from mars_autoscale.policy.decision import ANY_THRESHOLD, ThresholdRange
from mars_autoscale.policy.settings import InnerSettings
from mars_platform.method.live import LiveDecoding

LOOK_PERIOD_S = 0.5
"""Seconds between two looks of a replica's inner loop."""

_MIN_FLEX_SHARE = 0.01
"""Share of the requests below which tier flex does not get rungs of its own."""

_RungPair = tuple[int, int]
"""Indices of the rungs of tier default and tier flex; rung 0 is the target τ."""


@dataclass(frozen=True)
class Look:
    """The state of a replica, as its inner loop sees it at one moment."""

    now_s: float
    """Time in seconds on any clock; a jump of the clock costs one look."""
    load: float
    """Requests that run or wait."""
    allowed: ThresholdRange = ANY_THRESHOLD
    """Limits of τ, and the gain that the arrivals need."""
    prompt_share: float = 0.0
    """Share of its recent time that the replica spent on prompts."""
    flex_share: float = 0.0
    """Share of the requests that belong to tier flex."""
    pinned_share: float = 0.0
    """Share of the requests that τ does not move: those of tier priority, and those that name a τ
    or a mode."""


@dataclass(frozen=True)
class InnerLoopDecision:
    """How a replica decodes live requests, with the gain and the loss of that."""

    live: LiveDecoding
    gain: float = 1.0
    """Speed of a full batch as a multiple of that at the target τ."""
    loss: float = 0.0
    """Points of quality that a token of tier default loses beyond those at the target τ."""
    is_lowest: bool = False
    """Whether no lower τ is allowed or of any use."""


class InnerLoop:
    """One replica's inner loop.

    It walks a path of rung pairs: tier flex goes down first, as far as it may, then tier default.
    """

    def __init__(self, capacity: Capacity, settings: InnerSettings) -> None:
        self._settings = settings
        self._capacity = capacity
        self._rungs = capacity.useful(settings.min_gain)
        self._pair: _RungPair = (0, 0)
        """Rungs in use by tier default and tier flex."""
        self._is_exact = False
        """Whether mode exact replaces plain AR decoding."""
        self._changed_s = -math.inf
        """Time of the last change of rungs."""
        self._wanted_since_s: float | None = None
        """Time since which more speed has been wanted; None while it is not."""

    def update(self, look: Look, /) -> InnerLoopDecision:
        """Choose how to decode from now on. A load that is not finite counts as 0."""
        load = look.load if math.isfinite(look.load) else 0.0
        path = self._path(look)
        gains = self._gains(path, look)
        wanted_gain = self._wanted_gain(load / self._capacity.max_num_seqs, look)
        lowest = self._lowest_useful(gains, look)
        at = self._move(look.now_s, path, gains, wanted_gain, lowest, load)
        self._choose_exact(load)
        default, flex = (self._rungs[index] for index in path[at])
        return InnerLoopDecision(
            LiveDecoding(default.threshold, flex.threshold, self._is_exact),
            gain=gains[at],
            loss=default.loss - self._rungs[0].loss,
            is_lowest=at >= lowest,
        )

    def _wanted_gain(self, filled: float, look: Look) -> float:
        """Return the gain over the target τ that a load of so many full batches needs."""
        settings = self._settings
        if filled <= settings.full:
            self._wanted_since_s = None
            return 1.0
        if self._wanted_since_s is None:
            self._wanted_since_s = look.now_s
        is_confirmed = not 0 <= look.now_s - self._wanted_since_s < settings.confirm_s
        if self._pair == (0, 0) and filled < settings.urgent and not is_confirmed:
            return 1.0
        # the arrivals count only here: they say little about a replica whose batch has room
        arrivals_gain = look.allowed.feed_forward if look.allowed.feed_forward < math.inf else 1.0
        return max(1.0 + settings.proportional * (filled - settings.full), arrivals_gain)

    def _path(self, look: Look) -> list[_RungPair]:
        """Return the rung pairs that the floors allow, from the highest τ to the lowest."""
        floors = look.allowed.floor_threshold, look.allowed.flex_floor_threshold
        default, flex = (
            max((i for i, rung in enumerate(self._rungs) if rung.threshold >= floor), default=0)
            for floor in floors
        )
        default = min(default, flex)  # tier default never goes below tier flex
        flex_alone = range(flex + 1) if look.flex_share >= _MIN_FLEX_SHARE else range(1)
        return [*((0, i) for i in flex_alone), *((i, flex) for i in range(1, default + 1))]

    def _gains(self, path: Sequence[_RungPair], look: Look) -> list[float]:
        """Return each pair's gain over the target τ with a full batch of the present mixture."""
        flex = _as_share(look.flex_share)
        pinned = min(_as_share(look.pinned_share), 1 - flex)
        shares = (pinned, 1 - flex - pinned, flex)
        speeds = [
            self._capacity.tokens_per_s(
                mixed(
                    [
                        (share, self._rungs[index])
                        for share, index in zip(shares, (0, *pair), strict=True)
                        if share > 0
                    ]
                )
            )
            for pair in path
        ]
        # relative to the path's first pair, whose mixture differs from its rung by a rounding
        return [speed / speeds[0] for speed in speeds]

    def _lowest_useful(self, gains: Sequence[float], look: Look) -> int:
        """Return the index in the path beyond which a lower τ helps no more."""
        share = look.prompt_share
        if not 0.0 <= share < self._settings.max_prompt_share:
            return 0
        best = max(gains)
        is_worth_it = 1 / (share + (1 - share) / best) >= self._settings.min_gain
        # the first of the fastest pairs: later ones may only lower a tier without requests
        return gains.index(best) if is_worth_it else 0

    def _move(
        self,
        now_s: float,
        path: Sequence[_RungPair],
        gains: Sequence[float],
        wanted_gain: float,
        lowest: int,
        load: float,
    ) -> int:
        """Drop to the rungs that are fast enough, or climb one; returns the index in the path."""
        at = max(i for i, pair in enumerate(path) if pair <= self._pair)
        fast_enough = [i for i, gain in enumerate(gains) if gain >= wanted_gain]
        wanted = min(fast_enough[0] if fast_enough else len(path) - 1, lowest)
        if at > lowest or wanted > at:
            at, self._changed_s = wanted, now_s
        elif wanted < at and not 0 <= now_s - self._changed_s < self._settings.climb_s:
            filled_after = load / self._capacity.max_num_seqs * gains[at] / gains[at - 1]
            if filled_after <= self._settings.climb_full:
                at, self._changed_s = at - 1, now_s
        self._pair = path[at]
        return at

    def _choose_exact(self, load: float) -> None:
        """Use mode exact for τ = 1 while it is faster than plain AR decoding."""
        exact, target = self._capacity.exact, self._rungs[0]
        if exact is None or target.threshold < 1.0:
            return
        gain = self._capacity.gain(exact, min(max(load, 1.0), self._capacity.max_num_seqs))
        # mode exact stays until it is slower, because the number of rows jitters
        self._is_exact = gain >= (1.0 if self._is_exact else self._settings.exact_gain)


def _as_share(value: float) -> float:
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0
