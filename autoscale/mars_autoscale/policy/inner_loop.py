"""The inner loop: each replica sets its own τ, by its own load, within the range that it is given.

It needs nobody: where the controller is dead it goes on. It drops at once and climbs rung by rung,
since a queue hurts at once and quality is paid by the token. It has no memory of load: what lasts
is for replicas to carry, see `mars_autoscale.policy.decide`. Knows no engine, no Ray and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from mars_autoscale.model.capacity import Capacity, Rung, mixed
from mars_autoscale.policy.observe import Look
from mars_platform.config import Settings

LOOK_PERIOD_S = 0.5
"""Between two looks of a replica."""

_LEAST_SHARE = 0.01
"""Of requests of class flex, below which they are not worth rungs of their own."""


class LocalSettings(Settings):
    """Constants of the inner loop."""

    full: float = Field(default=0.8, ge=0)
    """(running + waiting) / slots from which on more speed is asked for. Below 1: a batch that is
    full already makes the next request wait."""
    proportional: float = Field(default=1.1, ge=0)
    """Gain in speed over the target τ asked for a whole batch more of load than `full`."""
    confirm_s: float = Field(default=1.0, ge=0)
    """Seconds for which more speed must have been asked for before τ leaves the target: a batch
    that fills up for a moment empties by itself."""
    urgent: float = Field(default=1.3, ge=0)
    """(running + waiting) / slots from which on that is not waited for."""
    climb_s: float = Field(default=1.0, ge=0)
    """Seconds on a rung before τ may climb: a request's speed should not flap."""
    climb_full: float = Field(default=1.1, ge=0)
    """(running + waiting) / slots up to which the slots may be filled, as far as can be told, by
    the lower speed after a climb: what would only be undone is not done."""
    min_gain: float = Field(default=1.05, ge=1)
    """Times that a rung must be faster than the target τ to be worth any loss."""
    max_prompt_share: float = Field(default=0.35, gt=0, le=1)
    """Share of its time that prompts may take of a replica that lowers τ: no τ makes prompts
    faster, and where they are the load, quality would be paid for nothing."""
    exact_gain: float = Field(default=1.05, ge=1)
    """Times that mode exact must be faster than plain AR decoding, at the rows of the moment, to
    stand in for it: its further positions are free only while the arithmetic idles."""


@dataclass(frozen=True)
class Stage:
    """What a replica decodes with."""

    default: Rung
    """Requests of class default."""
    flex: Rung
    """Those of class flex."""
    is_exact: bool = False
    """Whether requests at τ = 1 are decoded in mode exact."""
    gain: float = 1.0
    """Times that all slots together are faster than at the target τ."""
    is_lowest: bool = False
    """Whether no lower one is allowed, or of any use."""


@dataclass
class LocalState:
    """What the inner loop remembers."""

    place: tuple[int, int] = (0, 0)
    """Rungs in use by class default and flex; 0 is the target τ."""
    is_exact: bool = False
    changed_s: float = -math.inf
    asked_s: float | None = None
    """Since when more speed is asked for; None while it is not."""


class LocalController:
    """One replica's inner loop.

    It walks a path of stages: at first class flex goes down, as far as it may, then class default.
    """

    def __init__(self, capacity: Capacity, settings: LocalSettings) -> None:
        self._settings = settings
        self._capacity = capacity
        self._rungs = capacity.useful(settings.min_gain)
        self.state = LocalState()

    def update(self, look: Look, /) -> Stage:
        """Take a look and choose. A load that is no number counts as none."""
        load = look.load if math.isfinite(look.load) else 0.0
        path = self._path(look)
        gains = self._gains(path, look)
        asked = self._asked(load / self._capacity.max_num_seqs, look)
        lowest = self._lowest(gains, look)
        at = self._move(look.now_s, path, gains, asked, lowest, load)
        self._choose_exact(load)
        default, flex = (self._rungs[index] for index in path[at])
        return Stage(default, flex, self.state.is_exact, gains[at], at >= lowest)

    def _asked(self, filled: float, look: Look) -> float:
        """Gain in speed that is needed, for slots that are filled so many times."""
        state, settings = self.state, self._settings
        if filled <= settings.full:
            state.asked_s = None
            return 1.0
        if state.asked_s is None:
            state.asked_s = look.now_s
        is_confirmed = not 0 <= look.now_s - state.asked_s < settings.confirm_s
        if state.place == (0, 0) and filled < settings.urgent and not is_confirmed:
            return 1.0
        asked = 1.0 + settings.proportional * (filled - settings.full)
        # what arrives says little of a replica whose own slots are free
        return max(asked, look.feed_forward if look.feed_forward < math.inf else 1.0)

    def _path(self, look: Look) -> list[tuple[int, int]]:
        """Places of class default and flex that the floors allow, the best first."""
        default, flex = (
            max((i for i, rung in enumerate(self._rungs) if rung.threshold >= floor), default=0)
            for floor in (look.floor_threshold, look.flex_floor_threshold)
        )
        default = min(default, flex)  # who pays first does not pay less
        apart = range(flex + 1) if look.flex_share >= _LEAST_SHARE else range(1)
        return [*((0, i) for i in apart), *((i, flex) for i in range(1, default + 1))]

    def _gains(self, path: Sequence[tuple[int, int]], look: Look) -> list[float]:
        """Gain of each place over the target τ, with all slots taken."""
        flex = _share(look.flex_share)
        pinned = min(_share(look.pinned_share), 1 - flex)
        shares = (pinned, 1 - flex - pinned, flex)
        speeds = [
            self._capacity.tokens_per_s(
                mixed(
                    [
                        (share, self._rungs[index])
                        for share, index in zip(shares, (0, *place), strict=True)
                        if share > 0
                    ]
                )
            )
            for place in path
        ]
        # over the first and not over the rung itself: a mixture is off by a rounding
        return [speed / speeds[0] for speed in speeds]

    def _lowest(self, gains: Sequence[float], look: Look) -> int:
        """Index in the path of the lowest place that helps at all."""
        share = look.prompt_share
        if not 0.0 <= share < self._settings.max_prompt_share:
            return 0
        best = max(gains)
        helps = 1 / (share + (1 - share) / best) >= self._settings.min_gain
        # the first of the fastest: places beyond it may be there for a class without requests
        return gains.index(best) if helps else 0

    def _move(
        self,
        now_s: float,
        path: Sequence[tuple[int, int]],
        gains: Sequence[float],
        asked: float,
        lowest: int,
        load: float,
    ) -> int:
        """The place in the path from now on."""
        state = self.state
        at = max(i for i, place in enumerate(path) if place <= state.place)
        enough = [i for i, gain in enumerate(gains) if gain >= asked]
        wanted = min(enough[0] if enough else len(path) - 1, lowest)
        if at > lowest or wanted > at:
            at, state.changed_s = wanted, now_s
        elif wanted < at and not 0 <= now_s - state.changed_s < self._settings.climb_s:
            after = load / self._capacity.max_num_seqs * gains[at] / gains[at - 1]
            if after <= self._settings.climb_full:
                at, state.changed_s = at - 1, now_s
        state.place = path[at]
        return at

    def _choose_exact(self, load: float) -> None:
        exact, best = self._capacity.exact, self._rungs[0]
        if exact is None or best.threshold < 1.0:
            return
        gain = self._capacity.gain(exact, min(max(load, 1.0), self._capacity.max_num_seqs))
        # what has been chosen stays until it is no faster: the number of rows jitters
        self.state.is_exact = gain >= (1.0 if self.state.is_exact else self._settings.exact_gain)


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0
