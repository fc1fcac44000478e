"""Attention of one step by a paged flash kernel, in shapes that can be fixed beforehand.

Attention has two parts, merged by their log-sum-exps. All cached tokens are visible to each of a
row's positions; a paged kernel reads them in place, without a mask. The positions of a row see each
other under a small attention bias in narrow rows, and by a causal kernel in prompt chunks. Keys and
values of masks are never read by a later step and are not kept.

A step's metadata is one list of integers, padded to a `StepShape`, which a captured graph reads
from a fixed address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest

from mars_serve.engine.attention.interface import KeyValueShape
from mars_serve.engine.attention.paged_kernel import PagedKernel
from mars_serve.engine.batch import BatchRow, StepBatch

MAX_NARROW = 64
"""Most positions of a narrow row, which attends to itself by plain matrix products."""


@dataclass(frozen=True)
class StepShape:
    """Sizes that a step's integers are padded to."""

    num_positions: int
    num_rows: int
    num_pages: int
    """Most pages of cached tokens of a row; 0 if no row has any."""
    num_narrow: int
    """Rows of the rectangle; 0 for none."""
    width: int
    """Positions of a narrow row, padding included."""
    num_wide: int = 0
    num_wide_positions: int = 0
    """Positions of all wide rows together."""
    wide_width: int = 0

    @classmethod
    def of(cls, batch: StepBatch, page_size: int) -> StepShape:
        """Return the smallest shape that holds a step."""
        narrow, wide = _split(batch.rows)
        return cls(
            num_positions=len(batch.ids),
            num_rows=len(batch.rows),
            num_pages=cached_pages(batch, page_size),
            num_narrow=len(narrow),
            width=max((row.length for row in narrow), default=0),
            num_wide=len(wide),
            num_wide_positions=sum(row.length for row in wide),
            wide_width=max((row.length for row in wide), default=0),
        )

    @property
    def sizes(self) -> list[int]:
        """Integers of each part, in the order in which they are packed."""
        return [
            *[self.num_positions] * 5,
            self.num_rows + 1,
            self.num_rows,
            self.num_rows * self.num_pages,
            *[self.num_narrow] * 2,
            self.num_wide_positions,
            self.num_wide + 1,
        ]


def cached_pages(batch: StepBatch, page_size: int) -> int:
    """Return the most pages of cached tokens that a row of a step has."""
    return max((-(-row.num_cached // page_size) for row in batch.rows), default=0)


@dataclass(frozen=True)
class VarlenMetadata:
    """Attention metadata of one step."""

    shape: StepShape
    slots: Tensor  # int64 [positions], slots of keys and values
    has_cached: Tensor  # bool [positions, 1], whether the position's row has cached tokens
    order: Tensor  # int64 [positions], each position's index in rectangle and wide rows laid flat
    query_starts: Tensor  # int32 [rows + 1], in queries folded as `_attend_cached` does
    num_cached: Tensor  # int32 [rows]
    key_starts: Tensor | None  # int32 [rows + 1]
    pages: Tensor  # int32 [rows, pages]
    rectangle: Tensor  # int64 [narrow * width], positions
    bias: Tensor  # float32 [narrow, 1, 1, width, width], 0 where a position sees another, else -inf
    wide_positions: Tensor  # int64 [wide positions]
    wide_starts: Tensor  # int32 [wide rows + 1]


class VarlenAttention:
    """Attends over pages in place; see `Attention`."""

    def __init__(
        self,
        shape: KeyValueShape,
        *,
        num_query_heads: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kernel: PagedKernel,
    ) -> None:
        """Reserve pages.

        Args:
            shape: size of the model's keys and values.
            num_query_heads: a multiple of the key/value heads.
            num_pages: pages for committed tokens.
            page_size: tokens in a page.
            dtype: type of keys and values.
            device: device of keys and values.
            kernel: kernel that reads the pages.
        """
        self.page_size, self.kernel = page_size, kernel
        self._device = device
        self._per_kv = num_query_heads // shape.num_heads
        self._waste = num_pages * page_size  # masks and padding write to one more page, never read
        # [layers, pages + 1, page_size, kv_heads, head_dim]
        size = (shape.num_layers, num_pages + 1, page_size, shape.num_heads, shape.head_dim)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    def prepare(self, batch: StepBatch) -> VarlenMetadata:
        """See `Attention.prepare`."""
        shape = StepShape.of(batch, self.page_size)
        return self.unpack(torch.tensor(self.pack(batch, shape), device=self._device), shape)

    def pack(self, batch: StepBatch, shape: StepShape) -> list[int]:
        """Return a step as ``sum(shape.sizes)`` integers, padding included, for `unpack`."""
        rows = batch.rows
        narrow, wide = _split(rows)
        visible = [row.visible() for row in rows]
        tables = [row.pages[: -(-row.num_cached // self.page_size)] for row in rows]
        table = [page for pages in tables for page in _padded(pages, shape.num_pages, 0)]
        parts: list[tuple[list[int], int]] = [
            (self._slots(rows), self._waste),
            ([int(row.num_cached > 0) for row in rows for _ in range(row.length)], 0),
            (_order(rows, shape), 0),
            ([position for leading, _ in visible for position in leading], 1),
            ([position for _, own in visible for position in own], 0),
            ([0, *accumulate(row.length for row in rows)], batch.num_positions),
            ([row.num_cached for row in rows], 0),
            (table, 0),
            ([row.start for row in narrow], 0),
            ([row.length for row in narrow], 0),
            ([p for row in wide for p in range(row.start, row.start + row.length)], 0),
            ([0, *accumulate(row.length for row in wide)], 0),
        ]
        numbers: list[int] = []
        for (values, filler), size in zip(parts, shape.sizes, strict=True):
            numbers += _padded(values, size, filler)
        return numbers

    def unpack(self, numbers: Tensor, shape: StepShape) -> VarlenMetadata:
        """Return the metadata of a step from its integers, int64 on the device.

        Nothing is copied to the host, so this may be part of a captured graph.
        """
        parts = torch.split(numbers, shape.sizes)
        slots, has_cached, order, leading, own = parts[:5]
        row_starts, cached, table, starts, lengths, wide, ends = parts[5:]
        offset = torch.arange(shape.width, device=numbers.device)
        # A row is padded with its own first position: then no other row can spread a NaN to it.
        inside = torch.where(offset < lengths[:, None], offset, 0)  # [narrow, width]
        rectangle = (starts[:, None] + inside).flatten()
        size = (shape.num_narrow, shape.width, 1)
        seen, begin = (part[rectangle].view(size) for part in (leading, own))
        visible = (offset < seen) | ((offset >= begin) & (offset <= inside[:, :, None]))
        bias = torch.zeros(visible.shape, device=numbers.device).masked_fill_(~visible, -torch.inf)
        key_starts = F.pad(cached.cumsum(0), (1, 0)).int() if self.kernel.needs_key_starts else None
        return VarlenMetadata(
            shape=shape,
            slots=slots,
            has_cached=has_cached.bool()[:, None],
            order=order,
            query_starts=(row_starts * self._per_kv).int(),
            num_cached=cached.int(),
            key_starts=key_starts,
            pages=table.int().view(shape.num_rows, shape.num_pages),
            rectangle=rectangle,
            bias=bias[:, None, None],
            wide_positions=wide,
            wide_starts=ends.int(),
        )

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        metadata: VarlenMetadata,
    ) -> Tensor:
        """See `Attention.attend`."""
        output = self.attend_written(layer, query, key, value, scaling, metadata)
        for pages, fresh in ((self.keys[layer], key), (self.values[layer], value)):
            pages.flatten(0, 1).index_copy_(0, metadata.slots, fresh)
        return output

    def attend_written(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        metadata: VarlenMetadata,
    ) -> Tensor:
        """Attend like `attend` where the keys and values have been written to their pages."""
        keys, values = self.keys[layer], self.values[layer]
        output, lse = self._attend_own(query, key, value, scaling, metadata)
        if metadata.shape.num_pages:
            cached, cached_lse = self._attend_cached(query, keys, values, scaling, metadata)
            # exp(lse) of each part is its weight in the softmax over both; an empty part has none.
            share = torch.sigmoid(cached_lse - lse).masked_fill(~metadata.has_cached, 0.0)
            cached = cached.float().masked_fill(~metadata.has_cached[..., None], 0.0)
            output = torch.lerp(output, cached, share[..., None])
        return output.to(query.dtype)

    def recover(self) -> None:
        """See `Attention.recover`.

        A page may be reused with old numbers behind its tokens, and a kernel may multiply them by
        a weight of 0.
        """
        for pages in (self.keys, self.values):
            pages.nan_to_num_(0.0, 0.0, 0.0)

    def _attend_cached(
        self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, metadata: VarlenMetadata
    ) -> tuple[Tensor, Tensor]:
        """Attend over the cached tokens: [positions, heads, head_dim] and log-sum-exps.

        Query heads that share a key/value head become further queries of it, as no mask tells them
        apart, so that each page is read once for all of them.
        """
        shape, (num_positions, num_heads, head_dim) = metadata.shape, query.shape
        folded = query.view(num_positions, -1, self._per_kv, head_dim).transpose(1, 2)
        output, lse = self.kernel.call(
            folded.flatten(0, 1),  # [positions * per_kv, kv_heads, head_dim]
            keys,
            values,
            metadata.query_starts,
            metadata.key_starts,
            max(shape.width, shape.wide_width) * self._per_kv,
            shape.num_pages * self.page_size,
            return_aux=AuxRequest(lse=True),
            scale=scaling,
            seqused_k=metadata.num_cached,
            block_table=metadata.pages,
            num_splits=self.kernel.num_splits,
        )
        output = output.view(num_positions, self._per_kv, -1, head_dim).transpose(1, 2)
        lse = lse.view(-1, num_positions, self._per_kv).transpose(0, 1)
        return output.flatten(1, 2), lse.reshape(num_positions, num_heads)

    def _attend_own(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, metadata: VarlenMetadata
    ) -> tuple[Tensor, Tensor]:
        """Attend within the step: float32 [positions, heads, head_dim] and log-sum-exps."""
        parts = []
        if metadata.shape.num_narrow:
            q, k, v = (part.index_select(0, metadata.rectangle) for part in (query, key, value))
            parts.append(_attend_rectangle(q, k, v, metadata.bias, scaling))
        if metadata.shape.num_wide:
            q, k, v = (
                part.index_select(0, metadata.wide_positions) for part in (query, key, value)
            )
            parts.append(self._attend_wide(q, k, v, scaling, metadata))
        output, lse = (torch.cat(part) for part in zip(*parts, strict=True))
        return output.index_select(0, metadata.order), lse.index_select(0, metadata.order)

    def _attend_wide(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, metadata: VarlenMetadata
    ) -> tuple[Tensor, Tensor]:
        output, lse = self.kernel.call(
            query,
            key,
            value,
            metadata.wide_starts,
            metadata.wide_starts,
            metadata.shape.wide_width,
            metadata.shape.wide_width,
            return_aux=AuxRequest(lse=True),
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=self._per_kv > 1,
        )
        return output.float(), lse.transpose(0, 1)

    def _slots(self, rows: Sequence[BatchRow]) -> list[int]:
        size = self.page_size
        slots: list[int] = []
        for row in rows:
            tokens = range(row.num_cached, row.num_cached + row.num_tokens)
            slots += [row.pages[token // size] * size + token % size for token in tokens]
            slots += [self._waste] * row.num_masks
        return slots


def _split(rows: Sequence[BatchRow]) -> tuple[list[BatchRow], list[BatchRow]]:
    """Split rows into narrow and wide ones.

    The wide ones attend by a causal kernel, so rows with several groups of masks are always narrow.
    """
    narrow = [row for row in rows if _is_narrow(row)]
    return narrow, [row for row in rows if not _is_narrow(row)]


def _is_narrow(row: BatchRow) -> bool:
    return row.length <= MAX_NARROW or not row.is_causal


def _order(rows: Sequence[BatchRow], shape: StepShape) -> list[int]:
    """Return each position's index in the results of the rectangle followed by the wide rows."""
    order: list[int] = []
    narrow, wide = 0, shape.num_narrow * shape.width
    for row in rows:
        if _is_narrow(row):
            order += range(narrow, narrow + row.length)
            narrow += shape.width
        else:
            order += range(wide, wide + row.length)
            wide += row.length
    return order


def _padded(values: list[int], size: int, filler: int) -> list[int]:
    assert len(values) <= size, "the step fits its shape"
    return values + [filler] * (size - len(values))


def _attend_rectangle(
    query: Tensor,  # [rows * width, heads, head_dim]
    key: Tensor,  # [rows * width, kv_heads, head_dim]
    value: Tensor,  # [rows * width, kv_heads, head_dim]
    bias: Tensor,  # float32 [rows, 1, 1, width, width]
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Attend within each row, in float32, because the result is merged with another part."""
    width, (_, num_kv_heads, head_dim) = bias.shape[-1], key.shape
    rows = len(key) // width
    keys, values = (
        part.float().view(rows, width, num_kv_heads, head_dim).transpose(1, 2)
        for part in (key, value)
    )  # [rows, kv_heads, width, head_dim]
    queries = query.float().view(rows, width, num_kv_heads, -1, head_dim)
    queries = queries.permute(0, 2, 3, 1, 4)  # [rows, kv_heads, per_kv, width, head_dim]
    folded = (queries * scaling).flatten(2, 3)
    scores = torch.matmul(folded, keys.transpose(-1, -2)).view(*queries.shape[:-1], width) + bias
    lse = scores.logsumexp(-1)  # [rows, kv_heads, per_kv, width]
    weights = (scores - lse[..., None]).exp()
    output = torch.matmul(weights.flatten(2, 3), values).view(queries.shape)
    output = output.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
    return output, lse.permute(0, 3, 1, 2).flatten(2, 3).flatten(0, 1)
