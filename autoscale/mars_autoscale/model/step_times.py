"""Seconds of a step over its positions, and over the cached tokens that it reads.

Imports no Ray, torch or HTTP library.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

_Bools = NDArray[np.bool_]
_Floats = NDArray[np.float64]

_FAR = 1e9
"""A grid coordinate beyond the size of any step."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by its number of positions, interpolated between measured points."""

    positions: tuple[float, ...]
    """Numbers of positions, rising, at least one."""
    seconds: tuple[float, ...]
    """Seconds of a step with each number of positions; positive."""

    def __post_init__(self) -> None:
        assert len(self.positions) == len(self.seconds) >= 1, "a time for each point"
        assert all(low < high for low, high in pairwise(self.positions)), "positions rise"
        assert min(self.seconds) > 0, "steps take time"

    def at(self, positions: float) -> float:
        """Return the seconds of a step.

        Beyond the last point, the last piece is extended if it rises, and the time stays otherwise.
        """
        if positions <= self.positions[0] or len(self.positions) == 1:
            return self.seconds[0]
        index = min(bisect_left(self.positions, positions), len(self.positions) - 1)
        (low, high), (low_s, high_s) = (
            values[index - 1 : index + 1] for values in (self.positions, self.seconds)
        )
        rise = (high_s - low_s) / (high - low)
        if positions > high and rise < 0:
            return high_s
        return low_s + rise * (positions - low)


def linear_step_time(t0_s: float, positions_to_double: float) -> StepTime:
    """Return step times of ``t0_s * (1 + positions / K)``, where K is ``positions_to_double``."""
    return StepTime((0.0, positions_to_double), (t0_s, 2 * t0_s))


@dataclass(frozen=True)
class StepTimes:
    """Seconds per step on a grid of positions and of cached tokens read.

    Times are kept as measured, without smoothing: a step of eight positions may well be faster
    than one of three.
    """

    positions: tuple[float, ...]
    """Grid of positions per step, rising."""
    cached_tokens: tuple[float, ...]
    """Grid of cached tokens that a step reads, summed over its rows, rising."""
    seconds: tuple[tuple[float, ...], ...]
    """Seconds at each point of the grid, ``seconds[positions][cached tokens]``."""
    mask_s: float = 0.0
    """Seconds that a step takes longer than the grid's as soon as it feeds a mask."""
    unread: float = 1.0
    """Share of the grid's seconds that steps take whose logits are hardly read, as in prompts."""

    def __post_init__(self) -> None:
        for grid in (self.positions, self.cached_tokens):
            assert grid, "a grid has at least one point"
            assert all(a < b for a, b in pairwise(grid)), "a grid rises"
        assert len(self.seconds) == len(self.positions), "one line per number of positions"
        for line in self.seconds:
            assert len(line) == len(self.cached_tokens), "one time per number of cached tokens"
            assert all(0 < value < float("inf") for value in line), "times are positive and finite"
        assert 0 <= self.mask_s < float("inf"), "a mask makes no step faster"
        assert 0 < self.unread <= 1, "to read logits takes time"

    @overload
    def at(self, positions: float, cached_tokens: float, has_masks: bool = False) -> float: ...
    @overload
    def at(
        self, positions: _Floats, cached_tokens: float, has_masks: _Bools | bool = False
    ) -> _Floats: ...
    def at(
        self, positions: _Floats | float, cached_tokens: float, has_masks: _Bools | bool = False
    ) -> _Floats | float:
        """Return the seconds of steps with ``positions`` positions each (any shape).

        ``has_masks`` says which of them feed a mask, in a shape that broadcasts.

        Between grid points the time is interpolated linearly. Before the first point it equals the
        first point's time. Past the last point the last segment is continued if it rises, and the
        last point's time is returned if it falls.
        """
        line: Any = self._line(cached_tokens)
        seconds: _Floats = np.interp(positions, self._positions_grid, line)
        return seconds + self.mask_s * has_masks

    def at_cached(self, cached_tokens: float) -> StepTime:
        """Return the times of steps that read so many cached tokens and feed no mask."""
        return StepTime(self.positions, tuple(self._line(cached_tokens)[:-1].tolist()))

    def _line(self, cached_tokens: float) -> _Floats:
        """Return the seconds at each number of positions and at the far point."""
        grid = self._cached_tokens_grid
        upper = min(max(bisect_right(grid, cached_tokens), 1), len(grid) - 1)
        low, high = grid[upper - 1], grid[upper]
        part = max(0.0, (cached_tokens - low) / (high - low))
        line: _Floats = self._table[upper - 1] * (1 - part) + self._table[upper] * part
        return line

    @cached_property
    def _positions_grid(self) -> _Floats:
        return np.array([*self.positions, _FAR])

    @cached_property
    def _cached_tokens_grid(self) -> list[float]:
        return [*self.cached_tokens, _FAR]

    @cached_property
    def _table(self) -> _Floats:
        """Times with a far point added to both grids, ``[cached tokens + 1, positions + 1]``."""
        table = _with_far_point(np.array(self.seconds), self.positions)
        return _with_far_point(table.T, self.cached_tokens)


def _with_far_point(table: _Floats, grid: tuple[float, ...]) -> _Floats:
    """Append a row for `_FAR` to ``table`` ``[grid, other]``, by the last slope if it rises."""
    slope = np.zeros(table.shape[1])
    if len(grid) > 1:
        slope = np.maximum(0.0, table[-1] - table[-2]) / (grid[-1] - grid[-2])
    return np.vstack([table, table[-1] + slope * (_FAR - grid[-1])])
