"""Attention over a contiguous copy of each row's pages, exact on any device.

Keys and values of masks go to scratch pages that no later step reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mars_serve.engine.attention.interface import KeyValueShape
from mars_serve.engine.batch import BatchRow, StepBatch

_NARROW = 16
"""Most positions of a row that is padded to a common width with other such rows."""
_PLAIN_FROM = 2**18
"""Least key elements at which two matrix products beat one fused call, for rows of up to `_NARROW`
positions (measured)."""
_GROUP_COST = 150_000
"""Padding, in key elements, that takes as long as the calls of one more group (measured)."""
_WIDTH_COST = 2_500_000
"""Padding in queries, in products of a query's element with a key's, that takes as long as the
calls of one more group (measured)."""
_KEY_BLOCK = 512
"""Number of keys in a block of torch's CPU kernel; keys are padded to a multiple of it if results
must not depend on padding."""


@dataclass(frozen=True)
class _Group:
    """Rows that attend in one call, padded to a rectangle."""

    num_rows: int
    width: int
    positions: Tensor | None
    """int64 [rows * width], positions in the step; None if they are all positions in order."""
    pages: Tensor
    """int64 [2 * rows * kv_heads * pages], pages of keys, then of values, laid out by head."""
    bias: Tensor
    """float [rows, 1, per_kv * width, keys], 0 for a visible key and -inf for any other."""


@dataclass(frozen=True)
class GatheredMetadata:
    """Attention metadata of one step."""

    slots: Tensor
    """int64 [2 * positions * kv_heads], slots of each position's keys, then of its values."""
    groups: list[_Group]
    order: Tensor | None
    """int64 [positions], index of each position in the concatenated outputs of the groups; None if
    these are in order."""


class GatheredAttention:
    """Attends over a contiguous copy of each row's pages; see `Attention`."""

    def __init__(
        self,
        shape: KeyValueShape,
        *,
        num_query_heads: int,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_masks: int,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
    ) -> None:
        """Reserve pages for committed tokens, and room for rows of at most ``max_masks`` masks.

        If ``batch_invariant``, each position is attended by itself in calls of one shape, so that
        no bit of its result depends on the other positions of the step.
        """
        self.page_size, self.num_pages = page_size, num_pages
        self._shape, self._device, self._dtype = shape, device, dtype
        self._per_kv = num_query_heads // shape.num_heads
        self._batch_invariant = batch_invariant
        self._scratch_per_row = -(-max_masks // page_size)
        # Padding reads a page of zeros and writes to another page.
        self._zeros, self._waste, self._scratch = num_pages, num_pages + 1, num_pages + 2
        num_all = self._scratch + max_rows * self._scratch_per_row
        size = (shape.num_layers, 2, num_all, shape.num_heads, page_size, shape.head_dim)
        self._pages = torch.zeros(size, dtype=dtype, device=device)
        self._gathered = torch.empty(0, dtype=dtype, device=device)
        self._heads = np.arange(shape.num_heads)

    @property
    def keys(self) -> Tensor:
        """Keys, [layers, pages, kv_heads, page_size, head_dim]; scratch pages follow the pool's."""
        return self._pages[:, 0]

    @property
    def values(self) -> Tensor:
        """Values, laid out as `keys`."""
        return self._pages[:, 1]

    def prepare(self, batch: StepBatch) -> GatheredMetadata:
        """See `Attention.prepare`."""
        scratch = self._scratch_pages(batch.rows)
        self._clear_fresh(batch.rows)
        if self._batch_invariant:
            members = [[index] for index in range(len(batch.rows))]
        else:
            members = self._members(batch.rows)
        num_positions = len(batch.ids)
        return GatheredMetadata(
            slots=self._slots(batch, scratch),
            groups=[
                self._group([(batch.rows[i], scratch[i]) for i in group], num_positions)
                for group in members
            ],
            order=self._order(batch, members),
        )

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        metadata: GatheredMetadata,
    ) -> Tensor:
        """See `Attention.attend`."""
        pages, head_dim = self._pages[layer], query.shape[-1]
        fresh = torch.cat([key, value]).view(-1, head_dim)
        pages.view(-1, head_dim).index_copy_(0, metadata.slots, fresh)
        attend = self._attend_invariantly if self._batch_invariant else self._attend_group
        outputs = [attend(group, query, pages, scaling) for group in metadata.groups]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output if metadata.order is None else output.index_select(0, metadata.order)

    def recover(self) -> None:
        """See `Attention.recover`."""
        self._clear(list(range(self._waste, self._pages.shape[2])))

    def _clear_fresh(self, rows: Sequence[BatchRow]) -> None:
        """Zero the pages that rows start to fill in this step.

        Keys that no query sees still enter a product, with weight 0, and a NaN among them would
        spread.
        """
        size = self.page_size
        pages = [
            page
            for row in rows
            for page in row.pages[-(-row.num_cached // size) : self._num_pages(row)]
        ]
        if pages:
            self._clear(pages)

    def _clear(self, pages: list[int]) -> None:
        self._pages.index_fill_(2, self._to_device(np.array(pages)), 0.0)

    def _attend_group(self, group: _Group, query: Tensor, pages: Tensor, scaling: float) -> Tensor:
        """Attend in one group: [rows * width, heads, head_dim], padding included."""
        rows, width, kv_heads = group.num_rows, group.width, self._shape.num_heads
        queries = query if group.positions is None else query.index_select(0, group.positions)
        # Query heads that share a key/value head become further queries of it: no key is repeated.
        folded = queries.view(rows, width, kv_heads, self._per_kv, -1)
        folded = folded.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [rows, kv_heads, per_kv * width, d]
        keys, values = self._gather(group, pages)
        if keys.numel() > _PLAIN_FROM and width <= _NARROW and keys.dtype == torch.float32:
            output = _plain_attention(folded, keys, values, group.bias, scaling)
        else:
            output = F.scaled_dot_product_attention(
                folded, keys, values, attn_mask=group.bias, scale=scaling
            )
        output = output.view(rows, kv_heads, self._per_kv, width, -1)
        return output.permute(0, 3, 1, 2, 4).reshape(rows * width, *query.shape[1:])

    def _attend_invariantly(
        self, group: _Group, query: Tensor, pages: Tensor, scaling: float
    ) -> Tensor:
        """Attend in a group of one row, each position by itself; see `_attend_group`."""
        width, kv_heads = group.width, self._shape.num_heads
        queries = query if group.positions is None else query.index_select(0, group.positions)
        keys, values = (part.expand(width, -1, -1, -1) for part in self._gather(group, pages))
        bias = group.bias[0, 0].view(self._per_kv, width, 1, -1).transpose(0, 1)
        output = F.scaled_dot_product_attention(
            queries.view(width, kv_heads, self._per_kv, -1),
            keys,
            values,
            attn_mask=bias.transpose(1, 2),  # [width, 1, per_kv, keys]
            scale=scaling,
        )
        return output.reshape(width, *query.shape[1:])

    def _gather(self, group: _Group, pages: Tensor) -> Tensor:
        """Copy a group's keys and values side by side: [2, rows, kv_heads, keys, head_dim].

        All calls share one buffer, because a large new allocation takes longer than the copy.
        """
        size = (len(group.pages), self.page_size * self._shape.head_dim)
        if self._gathered.numel() < size[0] * size[1]:
            self._gathered = self._gathered.new_empty(size[0] * size[1])
        buffer = self._gathered[: size[0] * size[1]].view(size)
        torch.index_select(pages.view(-1, size[1]), 0, group.pages, out=buffer)
        return buffer.view(2, group.num_rows, self._shape.num_heads, -1, self._shape.head_dim)

    def _members(self, rows: Sequence[BatchRow]) -> list[list[int]]:
        """Return the row indices of each group: rows of similar length and number of keys."""
        widths: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            key = 0 if row.length <= _NARROW else (row.length - 1).bit_length()
            widths.setdefault(key, []).append(index)
        budget = _GROUP_COST / (self.page_size * self._shape.num_heads * self._shape.head_dim)
        groups = []
        for members in self._split_off_ones(rows, list(widths.values())):
            sizes = [self._num_pages(rows[index]) for index in members]
            if (max(sizes) - min(sizes)) * len(sizes) <= budget:
                groups.append(members)
                continue
            members.sort(key=lambda index: -self._num_pages(rows[index]))
            groups += _split(members, sorted(sizes, reverse=True), budget)
        return groups

    def _split_off_ones(self, rows: Sequence[BatchRow], groups: list[list[int]]) -> list[list[int]]:
        """Split rows of one position off from wider ones if their padding would take longer."""
        split = []
        for members in groups:
            ones = [index for index in members if rows[index].length == 1]
            width = max(rows[index].length for index in members)
            keys = sum(rows[index].num_cached for index in ones)
            saved = (width - 1) * keys * self._per_kv * self._shape.num_heads * self._shape.head_dim
            if len(ones) < len(members) and saved > _WIDTH_COST:
                split += [ones, [index for index in members if rows[index].length > 1]]
            else:
                split.append(members)
        return split

    def _num_pages(self, row: BatchRow) -> int:
        """Count the pages of a row's tokens, those of this step included."""
        return -(-(row.num_cached + row.num_tokens) // self.page_size)

    def _scratch_pages(self, rows: Sequence[BatchRow]) -> list[list[int]]:
        starts = [self._scratch + index * self._scratch_per_row for index in range(len(rows))]
        sizes = [-(-row.num_masks // self.page_size) for row in rows]
        assert max(sizes) <= self._scratch_per_row, "a row's masks fit its scratch pages"
        return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]

    def _slots(self, batch: StepBatch, scratch: list[list[int]]) -> Tensor:
        size = self.page_size
        slots: list[int] = []
        for row, masks in zip(batch.rows, scratch, strict=True):
            tokens = range(row.num_cached, row.num_cached + row.num_tokens)
            slots += [row.pages[t // size] * size + t % size for t in tokens]
            slots += [masks[m // size] * size + m % size for m in range(row.num_masks)]
        slots += [self._waste * size] * (len(batch.ids) - len(slots))
        # Pages are laid out by head: (page, offset) of head h lies at (page * heads + h, offset).
        page, offset = np.divmod(np.array(slots), size)
        flat = (page * self._shape.num_heads * size + offset)[:, None] + self._heads * size
        return self._to_device(self._for_keys_and_values(flat.ravel(), size))

    def _for_keys_and_values(self, indices: NDArray[np.int64], per_head: int) -> NDArray[np.int64]:
        """Append to indices into a layer's keys the same ones into its values, which lie behind.

        ``indices`` count units, whole head pages or slots: ``per_head`` in one page of one head.
        """
        num_keys = self._pages.shape[2] * self._shape.num_heads * per_head
        return np.concatenate([indices, indices + num_keys])

    def _group(self, members: list[tuple[BatchRow, list[int]]], num_positions: int) -> _Group:
        rows = [row for row, _ in members]
        width = max(row.length for row in rows)
        used = [self._num_pages(row) for row in rows]
        tables = [
            row.pages[:count] + scratch for (row, scratch), count in zip(members, used, strict=True)
        ]
        num_pages = max(map(len, tables))
        if self._batch_invariant:
            num_pages += -num_pages % -(-_KEY_BLOCK // self.page_size)
        table = np.array([pages + [self._zeros] * (num_pages - len(pages)) for pages in tables])
        pages = (
            table[:, None] * self._shape.num_heads + self._heads[:, None]
        )  # [rows, heads, pages]
        return _Group(
            num_rows=len(rows),
            width=width,
            positions=self._positions(rows, width, num_positions),
            pages=self._to_device(self._for_keys_and_values(pages.ravel(), 1)),
            bias=self._bias(rows, used, width, num_pages),
        )

    def _positions(self, rows: list[BatchRow], width: int, num_positions: int) -> Tensor | None:
        if len(rows) * width == num_positions and all(
            row.start == index * width and row.length == width for index, row in enumerate(rows)
        ):
            return None
        positions = [
            row.start + (offset if offset < row.length else 0)
            for row in rows
            for offset in range(width)
        ]
        return self._to_device(np.array(positions))

    def _bias(self, rows: list[BatchRow], used: list[int], width: int, num_pages: int) -> Tensor:
        """Return the attention bias of a group; padding sees some key, too, as softmax needs."""
        cached = np.array([[row.num_cached] for row in rows])
        tokens = np.array([[row.num_tokens] for row in rows])
        offset, key = np.arange(width), np.arange(num_pages * self.page_size)
        seen = cached + np.minimum(offset + 1, tokens)  # [rows, width]
        first = np.array(used)[:, None] * self.page_size  # [rows, 1]
        end = first + offset + 1 - tokens  # [rows, width]
        if not all(row.is_causal for row in rows):
            first = first + np.zeros_like(offset)  # [rows, width]
            for index, row in enumerate(rows):
                leading, own = (np.array(part)[row.num_tokens :] for part in row.visible())
                seen[index, row.num_tokens : row.length] = row.num_cached + leading
                first[index, row.num_tokens : row.length] += own - row.num_tokens
        visible = key < seen[:, :, None]
        if any(row.num_masks for row in rows):
            visible |= (key >= first[:, :, None]) & (key < end[:, :, None])
        bias = np.where(visible, np.float32(0), np.float32(-np.inf))[:, None]
        if self._per_kv > 1:
            bias = np.tile(bias, (1, 1, self._per_kv, 1))
        return torch.from_numpy(bias).to(self._device, self._dtype, non_blocking=True)

    def _order(self, batch: StepBatch, members: list[list[int]]) -> Tensor | None:
        where = [0] * len(batch.ids)
        offset = 0
        for group in members:
            width = max(batch.rows[index].length for index in group)
            for index in group:
                row = batch.rows[index]
                where[row.start : row.start + row.length] = range(offset, offset + row.length)
                offset += width
        if offset == len(where) and where == list(range(offset)):
            return None
        return self._to_device(np.array(where))

    def _to_device(self, numbers: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(numbers).to(self._device, non_blocking=True)


def _split(members: list[int], sizes: list[int], budget: float) -> list[list[int]]:
    """Split rows, sorted by falling size, wherever that saves more padding than ``budget``."""
    savings = [(sizes[0] - size) * (len(sizes) - index) for index, size in enumerate(sizes)]
    saved, cut = max(zip(savings, range(len(sizes)), strict=True))
    if saved <= budget:
        return [members]
    return [
        *_split(members[:cut], sizes[:cut], budget),
        *_split(members[cut:], sizes[cut:], budget),
    ]


def _plain_attention(
    queries: Tensor,  # [rows, kv_heads, per_kv * width, head_dim]
    keys: Tensor,  # [rows, kv_heads, keys, head_dim]
    values: Tensor,  # [rows, kv_heads, keys, head_dim]
    bias: Tensor,  # [rows, 1, per_kv * width, keys]
    scaling: float,
) -> Tensor:
    """Attend by two matrix products, in float32, which needs no wider accumulator."""
    scores = torch.matmul(queries * scaling, keys.transpose(-1, -2)).add_(bias)
    return torch.matmul(scores.softmax(-1), values)
