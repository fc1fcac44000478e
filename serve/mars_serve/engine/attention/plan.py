"""How attention over a step is cut into pieces of like size, planned on the host.

A captured graph fixes the number of pieces but not what they are: each step lists its own, so that
any layout of rows fits a shape of enough positions, rows and pages, and the whole device works on
one long row as on many short ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mars_serve.engine.batch import StepBatch

Numbers = NDArray[np.int64]

_SMALLEST_BLOCK = 16
"""Fewest rows of a matrix product on tensor cores."""
_DECODING_BLOCK = 64
"""Rows of a tile that holds a decoding row of most models, and the fewest of the matrix product
that a group of four warps shares on compute capability 9."""
_PROMPT_BLOCK = 128


@dataclass(frozen=True)
class StepShape:
    """Sizes that a step is padded to."""

    num_positions: int
    num_rows: int
    num_pages: int
    """Most pages of cached tokens of a row; 0 if no row has any."""

    @classmethod
    def of(cls, batch: StepBatch, page_size: int) -> StepShape:
        """Return the smallest shape that holds a step."""
        return cls(len(batch.ids), len(batch.rows), cached_pages(batch, page_size))


def cached_pages(batch: StepBatch, page_size: int) -> int:
    """Return the most pages of cached tokens that a row of a step has."""
    return max((-(-row.num_cached // page_size) for row in batch.rows), default=0)


@dataclass(frozen=True)
class Tiling:
    """Sizes of tiles and pieces for a model on a device."""

    heads: int
    """Query heads that a tile attends together, all or some of a key/value head's."""
    page_size: int
    block_n: int
    num_pieces: int
    """Pieces of a group of query heads that give each multiprocessor of the device a program."""
    largest_block: int = 128
    fewest_blocks: int = 2
    """Blocks of keys below which a tile is not cut: combining would take longer."""

    def block_m(self, shape: StepShape) -> int:
        """Return the rows of a tile's matrix products, queries times query heads.

        The rows of a decoding step are unknown beforehand: four rows of 8 positions have the same
        shape as 32 of one. So its tiles hold wide rows, whose pages are then read once.
        """
        least = power_of_two(self.heads)
        mean = self.heads * shape.num_positions // max(shape.num_rows, 1)
        most = _PROMPT_BLOCK if mean >= _PROMPT_BLOCK else _DECODING_BLOCK
        all_queries = power_of_two(self.heads * shape.num_positions)
        return max(_SMALLEST_BLOCK, least, min(most, all_queries, self.largest_block))

    def tile(self, shape: StepShape) -> int:
        """Return the most queries of a tile."""
        return self.block_m(shape) // self.heads

    def wanted(self, shape: StepShape) -> int:
        """Return the pieces that keep the device busy, 1 if no tile of the shape is cut.

        Small tiles have little to compute and little to combine, so that two programs on each
        multiprocessor take turns at waiting for memory.
        """
        most = self._blocks(shape.num_pages * self.page_size) + self._blocks(shape.num_positions)
        if most <= self.fewest_blocks:
            return 1
        return self.num_pieces * (2 if self.block_m(shape) < _DECODING_BLOCK else 1)

    def num_slots(self, shape: StepShape) -> int:
        """Return the room for partial results, 0 if no tile of the shape is cut.

        Tiles are cut into parts of ``blocks / wanted`` blocks of keys or more, where blocks are
        those of all tiles. So fewer than ``wanted`` tiles are cut, and there are fewer than
        ``wanted`` parts beside one more for each tile.
        """
        wanted = self.wanted(shape)
        return 2 * wanted if wanted > 1 else 0

    def most_pieces(self, shape: StepShape) -> int:
        """Return the most pieces of a step; the rows' tiles and those of padding are not all full.

        Cutting adds fewer than ``wanted``; see `num_slots`.
        """
        tile = self.tile(shape)
        full = (shape.num_positions + (shape.num_rows + 1) * (tile - 1)) // tile
        return min(shape.num_positions, full) + self.wanted(shape) - 1

    def _blocks(self, num_keys: int) -> int:
        return -(-num_keys // self.block_n)


@dataclass(frozen=True)
class Rows:
    """The rows of a step as arrays, one number a row."""

    starts: Numbers
    num_cached: Numbers
    num_tokens: Numbers
    lengths: Numbers

    @classmethod
    def of(cls, batch: StepBatch) -> Rows:
        """Return the rows of a step."""
        numbers = [(row.start, row.num_cached, row.num_tokens, row.length) for row in batch.rows]
        return cls(*np.array(numbers, dtype=np.int64).reshape(-1, 4).T)


def plan(
    rows: Rows,
    shape: StepShape,
    tiling: Tiling,
    pieces: Numbers,
    combine: Numbers,
    oldest: Numbers | None = None,
) -> None:
    """Cut a step into pieces and say how they are combined.

    ``shape`` holds the step. The results are written to ``pieces``, [most pieces, PIECE_FIELDS],
    and ``combine``, [positions, COMBINE_FIELDS], which have to be zeros. Blocks before ``oldest``,
    [positions], the first position that each query sees, are left out.
    """
    tiles = _tiles(rows, shape.num_positions, tiling.tile(shape))
    _, first, end, start, num_cached = tiles.T
    own_keys = np.where(end > start, end - start, 0)
    cached_blocks = -(-num_cached // tiling.block_n)
    hidden = np.zeros_like(cached_blocks)
    if oldest is not None:
        hidden = np.minimum(np.minimum.reduceat(oldest, first) // tiling.block_n, cached_blocks)
    blocks = cached_blocks - hidden + -(-own_keys // tiling.block_n)
    counts = _counts(blocks, tiling, tiling.wanted(shape))
    parts = counts.sum()
    tile = np.repeat(np.arange(len(tiles)), counts)
    rank = np.arange(parts) - np.repeat(counts.cumsum() - counts, counts)
    begin, stop = (blocks[tile] * part // counts[tile] for part in (rank, rank + 1))
    cut = np.where(counts > 1, counts, 0)
    slots = cut.cumsum() - cut  # first slot of each tile
    slot = np.where(cut[tile] > 0, slots[tile] + rank, -1)
    order = np.argsort(
        begin - stop, kind="stable"
    )  # a device that begins with the longest waits least
    begin, stop = begin + hidden[tile], stop + hidden[tile]
    pieces[:parts] = np.column_stack([tiles[tile], begin, stop, slot])[order]
    if cut.any():
        widths = end - first
        position = np.repeat(np.arange(len(tiles)), widths)  # tiles lie in order of positions
        combine[:, 0], combine[:, 1] = slots[position], cut[position]
        combine[:, 2] = np.arange(shape.num_positions) - first[position]


def _counts(blocks: Numbers, tiling: Tiling, wanted: int) -> Numbers:
    """Return the number of pieces of each tile, by the tiles' blocks.

    If there are fewer tiles than wanted pieces, there are at most so many pieces: one more would
    have a multiprocessor run two of them while others have none left.
    """
    if wanted == 1:
        return np.ones_like(blocks)
    most = max(tiling.fewest_blocks, -(-int(blocks.sum()) // wanted))
    num_tiles = np.count_nonzero(blocks)
    while num_tiles <= wanted < (-(-blocks // most)).sum():
        most += 1 + most // 16
    return np.maximum(1, -(-blocks // most))


def _tiles(rows: Rows, num_positions: int, size: int) -> Numbers:
    """Return the tiles in order, those of padding last: the first five `PIECE_FIELDS` of each.

    Padding has neither cached nor own keys, so that its results are 0.
    """
    counts = -(-rows.lengths // size)
    row = np.repeat(np.arange(len(counts)), counts)
    rank = np.arange(len(row)) - np.repeat(counts.cumsum() - counts, counts)
    start = rows.starts[row]
    first = start + rank * size
    end = np.minimum(first + size, start + rows.lengths[row])
    tiles = np.column_stack([row, first, end, start, rows.num_cached[row]])
    used = int(rows.lengths.sum())
    if used == num_positions:
        return tiles
    first = np.arange(used, num_positions, size)
    end = np.minimum(first + size, num_positions)
    none = np.zeros_like(first)
    padding = np.column_stack([none, first, end, end, none])
    return np.concatenate([tiles, padding])


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
