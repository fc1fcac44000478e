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

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

from mars_serve.engine.batch import Row, StepBatch

ATTENTION_NAME = "marsray_paged"

_NARROW = 16
"""Rows of up to so many places attend by plain matrix products: a fused kernel tiles for more."""
_GROUP_COST = 150_000
"""Padding, in key elements, that costs as much as one more group's calls (measured)."""
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
    pages: Tensor  # int64 [rows * kv_heads * pages], into pages laid out by head
    hidden: Tensor  # float [rows, width, keys], 0 where a key is seen and -inf where it is not


@dataclass(frozen=True)
class _GatherPlan:
    slots: Tensor  # int64 [places * kv_heads], where each place's keys and values go
    groups: list[_Group]
    order: Tensor | None  # int64 [places], each place's index in the groups' outputs laid flat


class GatheredAttention:
    """Attends over a contiguous copy of each row's pages."""

    def __init__(
        self,
        shape: KeyValueShape,
        *,
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
        self._batch_invariant = batch_invariant
        self._scratch_per_row = -(-max_masks // page_size)
        # Two pages stand in where there is none: zeros to read, and what padding writes.
        self._zeros, self._waste, self._scratch = num_pages, num_pages + 1, num_pages + 2
        num_all = self._scratch + max_rows * self._scratch_per_row
        size = (shape.num_layers, num_all, shape.num_heads, page_size)
        self.keys = torch.zeros(*size, shape.head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self._gathered = [torch.empty(0, dtype=dtype, device=device) for _ in range(2)]

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
        keys, values = self.keys[layer], self.values[layer]
        for stored, fresh in ((keys, key), (values, value)):
            stored.flatten(0, 2).index_copy_(0, plan.slots, fresh.reshape(-1, fresh.shape[-1]))
        attend = self._attend_invariantly if self._batch_invariant else self._attend_group
        outputs = [attend(group, query, keys, values, scaling) for group in plan.groups]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output if plan.order is None else output.index_select(0, plan.order)

    def recover(self) -> None:
        """See `Attention.recover`."""
        self._clear(list(range(self._waste, self.keys.shape[1])))

    def _clear_fresh(self, rows: Sequence[Row]) -> None:
        """Zero the pages that rows start in this step: hidden keys still enter a product with
        weight 0, and what is not a number would spread from there.
        """
        size = self.page_size
        pages = [
            page
            for row in rows
            for page in row.pages[-(-row.num_stored // size) : self._num_pages(row)]
        ]
        if pages:
            self._clear(pages)

    def _clear(self, pages: list[int]) -> None:
        index = torch.tensor(pages, dtype=torch.long).to(self._device, non_blocking=True)
        self.keys.index_fill_(1, index, 0.0)
        self.values.index_fill_(1, index, 0.0)

    def _attend_group(
        self, group: _Group, query: Tensor, keys: Tensor, values: Tensor, scaling: float
    ) -> Tensor:
        """[rows * width, heads, head_dim], padding included."""
        rows, width = group.num_rows, group.width
        num_heads, head_dim = query.shape[1:]
        queries = query if group.places is None else query.index_select(0, group.places)
        # Query heads that share a key/value head become further queries of it: nothing is repeated.
        folded = queries.view(rows, width, self._shape.num_heads, -1, head_dim)
        folded = folded.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [rows, kv_heads, per_kv * width, d]
        keys, values = (self._gather(i, group, part) for i, part in enumerate((keys, values)))
        if width <= _NARROW and query.dtype == torch.float32:
            output = _plain_attention(folded, keys, values, group.hidden, scaling)
        else:
            mask = group.hidden[:, None].repeat(1, 1, num_heads // self._shape.num_heads, 1)
            output = F.scaled_dot_product_attention(
                folded, keys, values, attn_mask=mask, scale=scaling
            )
        output = output.view(rows, self._shape.num_heads, -1, width, head_dim)
        return output.permute(0, 3, 1, 2, 4).reshape(rows * width, num_heads, head_dim)

    def _attend_invariantly(
        self, group: _Group, query: Tensor, keys: Tensor, values: Tensor, scaling: float
    ) -> Tensor:
        """`_attend_group` of a single row with each of its places as a batch entry of its own."""
        num_heads, head_dim = query.shape[1:]
        queries = query if group.places is None else query.index_select(0, group.places)
        folded = queries.view(group.width, self._shape.num_heads, -1, head_dim)
        keys, values = (
            self._gather(i, group, part).expand(group.width, -1, -1, -1)
            for i, part in enumerate((keys, values))
        )
        mask = group.hidden[0, :, None, None].expand(-1, -1, folded.shape[2], -1)
        output = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
        return output.reshape(group.width, num_heads, head_dim)

    def _gather(self, which: int, group: _Group, stored: Tensor) -> Tensor:
        """A group's keys or values: [rows, kv_heads, keys, head_dim], in a buffer that is reused:
        large new allocations cost more than the copy.
        """
        size = (len(group.pages), self.page_size * self._shape.head_dim)
        if self._gathered[which].numel() < size[0] * size[1]:
            self._gathered[which] = torch.empty(
                size[0] * size[1], dtype=self._dtype, device=self._device
            )
        buffer = self._gathered[which][: size[0] * size[1]].view(size)
        torch.index_select(stored.view(-1, size[1]), 0, group.pages, out=buffer)
        return buffer.view(group.num_rows, self._shape.num_heads, -1, self._shape.head_dim)

    def _members(self, rows: Sequence[Row]) -> list[list[int]]:
        """Indices of the rows of each group: of like length, and with little padding in keys."""
        widths: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            key = 0 if row.length <= _NARROW else (row.length - 1).bit_length()
            widths.setdefault(key, []).append(index)
        budget = _GROUP_COST / (self.page_size * self._shape.num_heads * self._shape.head_dim)
        groups = []
        for members in widths.values():
            members.sort(key=lambda index: -self._num_pages(rows[index]))
            groups += _split(members, [self._num_pages(rows[i]) for i in members], budget)
        return groups

    def _num_pages(self, row: Row) -> int:
        """Pages of a row's committed tokens, those of this step included."""
        return -(-(row.num_stored + row.num_tokens) // self.page_size)

    def _scratch_pages(self, rows: Sequence[Row]) -> list[list[int]]:
        starts = [self._scratch + index * self._scratch_per_row for index in range(len(rows))]
        sizes = [-(-row.num_masks // self.page_size) for row in rows]
        return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]

    def _slots(self, batch: StepBatch, scratch: list[list[int]]) -> Tensor:
        size = self.page_size
        slots: list[int] = []
        for row, masks in zip(batch.rows, scratch, strict=True):
            tokens = range(row.num_stored, row.num_stored + row.num_tokens)
            slots += [row.pages[t // size] * size + t % size for t in tokens]
            slots += [masks[m // size] * size + m % size for m in range(row.num_masks)]
        slots += [self._waste * size] * (len(batch.ids) - len(slots))
        # pages are laid out by head: (page, offset) of head h lies at (page * heads + h, offset)
        slot = torch.tensor(slots)[:, None]
        head = torch.arange(self._shape.num_heads) * size
        flat = slot // size * (size * self._shape.num_heads) + head + slot % size
        return flat.flatten().to(self._device, non_blocking=True)

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
        table = torch.tensor([pages + [self._zeros] * (num_pages - len(pages)) for pages in tables])
        head = torch.arange(self._shape.num_heads)[:, None]
        pages = table[:, None] * self._shape.num_heads + head  # [rows, kv_heads, pages]
        return _Group(
            num_rows=len(rows),
            width=width,
            places=self._places(rows, width, num_places),
            pages=pages.flatten().to(self._device, non_blocking=True),
            hidden=self._hidden(rows, used, width, num_pages).to(self._device, non_blocking=True),
        )

    def _places(self, rows: list[Row], width: int, num_places: int) -> Tensor | None:
        places = [
            row.start + (offset if offset < row.length else 0)
            for row in rows
            for offset in range(width)
        ]
        if places == list(range(num_places)):
            return None
        return torch.tensor(places).to(self._device, non_blocking=True)

    def _hidden(self, rows: list[Row], used: list[int], width: int, num_pages: int) -> Tensor:
        """Additive mask [rows, width, keys]; padding sees something, so that no row is empty."""
        stored = torch.tensor([[row.num_stored] for row in rows])
        tokens = torch.tensor([[row.num_tokens] for row in rows])
        place, key = torch.arange(width), torch.arange(num_pages * self.page_size)
        seen = (stored + torch.minimum(place + 1, tokens))[:, :, None]  # [rows, width, 1]
        visible = key < seen
        if any(row.num_masks for row in rows):
            first = torch.tensor(used)[:, None, None] * self.page_size
            num_masks = (place + 1 - tokens)[:, :, None]
            visible |= (key >= first) & (key < first + num_masks)
        hidden = torch.zeros(visible.shape, dtype=self._dtype)
        return hidden.masked_fill_(visible.logical_not_(), -torch.inf)

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
        return torch.tensor(where).to(self._device, non_blocking=True)


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
    hidden: Tensor,  # [rows, width, keys]
    scaling: float,
) -> Tensor:
    """Attention spelled out; float32 only, where it needs no wider accumulator."""
    rows, width, num_keys = hidden.shape
    scores = torch.matmul(queries * scaling, keys.transpose(-1, -2))
    scores.view(rows, -1, width, num_keys).add_(hidden[:, None])
    return torch.matmul(scores.softmax(-1), values)


def _paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, places, head_dim]
    key: Tensor,  # [1, kv_heads, places, head_dim]
    value: Tensor,  # [1, kv_heads, places, head_dim]
    _attention_mask: Tensor | None,
    *,
    scaling: float,
    paged: Attention,
    plan: Any,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in each layer; the keywords come through the forward."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    queries, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))
    return paged.attend(layer, queries, keys, values, scaling, plan).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _paged_attention)
