"""Attention over pages in place on a CPU, by a function of C++.

Keys lie by number within their page, so that one instruction computes scores of several tokens.
Queries read nothing but the keys and values that they, or others of their tile, see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mars_serve.engine.attention.interface import LayerGroup
from mars_serve.engine.batch import BatchRow, StepBatch
from mars_serve.engine.kernels.native import LANES, AttentionArguments, Native

_TILE_QUERIES = 96
"""Queries, by position and head, that a tile of a wide row has (measured)."""


@dataclass(frozen=True)
class NativeMetadata:
    """Attention metadata of one step, which all layers share."""

    arguments: AttentionArguments
    """Arguments of a layer, but for its own tensors."""
    arrays: Sequence[NDArray[np.int64]]
    """What the arguments point to."""
    has_padding: bool


class NativeAttention:
    """Attends over pages in place; see `Attention`."""

    def __init__(
        self,
        group: LayerGroup,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        native: Native,
    ) -> None:
        """Reserve ``num_pages`` pages, each for ``page_size`` committed tokens.

        All layers are those of ``group``, numbered from 0; ``native`` is for numbers of ``dtype``.
        """
        self.page_size = page_size
        self._layers, self._native, self._dtype = group, native, dtype
        self._page_width, self._value_width = _padded(page_size), _padded(group.value_dim)
        self._tile = max(1, _TILE_QUERIES // group.per_kv)
        create = partial(torch.zeros, dtype=dtype, device=device)
        size = group.num_layers, num_pages, group.kv_heads
        self._keys: Tensor = create((*size, group.key_dim, self._page_width))
        self._values: Tensor = create((*size, page_size, self._value_width))

    @property
    def keys(self) -> Tensor:
        """Keys, [layers, pages, kv_heads, page_size, key_dim]."""
        return self._keys[..., : self.page_size].transpose(-1, -2)

    @property
    def values(self) -> Tensor:
        """Values, laid out as `keys`."""
        return self._values[..., : self._layers.value_dim]

    def prepare(self, batch: StepBatch) -> NativeMetadata:
        """See `Attention.prepare`."""
        numbers = [(row.start, row.num_cached, row.num_tokens, row.length) for row in batch.rows]
        starts, num_cached, num_tokens, lengths = np.array(numbers, np.int64).reshape(-1, 4).T
        row = np.repeat(np.arange(len(numbers)), lengths)
        position = np.arange(batch.num_positions)
        is_token = position - starts[row] < num_tokens[row]
        leading, own = batch.visible
        seen = num_cached[row] + leading
        masks = starts[row] + np.where(is_token, lengths[row], own)  # tokens see none
        oldest = np.zeros_like(seen)
        if self._layers.is_bounded:
            ids = np.array(batch.position_ids[: batch.num_positions])
            oldest = np.minimum(self._layers.oldest(ids), seen)
            masks = np.maximum(masks, position - (ids - self._layers.oldest(ids)))
        table = self._page_table(batch.rows)
        page, place = np.divmod(
            (num_cached[row] + position - starts[row])[is_token], self.page_size
        )
        slots = np.full_like(seen, -1)
        slots[is_token] = table[row[is_token], page] * self.page_size + place
        tiles = self._tiles(batch.rows)
        arrays = [
            np.ascontiguousarray(each, dtype=np.int64)
            for each in (table, slots, row, oldest, seen, masks, tiles)
        ]
        names = "page_table", "slots", "rows", "oldest", "seen", "masks", "tiles"
        group = self._layers
        arguments = AttentionArguments(
            **{name: each.ctypes.data for name, each in zip(names, arrays, strict=True)},
            num_positions=batch.num_positions,
            num_tiles=len(tiles),
            table_width=table.shape[1],
            heads=group.heads,
            kv_heads=group.kv_heads,
            key_dim=group.key_dim,
            value_dim=group.value_dim,
            page_size=self.page_size,
            page_width=self._page_width,
            value_width=self._value_width,
        )
        return NativeMetadata(arguments, arrays, len(batch.ids) > batch.num_positions)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        metadata: NativeMetadata,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        is_cached: bool = False,
    ) -> Tensor:
        """See `Attention.attend`.

        Queries, keys and values may be views, contiguous in their last dimension.
        """
        size = len(query), self._layers.heads, self._layers.value_dim
        # Layers compute with padding, too, and numbers that are not finite are slow.
        create = query.new_zeros if metadata.has_padding else query.new_empty
        output: Tensor = create(size, dtype=self._dtype)
        sinks = None if sinks is None else sinks.float()
        arguments = metadata.arguments
        for name, part in (("query", query), ("key", key), ("value", value)):
            assert part.dtype is self._dtype, f"the {name} is {part.dtype}, not {self._dtype}"
            assert part.stride(-1) == 1, f"numbers of a head of the {name} lie apart"
            setattr(arguments, name, part.data_ptr())
            setattr(arguments, f"{name}_stride", part.stride(0))
            setattr(arguments, f"{name}_head_stride", part.stride(1))
        arguments.output, arguments.sinks = (
            output.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
        )
        arguments.key_pages = self._keys[layer].data_ptr()
        arguments.value_pages = self._values[layer].data_ptr()
        arguments.scaling, arguments.softcap = scaling, softcap or 0.0
        arguments.writes_pages = not is_cached
        self._native.attend(arguments)
        return output

    def recover(self) -> None:
        """Do nothing, see `Attention.recover`: queries read nothing but the keys that they see."""

    def _page_table(self, rows: Sequence[BatchRow]) -> NDArray[np.int64]:
        counts = [-(-(row.num_cached + row.num_tokens) // self.page_size) for row in rows]
        table = np.zeros((len(rows), max(counts, default=0)), dtype=np.int64)
        for each, count, row in zip(table, counts, rows, strict=True):
            pages = self._layers.pages(row)
            assert len(pages) >= count, "a row has pages for all its tokens"
            each[:count] = pages[:count]
        return table

    def _tiles(self, rows: Sequence[BatchRow]) -> NDArray[np.int64]:
        """Cut rows into tiles, [tiles, 2], those of most work first so that no thread ends late."""
        tiles = list[tuple[int, int, int]]()
        for row in rows:
            end = row.start + row.length
            for begin in range(row.start, end, self._tile):
                stop = min(begin + self._tile, end)
                tiles.append((begin, stop, (stop - begin) * (row.num_cached + stop - row.start)))
        tiles.sort(key=lambda tile: -tile[2])
        return np.array(tiles, dtype=np.int64).reshape(-1, 3)[:, :2]


def _padded(size: int) -> int:
    return -(-size // LANES) * LANES
