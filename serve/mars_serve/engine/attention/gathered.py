"""Attention of one step over paged keys and values, through transformers' attention interface.

The rows of a step lie side by side. Each sees the stored pages of its own request and, causally,
its own places of the step. Only committed tokens' keys and values are written to the request's
pages; what a mask computed goes to scratch pages that no later step reads.
Source: ``transformers.AttentionInterface``. This implementation gathers each row's pages and is
exact on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

from mars_serve.engine.batch import Row, StepBatch
from mars_serve.engine.execution.step_function import attend_by_operator

ATTENTION_NAME = "marsray_paged"

_NARROW = 16
"""Rows of up to so many places are padded to a common width."""
_PLAIN_FROM = 2**18
"""Key elements from which two matrix products beat one fused call for narrow rows (measured)."""
_GROUP_COST = 150_000
"""Padding, in key elements, that costs as much as one more group's calls (measured)."""
_WIDTH_COST = 2_500_000
"""The same for padding in queries, in products of an element of a query with one of a key."""
_KEY_BLOCK = 512
"""Keys are padded to multiples of this where results must not depend on padding: it is the block
that torch's CPU kernel walks the keys in."""


@dataclass(frozen=True)
class KeyValueShape:
    """Size of one layer's keys, or values, of a token."""

    num_layers: int
    num_heads: int
    """Key/value heads."""
    head_dim: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> KeyValueShape:
        """That of a model."""
        heads = config.num_attention_heads
        return cls(
            config.num_hidden_layers,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
        )

    @property
    def elements_per_token(self) -> int:
        """Numbers that a token's keys and values take over all layers."""
        return 2 * self.num_layers * self.num_heads * self.head_dim


class Attention(Protocol):
    """One way to attend over pages. It owns the pages."""

    def plan(self, batch: StepBatch) -> Any:
        """What every layer of a step shares, on the device."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, plan: Any
    ) -> Tensor:
        """One layer: query [places, heads, head_dim], key and value [places, kv_heads, head_dim]
        to [places, heads, head_dim]; stores the committed tokens' keys and values.
        """

    def recover(self) -> None:
        """Clear what a row whose numbers went wrong may have left outside its pages."""


@dataclass(frozen=True)
class _Group:
    """Rows that attend in one call, padded to a rectangle."""

    num_rows: int
    width: int
    places: Tensor | None  # int64 [rows * width]; None where they are simply all places in order
    pages: Tensor  # int64 [2 * rows * kv_heads * pages], of keys, then of values, laid out by head
    hidden: Tensor  # float [rows, 1, per_kv * width, keys], 0 where a key is seen, else -inf


@dataclass(frozen=True)
class _GatherPlan:
    slots: Tensor  # int64 [2 * places * kv_heads], where each place's keys, then values go
    groups: list[_Group]
    order: Tensor | None  # int64 [places], each place's index in the groups' outputs laid flat


class GatheredAttention:
    """Attends over a contiguous copy of each row's pages."""

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
        """Reserve pages.

        Args:
            shape: of the model's keys and values.
            num_query_heads: a multiple of the key/value heads.
            num_pages: of committed tokens.
            page_size: tokens a page.
            max_rows: rows of a step at the most.
            max_masks: masks of a row at the most.
            dtype: of keys and values.
            device: where they lie.
            batch_invariant: attend each position by itself in calls of one shape, so that the
                result does not depend on what stands beside it, down to the last bit.
        """
        self.page_size, self.num_pages = page_size, num_pages
        self._shape, self._device, self._dtype = shape, device, dtype
        self._per_kv = num_query_heads // shape.num_heads
        self._batch_invariant = batch_invariant
        self._scratch_per_row = -(-max_masks // page_size)
        # Two pages stand in where there is none: zeros to read, and what padding writes.
        self._zeros, self._waste, self._scratch = num_pages, num_pages + 1, num_pages + 2
        num_all = self._scratch + max_rows * self._scratch_per_row
        size = (shape.num_layers, 2, num_all, shape.num_heads, page_size, shape.head_dim)
        self._pages = torch.zeros(size, dtype=dtype, device=device)
        self._gathered = torch.empty(0, dtype=dtype, device=device)
        self._heads = np.arange(shape.num_heads)

    @property
    def keys(self) -> Tensor:
        """[layers, pages, kv_heads, page_size, head_dim], behind the pages what is not theirs."""
        return self._pages[:, 0]

    @property
    def values(self) -> Tensor:
        """As `keys`."""
        return self._pages[:, 1]

    def plan(self, batch: StepBatch) -> _GatherPlan:
        """See `Attention.plan`."""
        scratch = self._scratch_pages(batch.rows)
        self._clear_fresh(batch.rows)
        if self._batch_invariant:
            members = [[index] for index in range(len(batch.rows))]
        else:
            members = self._members(batch.rows)
        num_places = len(batch.ids)
        return _GatherPlan(
            slots=self._slots(batch, scratch),
            groups=[
                self._group([(batch.rows[i], scratch[i]) for i in group], num_places)
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
        plan: _GatherPlan,
    ) -> Tensor:
        """See `Attention.attend`."""
        stored, head_dim = self._pages[layer], query.shape[-1]
        fresh = torch.cat([key, value]).view(-1, head_dim)
        stored.view(-1, head_dim).index_copy_(0, plan.slots, fresh)
        attend = self._attend_invariantly if self._batch_invariant else self._attend_group
        outputs = [attend(group, query, stored, scaling) for group in plan.groups]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output if plan.order is None else output.index_select(0, plan.order)

    def recover(self) -> None:
        """See `Attention.recover`."""
        self._clear(list(range(self._waste, self._pages.shape[2])))

    def _clear_fresh(self, rows: Sequence[Row]) -> None:
        """Zero the pages that rows start in this step: hidden keys still enter a product with
        weight 0, and what is not a number would spread from there.
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

    def _attend_group(self, group: _Group, query: Tensor, stored: Tensor, scaling: float) -> Tensor:
        """[rows * width, heads, head_dim], padding included."""
        rows, width, kv_heads = group.num_rows, group.width, self._shape.num_heads
        queries = query if group.places is None else query.index_select(0, group.places)
        # Query heads that share a key/value head become further queries of it: nothing is repeated.
        folded = queries.view(rows, width, kv_heads, self._per_kv, -1)
        folded = folded.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [rows, kv_heads, per_kv * width, d]
        keys, values = self._gather(group, stored)
        if keys.numel() > _PLAIN_FROM and width <= _NARROW and keys.dtype == torch.float32:
            output = _plain_attention(folded, keys, values, group.hidden, scaling)
        else:
            output = F.scaled_dot_product_attention(
                folded, keys, values, attn_mask=group.hidden, scale=scaling
            )
        output = output.view(rows, kv_heads, self._per_kv, width, -1)
        return output.permute(0, 3, 1, 2, 4).reshape(rows * width, *query.shape[1:])

    def _attend_invariantly(
        self, group: _Group, query: Tensor, stored: Tensor, scaling: float
    ) -> Tensor:
        """`_attend_group` of a single row with each of its places as a batch entry of its own."""
        width, kv_heads = group.width, self._shape.num_heads
        queries = query if group.places is None else query.index_select(0, group.places)
        keys, values = (part.expand(width, -1, -1, -1) for part in self._gather(group, stored))
        mask = group.hidden[0, 0].view(self._per_kv, width, 1, -1).transpose(0, 1)
        output = F.scaled_dot_product_attention(
            queries.view(width, kv_heads, self._per_kv, -1),
            keys,
            values,
            attn_mask=mask.transpose(1, 2),  # [width, 1, per_kv, keys]
            scale=scaling,
        )
        return output.reshape(width, *query.shape[1:])

    def _gather(self, group: _Group, stored: Tensor) -> Tensor:
        """A group's keys and values: [2, rows, kv_heads, keys, head_dim], in a buffer that is
        reused: large new allocations cost more than the copy.
        """
        size = (len(group.pages), self.page_size * self._shape.head_dim)
        if self._gathered.numel() < size[0] * size[1]:
            self._gathered = self._gathered.new_empty(size[0] * size[1])
        buffer = self._gathered[: size[0] * size[1]].view(size)
        torch.index_select(stored.view(-1, size[1]), 0, group.pages, out=buffer)
        return buffer.view(2, group.num_rows, self._shape.num_heads, -1, self._shape.head_dim)

    def _members(self, rows: Sequence[Row]) -> list[list[int]]:
        """Indices of the rows of each group: of like length, and with little padding in keys."""
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

    def _split_off_ones(self, rows: Sequence[Row], groups: list[list[int]]) -> list[list[int]]:
        """Rows of a single place apart from those that they would be padded to, where it pays."""
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

    def _num_pages(self, row: Row) -> int:
        """Pages of a row's committed tokens, those of this step included."""
        return -(-(row.num_cached + row.num_tokens) // self.page_size)

    def _scratch_pages(self, rows: Sequence[Row]) -> list[list[int]]:
        starts = [self._scratch + index * self._scratch_per_row for index in range(len(rows))]
        sizes = [-(-row.num_masks // self.page_size) for row in rows]
        assert max(sizes) <= self._scratch_per_row, "rows have scratch pages of their own"
        return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]

    def _slots(self, batch: StepBatch, scratch: list[list[int]]) -> Tensor:
        size = self.page_size
        slots: list[int] = []
        for row, masks in zip(batch.rows, scratch, strict=True):
            tokens = range(row.num_cached, row.num_cached + row.num_tokens)
            slots += [row.pages[t // size] * size + t % size for t in tokens]
            slots += [masks[m // size] * size + m % size for m in range(row.num_masks)]
        slots += [self._waste * size] * (len(batch.ids) - len(slots))
        # pages are laid out by head: (page, offset) of head h lies at (page * heads + h, offset)
        page, offset = np.divmod(np.array(slots), size)
        flat = (page * self._shape.num_heads * size + offset)[:, None] + self._heads * size
        return self._to_device(self._of_keys_and_values(flat.ravel(), size))

    def _of_keys_and_values(self, places: NDArray[np.int64], per_head: int) -> NDArray[np.int64]:
        """Places in a layer's keys, then in its values, given those in the keys; ``per_head`` of
        them make a page of a head.
        """
        num_keys = self._pages.shape[2] * self._shape.num_heads * per_head
        return np.concatenate([places, places + num_keys])

    def _group(self, members: list[tuple[Row, list[int]]], num_places: int) -> _Group:
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
            places=self._places(rows, width, num_places),
            pages=self._to_device(self._of_keys_and_values(pages.ravel(), 1)),
            hidden=self._hidden(rows, used, width, num_pages),
        )

    def _places(self, rows: list[Row], width: int, num_places: int) -> Tensor | None:
        if len(rows) * width == num_places and all(
            row.start == index * width and row.length == width for index, row in enumerate(rows)
        ):
            return None
        places = [
            row.start + (offset if offset < row.length else 0)
            for row in rows
            for offset in range(width)
        ]
        return self._to_device(np.array(places))

    def _hidden(self, rows: list[Row], used: list[int], width: int, num_pages: int) -> Tensor:
        """Additive mask; padding sees something, so that no row is empty."""
        stored = np.array([[row.num_cached] for row in rows])
        tokens = np.array([[row.num_tokens] for row in rows])
        place, key = np.arange(width), np.arange(num_pages * self.page_size)
        seen = stored + np.minimum(place + 1, tokens)  # [rows, width]
        first = np.array(used)[:, None] * self.page_size  # [rows, 1]
        end = first + place + 1 - tokens  # [rows, width]
        if not all(row.is_causal for row in rows):
            first = first + np.zeros_like(place)  # [rows, width]
            for index, row in enumerate(rows):
                leading, own = (np.array(part)[row.num_tokens :] for part in row.visible())
                seen[index, row.num_tokens : row.length] = row.num_cached + leading
                first[index, row.num_tokens : row.length] += own - row.num_tokens
        visible = key < seen[:, :, None]
        if any(row.num_masks for row in rows):
            visible |= (key >= first[:, :, None]) & (key < end[:, :, None])
        hidden = np.where(visible, np.float32(0), np.float32(-np.inf))[:, None]
        if self._per_kv > 1:
            hidden = np.tile(hidden, (1, 1, self._per_kv, 1))
        return torch.from_numpy(hidden).to(self._device, self._dtype, non_blocking=True)

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
    """Cut rows, longest first, wherever the padding that is saved is worth a further group."""
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
    hidden: Tensor,  # [rows, 1, per_kv * width, keys]
    scaling: float,
) -> Tensor:
    """Attention spelled out; float32 only, where it needs no wider accumulator."""
    scores = torch.matmul(queries * scaling, keys.transpose(-1, -2)).add_(hidden)
    return torch.matmul(scores.softmax(-1), values)


def _paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, places, head_dim]
    key: Tensor,  # [1, kv_heads, places, head_dim]
    value: Tensor,  # [1, kv_heads, places, head_dim]
    _attention_mask: Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in each layer."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    queries, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))
    return attend_by_operator(queries, keys, values, layer, scaling).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _paged_attention)
