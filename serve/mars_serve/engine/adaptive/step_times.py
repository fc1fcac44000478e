"""Measured step times, interpolated over positions and cached tokens."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

_Bools = NDArray[np.bool_]
_Floats = NDArray[np.float64]

_FAR = 1e9
"""A grid coordinate beyond the size of any step."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds per step on a grid of positions and of cached tokens read.

    Times are kept as measured, without smoothing: a step of eight positions may well be faster
    than one of three.
    """

    positions: tuple[int, ...]
    """Grid of positions per step, rising."""
    cached_tokens: tuple[int, ...]
    """Grid of cached tokens that a step reads, summed over its rows, rising."""
    seconds: tuple[tuple[float, ...], ...]
    """Seconds at each point of the grid, ``seconds[positions][cached tokens]``."""
    mask_s: float = 0.0
    """Seconds that a step takes longer than the grid's as soon as it feeds a mask."""

    def __post_init__(self) -> None:
        for grid in (self.positions, self.cached_tokens):
            assert grid, "a grid has at least one point"
            assert all(a < b for a, b in pairwise(grid)), "a grid rises"
        assert len(self.seconds) == len(self.positions), "one line per number of positions"
        for line in self.seconds:
            assert len(line) == len(self.cached_tokens), "one time per number of cached tokens"
            assert all(0 < value < float("inf") for value in line), "times are positive and finite"
        assert 0 <= self.mask_s < float("inf"), "a mask makes no step faster"

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
        grid = self._cached_tokens_grid
        upper = min(max(bisect_right(grid, cached_tokens), 1), len(grid) - 1)
        low, high = grid[upper - 1], grid[upper]
        part = max(0.0, (cached_tokens - low) / (high - low))
        line = self._table[upper - 1] * (1 - part) + self._table[upper] * part  # [positions]
        seconds: _Floats = np.interp(positions, self._positions_grid, line)
        return seconds + self.mask_s * has_masks

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


def _with_far_point(table: _Floats, grid: tuple[int, ...]) -> _Floats:
    """Append a row for `_FAR` to ``table`` ``[grid, other]``, by the last slope if it rises."""
    slope = np.zeros(table.shape[1])
    if len(grid) > 1:
        slope = np.maximum(0.0, table[-1] - table[-2]) / (grid[-1] - grid[-2])
    return np.vstack([table, table[-1] + slope * (_FAR - grid[-1])])
