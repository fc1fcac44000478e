"""Attention over pages in place, by one kernel in shapes that can be fixed beforehand.

A step's metadata is one array of integers, padded to a `StepShape`, which a captured graph reads
from a fixed address. Keys and values of masks are never read by a later step and are not kept.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from mars_serve.engine.attention.interface import LayerGroup
from mars_serve.engine.attention.plan import (
    Numbers,
    Rows,
    StepShape,
    Tiling,
    plan,
    power_of_two,
)
from mars_serve.engine.batch import BatchRow, StepBatch
from mars_serve.engine.device.transfer import host_numbers, to_device
from mars_serve.engine.kernels.attention import (
    COMBINE_FIELDS,
    PIECE_FIELDS,
    has_large_memory,
    heads_of_tile,
)

_CPU_PIECES = 4
"""Pieces that keep a device without streaming multiprocessors busy."""


@dataclass(frozen=True)
class PagedMetadata:
    """Attention metadata of one step, which all layers share; see `kernels.attention`."""

    shape: StepShape
    slots: Tensor
    """int64 [positions], where in the flattened pages keys and values are written."""
    positions: Tensor
    leading: Tensor
    own: Tensor
    oldest: Tensor | None
    combine: Tensor
    page_table: Tensor
    pieces: Tensor


class PagedAttention:
    """Attends over pages in place; see `Attention`."""

    def __init__(
        self,
        group: LayerGroup,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        tiling: Tiling | None = None,
    ) -> None:
        """Reserve ``num_pages`` pages, each for ``page_size`` committed tokens.

        All layers are those of ``group``, numbered from 0. ``tiling`` says how steps are cut into
        pieces, by default as suits the device.
        """
        if device.type == "cuda":
            from mars_serve.engine.kernels import gpu  # noqa: F401 -- adds all kernels of a step
        self.page_size = page_size
        self.tiling = tiling or tiling_of(group, page_size, dtype, device)
        self._layers, self._device = group, device
        self._waste = num_pages * page_size  # masks and padding write to one more page, never read
        size = (group.num_layers, num_pages + 1, page_size, group.kv_heads)
        # [layers, pages + 1, page_size, kv_heads, key_dim or value_dim]
        self.keys = torch.zeros(*size, group.key_dim, dtype=dtype, device=device)
        self.values = self.keys[..., : group.value_dim]
        if not group.value_in_key:
            self.values = torch.zeros(*size, group.value_dim, dtype=dtype, device=device)

    def prepare(self, batch: StepBatch) -> PagedMetadata:
        """See `Attention.prepare`."""
        shape = StepShape.of(batch, self.page_size)
        numbers = host_numbers(sum(self.sizes(shape)), self._device)
        self.pack(batch, shape, numbers.numpy())
        return self.unpack(to_device(numbers, self._device), shape)

    def sizes(self, shape: StepShape) -> list[int]:
        """Return the integers of each part of a step's metadata, in the order of `unpack`."""
        return [
            *[shape.num_positions] * 4,
            shape.num_positions * self._layers.is_bounded,
            shape.num_positions * COMBINE_FIELDS,
            shape.num_rows * shape.num_pages,
            self.tiling.most_pieces(shape) * PIECE_FIELDS,
        ]

    def pack(self, batch: StepBatch, shape: StepShape, numbers: Numbers) -> None:
        """Write a step's metadata, padded to ``shape``, which holds it, for `unpack`.

        ``numbers``, int64 [sum of `sizes`], is overwritten.
        """
        numbers.fill(0)
        ends = accumulate(self.sizes(shape), initial=0)
        slots, positions, leading, own, oldest, combine, table, pieces = (
            numbers[begin:end] for begin, end in pairwise(ends)
        )
        used, rows = batch.num_positions, Rows.of(batch)
        pages = self._page_table(batch.rows, rows)
        num_pages = min(pages.shape[1], shape.num_pages)
        table.reshape(shape.num_rows, -1)[: len(pages), :num_pages] = pages[:, :num_pages]
        slots[:] = self._waste
        positions[: len(batch.position_ids)] = batch.position_ids
        row = np.repeat(np.arange(len(batch.rows)), rows.lengths)
        offset = np.arange(used) - rows.starts[row]
        leading[:used], own[:used] = batch.visible
        is_token = offset < rows.num_tokens[row]
        row, token = row[is_token], (rows.num_cached[row] + offset)[is_token]
        page, rest = np.divmod(token, self.page_size)
        slots[:used][is_token] = pages[row, page] * self.page_size + rest
        if self._layers.is_bounded:
            oldest[:] = self._layers.oldest(positions)
        plan(
            rows,
            shape,
            self.tiling,
            pieces.reshape(-1, PIECE_FIELDS),
            combine.reshape(-1, COMBINE_FIELDS),
            oldest if self._layers.is_bounded else None,
        )

    def _page_table(self, batch: list[BatchRow], rows: Rows) -> Numbers:
        counts = -(-(rows.num_cached + rows.num_tokens) // self.page_size)
        table = np.zeros((len(batch), counts.max(initial=0)), dtype=np.int64)
        for row, count, each in zip(table, counts.tolist(), batch, strict=True):
            row[:count] = self._layers.pages(each)[:count]
        return table

    def unpack(self, numbers: Tensor, shape: StepShape) -> PagedMetadata:
        """Return the metadata of a step, views of its integers on the device."""
        slots, positions, leading, own, oldest, combine, table, pieces = torch.split(
            numbers, self.sizes(shape)
        )
        return PagedMetadata(
            shape=shape,
            slots=slots,
            positions=positions,
            leading=leading,
            own=own,
            oldest=oldest if self._layers.is_bounded else None,
            combine=combine.view(-1, COMBINE_FIELDS),
            page_table=table.view(shape.num_rows, shape.num_pages),
            pieces=pieces.view(-1, PIECE_FIELDS),
        )

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        metadata: PagedMetadata,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        is_cached: bool = False,
    ) -> Tensor:
        """See `Attention.attend`.

        Queries, keys and values may be views, contiguous in their last dimension.
        """
        if not is_cached:
            parts = [(self.keys, key), (self.values, value)]
            for pages, fresh in parts[: 1 if self._layers.value_in_key else 2]:
                pages[layer].flatten(0, 1).index_copy_(0, metadata.slots, fresh)
        shape = metadata.shape
        output: Tensor = torch.ops.marsray.paged_attention.default(
            query,
            key,
            value,
            self.keys[layer],
            self.values[layer],
            metadata.page_table,
            metadata.leading,
            metadata.own,
            metadata.positions,
            metadata.pieces,
            metadata.combine,
            scaling,
            self.tiling.block_m(shape),
            self.tiling.block_n,
            self.tiling.num_slots(shape),
            metadata.oldest,
            softcap,
            sinks,
        )
        return output

    def recover(self) -> None:
        """Do nothing, see `Attention.recover`: queries read nothing but the keys that they see."""


def tiling_of(
    group: LayerGroup, page_size: int, dtype: torch.dtype, device: torch.device
) -> Tiling:
    """Return how to cut steps of a model on a device."""
    pieces = _CPU_PIECES
    if device.type == "cuda":
        pieces = torch.cuda.get_device_properties(device).multi_processor_count
    largest_block = largest_block_of(group.head_dim, dtype)
    heads = heads_of_tile(group.per_kv, largest_block)
    return Tiling(
        heads=heads,
        page_size=page_size,
        block_n=block_n_of(group, dtype, has_large_memory(device)),
        num_pieces=max(1, pieces // (group.heads // heads)),
        largest_block=largest_block,
    )


def block_n_of(group: LayerGroup, dtype: torch.dtype, is_large: bool) -> int:
    """Return the keys in a block, on a device with large shared memory or another one.

    Blocks of 16 KiB fill shared memory well, or of twice that where values are part of keys. In
    float32, which is multiplied without tensor cores, the registers hold less.
    """
    numbers = 2048 if dtype == torch.float32 else 8192
    numbers *= 1 + (group.value_in_key and is_large)
    return max(16, min(64, numbers // power_of_two(group.head_dim)))


def largest_block_of(head_dim: int, dtype: torch.dtype) -> int:
    """Return the most rows of a tile's matrix products whose results the registers hold."""
    if dtype == torch.float32:
        return 32 if head_dim <= 256 else 16
    return 128 if head_dim <= 128 else 64
