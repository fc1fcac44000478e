"""The speed of a replica: step times, and the tokens per second that follow from them.

A step's time depends on its positions. A row has one position in mode ar; in mode threshold it has
its accepted tokens and its masks. Several tokens per step are faster only while these positions
cost little beside the step's fixed part; past the break-even batch, plain AR decoding is faster.
Imports no Ray or torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

_MAX_BATCH = 4096
"""Highest number of rows at which a break-even batch is searched for."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by its number of positions, interpolated between measured points."""

    positions: tuple[float, ...]
    """Numbers of positions, rising, at least two."""
    seconds: tuple[float, ...]
    """Seconds of a step with each number of positions; positive."""

    def __post_init__(self) -> None:
        assert len(self.positions) == len(self.seconds) >= 2, "a time for each point"
        assert all(low < high for low, high in pairwise(self.positions)), "positions rise"
        assert min(self.seconds) > 0, "steps take time"

    def at(self, positions: float) -> float:
        """Return the seconds of a step.

        Beyond the last point, the last piece is extended if it rises, and the time stays otherwise.
        """
        last = self.positions[-1]
        if positions <= last:
            return float(np.interp(positions, self.positions, self.seconds))
        rise = (self.seconds[-1] - self.seconds[-2]) / (last - self.positions[-2])
        return self.seconds[-1] + max(rise, 0.0) * (positions - last)


def linear_step_time(t0_s: float, positions_to_double: float) -> StepTime:
    """Return ``t0 * (1 + positions / K)``: a fixed part, mostly for reading the weights, and more.

    Args:
        t0_s: seconds of a step without positions.
        positions_to_double: K, the number of positions that doubles the time.
    """
    return StepTime((0.0, positions_to_double), (t0_s, 2 * t0_s))


@dataclass(frozen=True)
class Rung:
    """A way to decode: one point in a model's trade of quality for speed."""

    threshold: float
    """τ in (0, 1]; 1 is plain AR decoding."""
    tokens_per_forward: float
    """Mean number of tokens that a pass gives a row."""
    loss: float
    """Points of quality below plain AR decoding, on a scale to 100."""
    num_masks: int = 0
    """Masks of a row per step."""
    positions_per_row: float | None = None
    """Measured mean positions of a row per step; None derives them from the fields above."""

    @property
    def positions(self) -> float:
        """Positions of a row per step: its uncached tokens and its masks."""
        if self.positions_per_row is not None:
            return self.positions_per_row
        return self.tokens_per_forward + self.num_masks if self.num_masks else 1.0


@dataclass(frozen=True)
class Capacity:
    """A replica's speed on each rung of a ladder."""

    step_time: StepTime
    rungs: tuple[Rung, ...]
    """Rungs with falling τ and rising loss; the first is the target τ (if 1, plain AR decoding)."""
    max_num_seqs: int
    """Highest number of rows in a step."""
    prefill_tokens_per_s: float
    """Prompt tokens that a replica computes each second."""
    exact: Rung | None = None
    """Mode exact, which loses no quality; None if it is not used."""

    def tokens_per_s(self, rung: Rung, batch: float | None = None) -> float:
        """Return the tokens that a replica decodes each second if it computes no prompts.

        Args:
            rung: how it decodes.
            batch: rows of each step; None for a full batch.
        """
        rows = self.max_num_seqs if batch is None else batch
        return rows * rung.tokens_per_forward / self.step_time.at(rows * rung.positions)

    def busy_s(self, output_tokens: float, prompt_tokens: float, gain: float = 1.0) -> float:
        """Return the seconds that a replica with a full batch takes for a number of tokens.

        Args:
            output_tokens: tokens to decode, at least 0.
            prompt_tokens: prompt tokens to compute, at least 0; no τ makes them faster.
            gain: decoding speed as a multiple of that at the target τ, above 0.
        """
        decode_s = output_tokens / (gain * self.tokens_per_s(self.rungs[0]))
        return decode_s + prompt_tokens / self.prefill_tokens_per_s

    def gain(self, rung: Rung, batch: float | None = None) -> float:
        """Return a rung's gain over the target τ: the ratio of their speeds at the same batch."""
        return self.tokens_per_s(rung, batch) / self.tokens_per_s(self.rungs[0], batch)

    def useful(self, min_gain: float) -> tuple[Rung, ...]:
        """Return the rungs that are worth their loss with a full batch.

        These are the target τ, and of the lower rungs those on the upper concave hull of speed
        over loss that reach a gain.

        Args:
            min_gain: lowest gain over the target τ, at least 1. Rungs below it are the dead zone
                just under τ = 1, where masks cost more than they give.
        """
        best = self.rungs[0]
        candidates = [best]
        for rung in self.rungs[1:]:
            if self.gain(rung) >= min_gain and self.gain(rung) > self.gain(candidates[-1]):
                candidates.append(rung)
        return tuple(_upper_hull(candidates, [self.tokens_per_s(rung) for rung in candidates]))

    def break_even_batch(self, rung: Rung) -> int:
        """Return the number of rows up to which a rung is faster than the target τ; 0 if never."""
        for batch in range(1, _MAX_BATCH + 1):
            if self.gain(rung, batch) <= 1.0:
                return batch - 1
        return _MAX_BATCH


def mixed(parts: Sequence[tuple[float, Rung]]) -> Rung:
    """Return one rung with the mean speed and loss of a mixture of rows.

    Args:
        parts: (share of the output tokens, rung); the shares are positive and sum to 1. Slower
            rows stay longer, and have a larger share of the rows of a step.

    Returns:
        A rung with the lowest τ of the parts, for comparing speeds and losses.
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
    """Return the rungs on the upper concave hull of speed over loss.

    A mixture of two rungs on the hull has the speed of any other rung at a lower loss.
    """
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
