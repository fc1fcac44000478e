"""The inner loop: each replica sets its own τ, by its own load, within the range that it is given.

It needs nobody: where the controller is dead it goes on. It drops at once and climbs rung by rung,
since a queue hurts at once and quality is paid by the token. It has no memory of load: what lasts
is for replicas to carry, see `mars_autoscale.decide`. Knows no engine, no Ray and no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import Field

from mars_autoscale.capacity import Capacity, Rung
from mars_autoscale.observe import Look
from mars_platform.config import Settings


class LocalSettings(Settings):
    """Constants of the inner loop."""

    full: float = Field(default=0.8, ge=0)
    """(running + waiting) / slots from which on more speed is asked for. Below 1: a batch that is
    full already makes the next request wait."""
    proportional: float = Field(default=1.5, ge=0)
    """Gain in speed over τ = 1 asked for a whole batch more of load than `full`."""
    climb_s: float = Field(default=1.0, ge=0)
    """Seconds on a rung before τ may climb: a request's speed should not flap."""
    min_gain: float = Field(default=1.05, ge=1)
    """Times that a rung must be faster than plain AR decoding to be worth any loss."""
    max_prompt_share: float = Field(default=0.35, gt=0, le=1)
    """Share of its time that prompts may take of a replica that lowers τ: no τ makes prompts
    faster, and where they are the load, quality would be paid for nothing."""


@dataclass
class LocalState:
    """What the inner loop remembers."""

    rung: int = 0
    """Index of the rung in use, 0 for plain AR decoding."""
    changed_s: float = -math.inf


class LocalController:
    """One replica's inner loop."""

    def __init__(self, capacity: Capacity, settings: LocalSettings) -> None:
        self._settings = settings
        self._num_slots = capacity.num_slots
        self._rungs = capacity.useful(settings.min_gain)
        self._gains = [capacity.gain(rung) for rung in self._rungs]
        self.state = LocalState()

    @property
    def rung(self) -> Rung:
        """What to decode with."""
        return self._rungs[self.state.rung]

    def update(self, look: Look, /) -> Rung:
        """Take a look and choose. A load that is no number counts as none."""
        load = look.load if math.isfinite(look.load) else 0.0
        excess = load / self._num_slots - self._settings.full
        asked = 1.0
        if excess > 0.0:
            asked += self._settings.proportional * excess
            # what arrives says little of a replica whose own slots are free
            asked = max(asked, look.feed_forward if look.feed_forward < math.inf else 1.0)
        self._move(look.now_s, asked, self._lowest(look))
        return self.rung

    def _lowest(self, look: Look) -> int:
        """Index of the lowest rung that is allowed and helps at all."""
        share = look.prompt_share
        if not 0.0 <= share < self._settings.max_prompt_share:
            return 0
        helps = [
            i
            for i, rung in enumerate(self._rungs)
            if rung.threshold >= look.floor_threshold
            and 1 / (share + (1 - share) / self._gains[i]) >= self._settings.min_gain
        ]
        return max(helps, default=0)

    def _move(self, now_s: float, asked: float, lowest: int) -> None:
        state = self.state
        enough = [i for i, gain in enumerate(self._gains) if gain >= asked]
        wanted = min(enough[0] if enough else len(self._rungs) - 1, lowest)
        if state.rung > lowest or wanted > state.rung:
            state.rung, state.changed_s = wanted, now_s
        elif wanted < state.rung and not 0 <= now_s - state.changed_s < self._settings.climb_s:
            state.rung, state.changed_s = state.rung - 1, now_s
