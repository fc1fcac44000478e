"""Attention over a contiguous copy of each row's pages, exact on any device.

Keys and values of masks are written to the copy alone, which no later step reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mars_platform.checkpoint.number_type import is_bfloat16_slow
from mars_serve.engine.attention.interface import LayerGroup
from mars_serve.engine.attention.kept import KeptCopies, KeptRows
from mars_serve.engine.batch import BatchRow, StepBatch

_NARROW = 16
"""Most positions of a row that is padded to a common width with other such rows."""
_PLAIN_FROM = 2**18
"""Least key elements at which matrix products beat one fused call, for rows of up to `_NARROW`
positions (measured)."""
_SPLIT_FROM, _SPLIT_HEAD = 2**20, 64
"""Key elements from which keys and values in bfloat16 are not copied to float32 for products, since
caches do not hold the copies, and the least elements of a head at which products in bfloat16 then
beat one fused call with more than one position, too (measured)."""
_GROUP_COST = 150_000
"""Padding, in key elements, that takes as long as the calls of one more group (measured)."""
_WIDTH_COST = 2_500_000
"""Padding in queries, in products of a query's element with a key's, that takes as long as the
calls of one more group (measured)."""
_KEY_BLOCK = 512
"""Number of keys in a block of torch's CPU kernel; keys are padded to a multiple of it if results
must not depend on padding."""
_MOST_SCORES = 2**25
"""Most scores that two matrix products compute at once, unless one position has more."""
_PARTS_FROM, _PART = 2**14, 256
"""Least products of positions and keys of a row that attends by itself, and the most positions of
it that attend in one call, to the keys that any of them sees (measured)."""


class _Part(NamedTuple):
    """Positions of a wide row that attend in one call."""

    queries: slice
    keys: slice
    """Keys among which are all that the positions see."""
    bias: Tensor
    """float [positions, keys], as in `_Group`."""


@dataclass(frozen=True)
class _Group:
    """Rows that attend in one call, padded to a rectangle."""

    num_rows: int
    width: int
    positions: Tensor | None
    """int64 [rows * width], positions in the step; None if they are all positions in order."""
    pages: Tensor
    """int64 [2 * rows * kv_heads * pages], pages of keys, then of values, laid out by head, to be
    copied. Here and below, values that are part of their keys have none of their own."""
    bias: Tensor
    """float [rows, 1, per_kv * width, keys], 0 for a visible key and -inf for any other. It
    is [1, 1, width, keys] for a row whose positions attend by themselves, and empty for one with
    parts."""
    own: Tensor | None
    """int64 [2 * own], indices of the keys of the rows' masks, then of their values, among those
    of the step; None if there are none. For a kept copy these are all positions, tokens first, and
    None says that they are those of the step, in order."""
    own_slots: Tensor
    """int64 [2 * own * kv_heads], their slots in the copy of the pages."""
    num_keys: list[int] | None
    """Leading keys, in whole blocks, among which are all that each position of the only row sees;
    None unless results must not depend on padding."""
    parts: Sequence[_Part] = ()
    kept: Tensor | None = None
    """Copies that last, see `KeptRows`; None if the pages are copied for each step."""
    num_tokens: int = 0
    """Leading positions of the kept rows' own that are no masks."""
    has_masks: bool = False
    blocks: Tensor | None = None
    """int64 [pages], where in a layer's kept copies the pages go; None for all of a copy."""


@dataclass(frozen=True)
class GatheredMetadata:
    """Attention metadata of one step."""

    slots: Tensor
    """int64 [2 * positions * kv_heads], slots of each position's keys, then of its values."""
    groups: list[_Group]
    order: Tensor | None
    """int64 [positions], index of each position in the concatenated outputs of the groups; None if
    these are in order."""


class _Scores(NamedTuple):
    """How scores become weights; see `Attention.attend`."""

    scaling: float
    softcap: float | None
    sinks: Tensor | None


class GatheredAttention:
    """Attends over a contiguous copy of each row's pages; see `Attention`."""

    def __init__(
        self,
        group: LayerGroup,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
    ) -> None:
        """Reserve ``num_pages`` pages, each for ``page_size`` committed tokens.

        Layers of the group are numbered from 0. If ``batch_invariant``, each position is attended
        by itself in calls of one shape, so that no bit of its result depends on the other positions
        of the step.
        """
        self.page_size, self.num_pages = page_size, num_pages
        self._layers, self._device, self._dtype = group, device, dtype
        self._per_kv = group.per_kv
        # One call copies keys and values, and one attends: the smaller of the two are padded.
        self._head_dim = max(group.key_dim, group.value_dim)
        self._num_parts = 1 if group.value_in_key else 2
        self._is_padded = self._num_parts == 2 and group.key_dim != group.value_dim
        self._batch_invariant = batch_invariant
        # Padding reads a page of zeros and writes to another page, as masks do.
        self._zeros, self._waste = num_pages, num_pages + 1
        page = group.kv_heads, page_size, self._head_dim
        size = (group.num_layers, self._num_parts, num_pages + 2, *page)
        self._pages = torch.zeros(size, dtype=dtype, device=device)
        self._gathered = torch.empty(0, dtype=dtype, device=device)
        self._heads = np.arange(group.kv_heads)
        is_kept = device.type == "cpu" and not batch_invariant and not group.is_bounded
        self._kept = KeptCopies(self._pages) if is_kept else None
        self._may_split = _has_exact_remainders(self._pages)

    @property
    def keys(self) -> Tensor:
        """Keys, [layers, pages, kv_heads, page_size, key_dim]; two pages follow the pool's."""
        return self._pages[:, 0, ..., : self._layers.key_dim]

    @property
    def values(self) -> Tensor:
        """Values, laid out as `keys`."""
        return self._pages[:, -1, ..., : self._layers.value_dim]

    def prepare(self, batch: StepBatch) -> GatheredMetadata:
        """See `Attention.prepare`."""
        self._clear_fresh(batch.rows)
        kept, rows = list[KeptRows](), batch.rows
        if self._kept is not None:
            narrow = [row for row in rows if row.length <= _NARROW]
            kept, left = self._kept.place(narrow)
            rows = [row for row in rows if row.length > _NARROW] + left
        alone, others = list[BatchRow](), list[BatchRow]()
        for row in rows:
            (alone if self._batch_invariant or self._has_parts(row) else others).append(row)
        members = [*([row] for row in alone), *self._members(others)]
        groups = [self._kept_group(each, batch) for each in kept]
        groups += [self._group(group, batch) for group in members]
        return GatheredMetadata(
            slots=self._slots(batch),
            groups=groups,
            order=self._order(batch, [*(each.rows for each in kept), *members]),
        )

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        metadata: GatheredMetadata,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        is_cached: bool = False,
    ) -> Tensor:
        """See `Attention.attend`."""
        pages, scores = self._pages[layer], _Scores(scaling, softcap, sinks)
        if self._is_padded:
            query, key, value = (
                F.pad(part, (0, self._head_dim - part.shape[-1])) for part in (query, key, value)
            )
        # [2 * positions, kv_heads, head_dim]
        fresh = torch.cat([key, value][: self._num_parts])
        if not is_cached:
            slots = pages.view(-1, self._head_dim)
            slots.index_copy_(0, metadata.slots, fresh.view(-1, self._head_dim))
        attend = self._attend_invariantly if self._batch_invariant else self._attend_group
        outputs = [
            attend(group, query, self._gather(group, layer, fresh), scores)
            for group in metadata.groups
        ]
        if self._kept is not None and layer == self._layers.num_layers - 1:
            self._kept.is_complete = True
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if self._head_dim != self._layers.value_dim:
            output = output[..., : self._layers.value_dim]
        return output if metadata.order is None else output.index_select(0, metadata.order)

    def recover(self) -> None:
        """See `Attention.recover`."""
        self._clear([self._waste])
        if self._kept is not None:
            self._kept.clear()

    def _clear_fresh(self, rows: Sequence[BatchRow]) -> None:
        """Zero the pages that rows start to fill in this step.

        Keys that no query sees still enter a product, with weight 0, and a NaN among them would
        spread.
        """
        size = self.page_size
        pages = [
            page
            for row in rows
            for page in self._layers.pages(row)[-(-row.num_cached // size) : self._num_pages(row)]
        ]
        if pages:
            self._clear(pages)

    def _clear(self, pages: list[int]) -> None:
        self._pages.index_fill_(2, self._to_device(np.array(pages)), 0.0)

    def _attend_group(
        self, group: _Group, query: Tensor, gathered: Tensor, scores: _Scores
    ) -> Tensor:
        """Attend in one group: [rows * width, heads, head_dim], padding included."""
        rows, width, kv_heads = group.num_rows, group.width, self._layers.kv_heads
        queries = query if group.positions is None else query.index_select(0, group.positions)
        if group.parts:
            return self._attend_in_parts(group.parts, queries, gathered, scores)
        # Query heads that share a key/value head become further queries of it: no key is repeated.
        folded = queries.view(rows, width, kv_heads, self._per_kv, -1)
        folded = folded.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [rows, kv_heads, per_kv * width, d]
        keys, values = gathered[0], gathered[-1]
        is_large = keys.numel() >= _PLAIN_FROM and width <= _NARROW
        if scores.softcap is not None or scores.sinks is not None:
            size = max(1, _MOST_SCORES // keys[..., 0].numel())
            sinks = self._sinks(scores, width).view(-1, folded.shape[2], 1)
            each = torch.split(folded, size, 2), torch.split(group.bias, size, 2)
            output = torch.cat(
                [
                    _plain_attention(part, keys, values, bias, scores._replace(sinks=own))
                    for part, bias, own in zip(*each, torch.split(sinks, size, 1), strict=True)
                ],
                dim=2,
            )
        elif is_large and (
            keys.dtype == torch.float32 or (self._may_split and keys.numel() < _SPLIT_FROM)
        ):
            output = _plain_attention(folded, keys, values, group.bias, scores)
        elif is_large and self._may_split and (width == 1 or self._head_dim >= _SPLIT_HEAD):
            output = _split_attention(folded, keys, values, group.bias, scores.scaling)
        else:
            output = F.scaled_dot_product_attention(
                folded, keys, values, attn_mask=group.bias, scale=scores.scaling
            )
        output = output.view(rows, kv_heads, self._per_kv, width, -1)
        return output.permute(0, 3, 1, 2, 4).reshape(rows * width, *query.shape[1:])

    def _attend_in_parts(
        self, parts: Sequence[_Part], queries: Tensor, gathered: Tensor, scores: _Scores
    ) -> Tensor:
        """Attend with the queries of a wide row: [width, heads, head_dim]."""
        # Query heads that share a key/value head have its keys each, so that they share the bias.
        by_head = queries.view(len(queries), self._layers.kv_heads, self._per_kv, -1)
        by_head = by_head.permute(1, 2, 0, 3)  # [kv_heads, per_kv, width, head_dim]
        keys, values = gathered[0].transpose(0, 1), gathered[-1].transpose(0, 1)
        outputs = []
        for part in parts:
            own = by_head[:, :, part.queries]
            key, value = keys[:, :, part.keys], values[:, :, part.keys]
            if scores.softcap is None and scores.sinks is None:
                key, value = (each.expand(-1, self._per_kv, -1, -1) for each in (key, value))
                output = F.scaled_dot_product_attention(
                    own, key, value, attn_mask=part.bias, scale=scores.scaling
                )
            else:
                sinks = self._sinks(scores, own.shape[2]).unsqueeze(1)
                bias = part.bias.repeat(self._per_kv, 1)
                folded = own.flatten(1, 2).unsqueeze(1)
                output = _plain_attention(folded, key, value, bias, scores._replace(sinks=sinks))
                output = output.view(own.shape)
            outputs.append(output)
        return torch.cat(outputs, 2).permute(2, 0, 1, 3).reshape(queries.shape)

    def _attend_invariantly(
        self, group: _Group, query: Tensor, gathered: Tensor, scores: _Scores
    ) -> Tensor:
        """Attend in a group of one row, each position by itself; see `_attend_group`."""
        width, kv_heads = group.width, self._layers.kv_heads
        queries = query if group.positions is None else query.index_select(0, group.positions)
        queries = queries.view(width, kv_heads, self._per_kv, -1)
        keys, values = gathered[0], gathered[-1]
        bias = group.bias.transpose(0, 2)  # [width, 1, 1, keys]
        if scores.softcap is None and scores.sinks is None:
            keys, values = (part.expand(width, -1, -1, -1) for part in (keys, values))
            output = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=bias, scale=scores.scaling
            )
        else:
            scores = scores._replace(sinks=self._sinks(scores, 1))
            each = torch.split(queries, 1), torch.split(bias, 1), group.num_keys or ()
            output = torch.cat(
                [
                    _plain_attention(part, keys[:, :, :n], values[:, :, :n], own[..., :n], scores)
                    for part, own, n in zip(*each, strict=True)
                ]
            )
        return output.reshape(width, *query.shape[1:])

    def _sinks(self, scores: _Scores, width: int) -> Tensor:
        """Return the sinks of a group's queries, [kv_heads, queries, 1], -inf for none."""
        sinks = scores.sinks
        if sinks is None:
            sinks = torch.full((self._layers.heads,), -torch.inf, device=self._device)
        sinks = sinks.view(self._layers.kv_heads, self._per_kv)
        return sinks.repeat_interleave(width, dim=1).unsqueeze(-1)

    def _gather(self, group: _Group, layer: int, fresh: Tensor) -> Tensor:
        """Copy a group's keys and values side by side, those of masks from the step:
        [2, rows, kv_heads, keys, head_dim], or [1, ...] if values are part of the keys.

        All calls share one buffer, because a large new allocation takes longer than the copy.
        """
        size = (len(group.pages), self.page_size * self._head_dim)
        pages = self._pages[layer].view(-1, size[1])
        if group.kept is not None:
            return self._keep(group, group.kept[layer], pages, fresh)
        if self._gathered.numel() < size[0] * size[1]:
            self._gathered = self._gathered.new_empty(size[0] * size[1])
        buffer = self._gathered[: size[0] * size[1]].view(size)
        torch.index_select(pages, 0, group.pages, out=buffer)
        if group.own is not None:
            masks = fresh.index_select(0, group.own).view(-1, self._head_dim)
            buffer.view(-1, self._head_dim).index_copy_(0, group.own_slots, masks)
        rows, heads = group.num_rows, self._layers.kv_heads
        return buffer.view(self._num_parts, rows, heads, -1, self._head_dim)

    def _keep(self, group: _Group, copies: Tensor, pages: Tensor, fresh: Tensor) -> Tensor:
        """Bring a layer's kept copies up to date, and return those of the group as `_gather` does.

        Keys of masks that are not finite would stay, and spread to the tokens of later steps.
        """
        if group.blocks is not None:
            blocks = pages.index_select(0, group.pages)
            copies.view(-1, pages.shape[1]).index_copy_(0, group.blocks, blocks)
        own = fresh if group.own is None else fresh.index_select(0, group.own)
        if group.has_masks:
            own.view(self._num_parts, -1, *own.shape[1:])[:, group.num_tokens :].nan_to_num_()
        copies.view(-1, self._head_dim).index_copy_(
            0, group.own_slots, own.view(-1, self._head_dim)
        )
        return copies[:, : group.num_rows]

    def _has_parts(self, row: BatchRow) -> bool:
        """Whether a row attends by itself, in parts."""
        num_keys = row.num_cached + row.length
        is_wide = row.length > _NARROW and row.length * num_keys >= _PARTS_FROM
        return is_wide and not self._batch_invariant

    def _members(self, rows: Sequence[BatchRow]) -> list[list[BatchRow]]:
        """Return the rows of each group: rows of similar length and number of keys."""
        widths: dict[int, list[BatchRow]] = {}
        for row in rows:
            key = 0 if row.length <= _NARROW else (row.length - 1).bit_length()
            widths.setdefault(key, []).append(row)
        budget = _GROUP_COST / (self.page_size * self._layers.kv_heads * self._head_dim)
        groups = []
        for members in self._split_off_ones(list(widths.values())):
            sizes = [self._num_visible(row) for row in members]
            if (max(sizes) - min(sizes)) * len(sizes) <= budget:
                groups.append(members)
                continue
            members.sort(key=self._num_visible, reverse=True)
            groups += _split(members, sorted(sizes, reverse=True), budget)
        return groups

    def _split_off_ones(self, groups: list[list[BatchRow]]) -> list[list[BatchRow]]:
        """Split rows of one position off from wider ones if their padding would take longer."""
        split = []
        for members in groups:
            ones = [row for row in members if row.length == 1]
            width = max(row.length for row in members)
            hidden = sum(self._num_hidden(row) for row in ones) * self.page_size
            keys = sum(row.num_cached for row in ones) - hidden
            saved = (width - 1) * keys * self._layers.heads * self._head_dim
            if len(ones) < len(members) and saved > _WIDTH_COST:
                split += [ones, [row for row in members if row.length > 1]]
            else:
                split.append(members)
        return split

    def _num_pages(self, row: BatchRow) -> int:
        return -(-(row.num_cached + row.num_tokens) // self.page_size)

    def _num_hidden(self, row: BatchRow) -> int:
        if not self._layers.is_bounded:
            return 0
        hidden: int = self._layers.oldest(row.num_cached) // self.page_size
        return hidden

    def _num_visible(self, row: BatchRow) -> int:
        """Count the pages of the keys that a row sees, masks included."""
        num_pages = -(-(row.num_cached + row.length) // self.page_size)
        return num_pages - self._num_hidden(row)

    def _slots(self, batch: StepBatch) -> Tensor:
        size = self.page_size
        slots: list[int] = []
        for row in batch.rows:
            tokens = range(row.num_cached, row.num_cached + row.num_tokens)
            pages = self._layers.pages(row)
            slots += [pages[t // size] * size + t % size for t in tokens]
            slots += [self._waste * size] * row.num_masks
        slots += [self._waste * size] * (len(batch.ids) - len(slots))
        # Pages are laid out by head: (page, offset) of head h lies at (page * heads + h, offset).
        page, offset = np.divmod(np.array(slots), size)
        flat = (page * self._layers.kv_heads * size + offset)[:, None] + self._heads * size
        return self._twice(flat.ravel(), self._pages[0, 0, ..., 0].numel())

    def _twice(self, indices: NDArray[np.int64], num_keys: int) -> Tensor:
        """Append to indices of keys the same ones of values, which lie ``num_keys`` behind."""
        parts = [indices, indices + num_keys][: self._num_parts]
        return self._to_device(np.concatenate(parts))

    def _group(self, rows: list[BatchRow], batch: StepBatch) -> _Group:
        width, size, num_heads = max(row.length for row in rows), self.page_size, len(self._heads)
        hidden = [self._num_hidden(row) for row in rows]
        tables = [
            self._layers.pages(row)[count : self._num_pages(row)]
            for row, count in zip(rows, hidden, strict=True)
        ]
        num_pages = max(self._num_visible(row) for row in rows)
        if self._batch_invariant:  # a row alone, of whose keys no block may begin elsewhere
            tables, num_pages = [[self._zeros] * hidden[0] + tables[0]], num_pages + hidden[0]
            num_pages += -num_pages % -(-_KEY_BLOCK // size)
            hidden = [0]
        table = np.array([pages + [self._zeros] * (num_pages - len(pages)) for pages in tables])
        pages = table[:, None] * num_heads + self._heads[:, None]  # [rows, heads, pages]
        first = [
            row.num_cached + row.num_tokens - count * size
            for row, count in zip(rows, hidden, strict=True)
        ]  # keys of each row's tokens, which its masks follow
        masks, slots = list[int](), list[int]()
        for index, (row, begin) in enumerate(zip(rows, first, strict=True)):
            masks += range(row.start + row.num_tokens, row.start + row.length)
            begin += index * num_heads * num_pages * size
            slots += range(begin, begin + row.num_masks)
        mask_slots = np.array(slots, dtype=np.int64)[:, None] + self._heads * num_pages * size
        visible = self._visible(rows, first, width, num_pages * size, batch.position_ids)
        parts = list[_Part]()
        if self._has_parts(rows[0]):
            parts, visible = self._parts(visible[0]), visible[:, :0]
        return _Group(
            num_rows=len(rows),
            width=width,
            positions=self._positions(rows, width, len(batch.ids)),
            pages=self._twice(pages.ravel(), self._pages[0, 0, ..., 0, 0].numel()),
            bias=self._bias(visible),
            own=self._twice(np.array(masks), len(batch.ids)) if masks else None,
            own_slots=self._twice(mask_slots.ravel(), pages.size * size),
            num_keys=_blocks_to(visible[0]) if self._batch_invariant else None,
            parts=parts,
        )

    def _kept_group(self, kept: KeptRows, batch: StepBatch) -> _Group:
        rows, num_heads, num_keys = kept.rows, len(self._heads), kept.copies.shape[4]
        width, size = max(row.length for row in rows), self.page_size
        own, slots = list[int](), list[int]()
        for is_mask in (False, True):
            for place, row in enumerate(rows):
                begin, end = (row.num_tokens, row.length) if is_mask else (0, row.num_tokens)
                own += range(row.start + begin, row.start + end)
                first = place * num_heads * num_keys + row.num_cached
                slots += range(first + begin, first + end)
        own_slots = np.array(slots, dtype=np.int64)[:, None] + self._heads * num_keys
        counts = [row.num_cached + row.num_tokens for row in rows]
        fresh, blocks = self._fresh_pages(kept)
        visible = self._visible(rows, counts, width, num_keys, batch.position_ids)
        is_whole = own == list(range(len(batch.ids)))
        return _Group(
            num_rows=len(rows),
            width=width,
            positions=self._positions(rows, width, len(batch.ids)),
            pages=self._twice(fresh, self._pages[0, 0, ..., 0, 0].numel()),
            bias=self._bias(visible),
            own=None if is_whole else self._twice(np.array(own), len(batch.ids)),
            own_slots=self._twice(own_slots.ravel(), kept.copies[0, 0, ..., 0].numel()),
            num_keys=None,
            kept=kept.copies,
            num_tokens=sum(row.num_tokens for row in rows),
            has_masks=any(row.num_masks for row in rows),
            blocks=self._twice(blocks, kept.copies[0, 0, ..., 0].numel() // size)
            if kept.fresh
            else None,
        )

    def _fresh_pages(self, kept: KeptRows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the pages of fresh places, by head, and the blocks of the copies that they fill.

        Pages of zeros fill the rest of a place.
        """
        num_pages, num_heads = kept.copies.shape[4] // self.page_size, len(self._heads)
        tables = []
        for place in kept.fresh:
            row = kept.rows[place]
            held = self._layers.pages(row)[: -(-row.num_cached // self.page_size)]
            tables.append(held + [self._zeros] * (num_pages - len(held)))
        table = np.array(tables, dtype=np.int64).reshape(-1, 1, num_pages)
        places = np.array(kept.fresh, dtype=np.int64).reshape(-1, 1, 1)
        heads = self._heads[:, None]
        pages = table * num_heads + heads  # [fresh, heads, pages]
        blocks = (places * num_heads + heads) * num_pages + np.arange(num_pages)
        return pages.ravel(), blocks.ravel()

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

    def _visible(
        self,
        rows: list[BatchRow],
        counts: list[int],
        width: int,
        num_keys: int,
        position_ids: list[int],
    ) -> NDArray[np.bool_]:
        """Return which of its keys each position of a group sees, [rows, width, keys].

        The keys of a row are the last of its tokens', ``counts`` many, and its masks'. Padding sees
        some key, too, as softmax needs.
        """
        end, tokens = np.array(counts)[:, None], np.array([[row.num_tokens] for row in rows])
        offset, key = np.arange(width), np.arange(num_keys)
        seen = end - tokens + np.minimum(offset + 1, tokens)  # [rows, width]
        first = end
        last = end + offset + 1 - tokens  # [rows, width]
        if not all(row.is_causal for row in rows):
            first = end + np.zeros_like(offset)  # [rows, width]
            for index, row in enumerate(rows):
                leading, own = (np.array(part)[row.num_tokens :] for part in row.visible())
                masks, before = slice(row.num_tokens, row.length), counts[index] - row.num_tokens
                seen[index, masks], first[index, masks] = before + leading, before + own
        visible: NDArray[np.bool_] = key < seen[:, :, None]
        if any(row.num_masks for row in rows):
            visible |= (key >= first[:, :, None]) & (key < last[:, :, None])
        if self._layers.is_bounded:
            positions = np.zeros((len(rows), width), dtype=np.int64)
            where = key + np.zeros_like(end)  # [rows, keys]
            for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
                ids = position_ids[row.start : row.start + row.length]
                positions[index, : row.length] = ids
                where[index] += row.num_cached + row.num_tokens - count
                where[index, count : count + row.num_masks] = ids[row.num_tokens :]
            visible &= where[:, None] >= self._layers.oldest(positions)[:, :, None]
        return visible

    def _parts(self, visible: NDArray[np.bool_]) -> list[_Part]:
        """Divide the positions of a wide row by what they see, [width, keys]."""
        width, num_keys = visible.shape
        size = max(1, min(_PART, _MOST_SCORES // (num_keys * self._layers.heads)))
        parts = []
        for begin in range(0, width, size):
            own = visible[begin : begin + size]
            seen = np.flatnonzero(own.any(axis=0))
            keys = slice(int(seen[0]), int(seen[-1]) + 1)
            bias = self._float_bias(own[:, keys])
            parts.append(_Part(slice(begin, begin + len(own)), keys, bias))
        return parts

    def _bias(self, visible: NDArray[np.bool_]) -> Tensor:
        repeats = 1 if self._batch_invariant else self._per_kv
        return self._float_bias(np.tile(visible[:, None], (1, 1, repeats, 1)))

    def _float_bias(self, visible: NDArray[np.bool_]) -> Tensor:
        bias = np.where(visible, np.float32(0), np.float32(-np.inf))
        return torch.from_numpy(bias).to(self._device, self._dtype, non_blocking=True)

    def _order(self, batch: StepBatch, members: list[list[BatchRow]]) -> Tensor | None:
        where = [0] * len(batch.ids)
        offset = 0
        for group in members:
            width = max(row.length for row in group)
            for row in group:
                where[row.start : row.start + row.length] = range(offset, offset + row.length)
                offset += width
        if offset == len(where) and where == list(range(offset)):
            return None
        return self._to_device(np.array(where))

    def _to_device(self, numbers: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(numbers).to(self._device, non_blocking=True)


def _split(members: list[BatchRow], sizes: list[int], budget: float) -> list[list[BatchRow]]:
    """Split rows, sorted by falling size, wherever that saves more padding than ``budget``."""
    savings = [(sizes[0] - size) * (len(sizes) - index) for index, size in enumerate(sizes)]
    saved, cut = max(zip(savings, range(len(sizes)), strict=True))
    if saved <= budget:
        return [members]
    return [
        *_split(members[:cut], sizes[:cut], budget),
        *_split(members[cut:], sizes[cut:], budget),
    ]


def _blocks_to(visible: NDArray[np.bool_]) -> list[int]:
    """Return the leading keys, in whole blocks, among which are all that each position sees."""
    last = visible.shape[1] - visible[:, ::-1].argmax(axis=1)
    blocks: list[int] = (-(-last // _KEY_BLOCK) * _KEY_BLOCK).tolist()
    return blocks


def _split_attention(
    queries: Tensor,  # [rows, kv_heads, queries, head_dim]
    keys: Tensor,  # [rows, kv_heads, keys, head_dim]
    values: Tensor,  # [rows, kv_heads, keys, head_dim]
    bias: Tensor,  # [rows, 1, queries, keys]
    scaling: float,
) -> Tensor:
    """Attend by matrix products in bfloat16, with scores that are nearly as exact as in float32.

    A product's result is rounded to bfloat16, which is too coarse for large scores. So another one
    computes what the rounding took from the first.
    """
    flat, by_key = queries.flatten(0, 1), keys.flatten(0, 1).transpose(-1, -2)
    rounded = torch.bmm(flat, by_key)
    remainders = torch.baddbmm(rounded, flat, by_key, beta=-1.0)
    scores = rounded.float().add_(remainders).view(*queries.shape[:3], -1)
    weights = scores.mul_(scaling).add_(bias).softmax(-1)
    return torch.matmul(weights.to(values.dtype), values)


def _has_exact_remainders(like: Tensor) -> bool:
    """Whether tensors like this one are multiplied natively in bfloat16 on a CPU, and a product is
    rounded only once another tensor has been added to it.
    """
    if like.dtype != torch.bfloat16 or like.device.type != "cpu" or is_bfloat16_slow():
        return False
    ones = like.new_ones(1, 16, 257)  # 257 is rounded to 256
    rounded = torch.bmm(ones, ones.mT)
    return bool((torch.baddbmm(rounded, ones, ones.mT, beta=-1.0) == 1.0).all())


def _plain_attention(
    queries: Tensor,  # [rows, kv_heads, queries, head_dim]
    keys: Tensor,  # [rows, kv_heads, keys, head_dim]
    values: Tensor,  # [rows, kv_heads, keys, head_dim]
    bias: Tensor,  # [rows, 1, queries, keys]
    how: _Scores,  # its sinks are [kv_heads, queries, 1]
) -> Tensor:
    """Attend by two matrix products, in float32, which needs no wider accumulator."""
    dtype = queries.dtype
    queries, keys, values = queries.float(), keys.float(), values.float()
    scores = torch.matmul(queries * how.scaling, keys.transpose(-1, -2))
    if how.softcap is not None:
        scores.div_(how.softcap).tanh_().mul_(how.softcap)
    scores.add_(bias)
    if how.sinks is None:
        return torch.matmul(scores.softmax(-1), values).to(dtype)
    sinks = how.sinks.float().expand(len(queries), -1, -1, -1)
    weights = torch.cat([scores, sinks], dim=-1).softmax(-1)
    return torch.matmul(weights[..., :-1], values).to(dtype)
