"""What a replica can do: step times, and the tokens a second that follow from them.

A step costs its positions, and a row of a batch costs one in mode ar and its accepted tokens and
masks in mode threshold. Several tokens a step are faster only while that cost is small against a
step's fixed part; past the break-even batch plain AR decoding is. Knows no clock and no Ray.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

_MAX_BATCH = 4096
"""Rows beyond which no break-even batch is looked for."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by its positions, between measured points; see `linear_step_time`."""

    positions: tuple[float, ...]
    """Rising, at least two."""
    seconds: tuple[float, ...]
    """Of steps with so many; positive."""

    def __post_init__(self) -> None:
        assert len(self.positions) == len(self.seconds) >= 2, "a time for each point"
        assert all(low < high for low, high in pairwise(self.positions)), "positions rise"
        assert min(self.seconds) > 0, "steps take time"

    def at(self, positions: float) -> float:
        """Seconds; past the last point along the last piece, where that one rises."""
        last = self.positions[-1]
        if positions <= last:
            return float(np.interp(positions, self.positions, self.seconds))
        rise = (self.seconds[-1] - self.seconds[-2]) / (last - self.positions[-2])
        return self.seconds[-1] + max(rise, 0.0) * (positions - last)


def linear_step_time(t0_s: float, positions_to_double: float) -> StepTime:
    """``t0 * (1 + positions / K)``: a fixed part, mostly the weights' reading, and each position's.

    Args:
        t0_s: seconds of a step without positions.
        positions_to_double: K, the positions that take as long again.
    """
    return StepTime((0.0, positions_to_double), (t0_s, 2 * t0_s))


@dataclass(frozen=True)
class Rung:
    """A way to decode: one point of a model's trade of quality for speed."""

    threshold: float
    """τ in (0, 1]; 1 is plain AR decoding."""
    tokens_per_forward: float
    """Mean tokens that a pass gives a row."""
    loss: float
    """Points of quality below plain AR decoding, on a scale to 100."""
    num_masks: int = 0
    """That a row feeds."""
    positions_per_row: float | None = None
    """Mean positions that a row costs in a step, where measured; None takes them from the above."""

    @property
    def positions(self) -> float:
        """What a row costs in a step: its tokens that are not stored yet, and masks."""
        if self.positions_per_row is not None:
            return self.positions_per_row
        return self.tokens_per_forward + self.num_masks if self.num_masks else 1.0


@dataclass(frozen=True)
class Capacity:
    """A replica's speed on each rung of a ladder."""

    step_time: StepTime
    rungs: tuple[Rung, ...]
    """From plain AR decoding down: falling τ, rising loss."""
    max_num_seqs: int
    """Rows of a step at the most."""
    prefill_tokens_per_s: float
    exact: Rung | None = None
    """Mode exact, which loses nothing; None where it is not used."""

    def tokens_per_s(self, rung: Rung, batch: float | None = None) -> float:
        """Decoded tokens a second of a replica that does nothing else.

        Args:
            rung: how it decodes.
            batch: rows of each step; None for all slots.
        """
        rows = self.max_num_seqs if batch is None else batch
        return rows * rung.tokens_per_forward / self.step_time.at(rows * rung.positions)

    def gain(self, rung: Rung, batch: float | None = None) -> float:
        """Times that a rung is faster than plain AR decoding at a batch."""
        return self.tokens_per_s(rung, batch) / self.tokens_per_s(self.rungs[0], batch)

    def useful(self, min_gain: float) -> tuple[Rung, ...]:
        """The rungs worth their loss with all slots taken: plain AR decoding, and below it those
        on the upper concave hull of speed over loss that are faster by ``min_gain``.

        Args:
            min_gain: at least 1. Rungs between are the dead zone just under τ = 1, where masks
                cost more than they give.
        """
        best = self.rungs[0]
        candidates = [best]
        for rung in self.rungs[1:]:
            if self.gain(rung) >= min_gain and self.gain(rung) > self.gain(candidates[-1]):
                candidates.append(rung)
        return tuple(_upper_hull(candidates, [self.tokens_per_s(rung) for rung in candidates]))

    def break_even_batch(self, rung: Rung) -> int:
        """Rows up to which a rung is faster than plain AR decoding; 0 where it never is."""
        for batch in range(1, _MAX_BATCH + 1):
            if self.gain(rung, batch) <= 1.0:
                return batch - 1
        return _MAX_BATCH


def mixed(parts: Sequence[tuple[float, Rung]]) -> Rung:
    """What rows of several rungs are worth together, as one rung.

    Args:
        parts: (share of the output tokens, rung); the shares, positive ones, make 1 together.
            Slower rows stay for longer, so that their share of a step is larger.

    Returns:
        A rung whose τ is the lowest, for comparing speeds and losses.
    """
    rows = [share / rung.tokens_per_forward for share, rung in parts]
    total = math.fsum(rows)
    positions = math.fsum(row * rung.positions for row, (_, rung) in zip(rows, parts, strict=True))
    return Rung(
        min(rung.threshold for _, rung in parts),
        1 / total,
        math.fsum(share * rung.loss for share, rung in parts),
        positions_per_row=positions / total,
    )


def _upper_hull(rungs: Sequence[Rung], speeds: Sequence[float]) -> list[Rung]:
    """Those above every line between two others: the others' speed is had cheaper by mixing."""
    hull = list[int]()
    for i, rung in enumerate(rungs):
        while len(hull) >= 2:
            a, b = hull[-2], hull[-1]
            rise = (speeds[b] - speeds[a]) * (rung.loss - rungs[a].loss)
            if rise > (speeds[i] - speeds[a]) * (rungs[b].loss - rungs[a].loss):
                break
            hull.pop()
        hull.append(i)
    return [rungs[i] for i in hull]
