"""Attention of one step by a paged flash kernel, whose shapes can be fixed beforehand.

Attention falls into two parts. All that is stored is visible to all of a row's queries, which a
paged kernel reads in place, without a mask. What a row feeds in this step attends to itself under a
small mask: spelled out for narrow rows, by a causal kernel for prompt chunks. The parts are merged
by their log-sum-exps. Keys and values of masks are never read again, so that none are kept.

All that a step needs besides the hidden states is one list of integers, padded to a `StepShape`: a
captured graph takes it from a fixed place. Knows the kernel only as a function, and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest

from mars_serve.engine.attention.gathered import KeyValueShape
from mars_serve.engine.attention.paged_kernel import PagedKernel
from mars_serve.engine.attention.staging import stage
from mars_serve.engine.batch import Row, StepBatch

MAX_NARROW = 64
"""Rows of up to so many places attend to themselves in a rectangle of plain matrix products."""


@dataclass(frozen=True)
class StepShape:
    """Sizes that a step's integers are padded to."""

    num_places: int
    num_rows: int
    num_pages: int
    """Pages of stored tokens a row; 0: nothing is stored for any."""
    num_narrow: int
    """Rows of the rectangle, 0 for none."""
    width: int
    """Places of a narrow row."""
    num_wide: int = 0
    num_wide_places: int = 0
    """Places of all wide rows together."""
    wide_width: int = 0

    @classmethod
    def of(cls, batch: StepBatch, page_size: int) -> StepShape:
        """Exactly what a step needs."""
        narrow, wide = _split(batch.rows)
        return cls(
            num_places=len(batch.ids),
            num_rows=len(batch.rows),
            num_pages=stored_pages(batch, page_size),
            num_narrow=len(narrow),
            width=max((row.length for row in narrow), default=0),
            num_wide=len(wide),
            num_wide_places=sum(row.length for row in wide),
            wide_width=max((row.length for row in wide), default=0),
        )

    @property
    def sizes(self) -> list[int]:
        """Integers of each part, in the order in which they are packed."""
        return [
            *[self.num_places] * 5,
            self.num_rows + 1,
            self.num_rows,
            self.num_rows * self.num_pages,
            *[self.num_narrow] * 2,
            self.num_wide_places,
            self.num_wide + 1,
        ]


def stored_pages(batch: StepBatch, page_size: int) -> int:
    """Pages of stored tokens of the row that has most."""
    return max((-(-row.num_cached // page_size) for row in batch.rows), default=0)


@dataclass(frozen=True)
class VarlenPlan:
    """What every layer of a step shares, on the device."""

    shape: StepShape
    slots: Tensor  # int64 [places], where each place's keys and values go
    has_stored: Tensor  # bool [places, 1], whether the place's row has stored tokens
    order: Tensor  # int64 [places], each place's index in rectangle and wide rows laid flat
    query_starts: Tensor  # int32 [rows + 1], in queries folded as `_attend_stored` does
    num_cached: Tensor  # int32 [rows]
    key_starts: Tensor | None  # int32 [rows + 1]
    pages: Tensor  # int32 [rows, pages]
    rectangle: Tensor  # int64 [narrow * width], places
    hidden: Tensor  # float32 [narrow, 1, 1, width, width], 0 where a place sees another, else -inf
    wide_places: Tensor  # int64 [wide places]
    wide_starts: Tensor  # int32 [wide rows + 1]


class VarlenAttention:
    """Attends over pages where they lie."""

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
            shape: of the model's keys and values.
            num_query_heads: a multiple of the key/value heads.
            num_pages: of committed tokens.
            page_size: tokens a page.
            dtype: of keys and values.
            device: where they lie.
            kernel: what reads the pages.
        """
        self.page_size, self.kernel = page_size, kernel
        self._device = device
        self._per_kv = num_query_heads // shape.num_heads
        self._waste = num_pages * page_size  # masks and padding write to one more page, never read
        # [layers, pages + 1, page_size, kv_heads, head_dim]
        size = (shape.num_layers, num_pages + 1, page_size, shape.num_heads, shape.head_dim)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    def plan(self, batch: StepBatch) -> VarlenPlan:
        """See `Attention.plan`."""
        shape = StepShape.of(batch, self.page_size)
        (numbers,) = stage([torch.tensor(self.pack(batch, shape))], self._device)
        return self.unpack(numbers, shape)

    def pack(self, batch: StepBatch, shape: StepShape) -> list[int]:
        """A step as integers, padded: ``sum(shape.sizes)`` of them, for `unpack`."""
        rows = batch.rows
        narrow, wide = _split(rows)
        visible = [row.visible() for row in rows]
        tables = [row.pages[: -(-row.num_cached // self.page_size)] for row in rows]
        table = [page for pages in tables for page in _padded(pages, shape.num_pages, 0)]
        parts: list[tuple[list[int], int]] = [
            (self._slots(rows), self._waste),
            ([int(row.num_cached > 0) for row in rows for _ in range(row.length)], 0),
            (_order(rows, shape), 0),
            ([place for leading, _ in visible for place in leading], 1),
            ([place for _, own in visible for place in own], 0),
            ([0, *accumulate(row.length for row in rows)], batch.num_places),
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

    def unpack(self, numbers: Tensor, shape: StepShape) -> VarlenPlan:
        """The plan of a step from its integers, int64 on the device. Needs no word from there, so
        that it may be part of a captured graph.
        """
        parts = torch.split(numbers, shape.sizes)
        slots, has_stored, order, leading, own = parts[:5]
        row_starts, stored, table, starts, lengths, wide, ends = parts[5:]
        offset = torch.arange(shape.width, device=numbers.device)
        # padding of a row stands for its first place, since its own numbers cannot harm it more
        inside = torch.where(offset < lengths[:, None], offset, 0)  # [narrow, width]
        rectangle = (starts[:, None] + inside).flatten()
        size = (shape.num_narrow, shape.width, 1)
        seen, begin = (part[rectangle].view(size) for part in (leading, own))
        visible = (offset < seen) | ((offset >= begin) & (offset <= inside[:, :, None]))
        hidden = torch.zeros(visible.shape, device=numbers.device).masked_fill_(
            ~visible, -torch.inf
        )
        key_starts = F.pad(stored.cumsum(0), (1, 0)).int() if self.kernel.needs_key_starts else None
        return VarlenPlan(
            shape=shape,
            slots=slots,
            has_stored=has_stored.bool()[:, None],
            order=order,
            query_starts=(row_starts * self._per_kv).int(),
            num_cached=stored.int(),
            key_starts=key_starts,
            pages=table.int().view(shape.num_rows, shape.num_pages),
            rectangle=rectangle,
            hidden=hidden[:, None, None],
            wide_places=wide,
            wide_starts=ends.int(),
        )

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        plan: VarlenPlan,
    ) -> Tensor:
        """See `Attention.attend`."""
        keys, values = self.keys[layer], self.values[layer]
        output, lse = self._attend_own(query, key, value, scaling, plan)
        if plan.shape.num_pages:
            stored, stored_lse = self._attend_stored(query, keys, values, scaling, plan)
            # softmax over both: exp(lse) of each part is its share; what is empty has none
            share = torch.sigmoid(stored_lse - lse).masked_fill(~plan.has_stored, 0.0)
            stored = stored.float().masked_fill(~plan.has_stored[..., None], 0.0)
            output = torch.lerp(output, stored, share[..., None])
        for pages, fresh in ((keys, key), (values, value)):
            pages.flatten(0, 1).index_copy_(0, plan.slots, fresh)
        return output.to(query.dtype)

    def recover(self) -> None:
        """See `Attention.recover`. Pages may be handed on with old numbers behind the tokens that
        are stored in them, and a kernel may multiply those with a weight of 0.
        """
        for pages in (self.keys, self.values):
            pages.nan_to_num_(0.0, 0.0, 0.0)

    def _attend_stored(
        self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, plan: VarlenPlan
    ) -> tuple[Tensor, Tensor]:
        """[places, heads, head_dim] and log-sum-exps [places, heads] over the stored pages.

        Query heads that share a key/value head become further queries of it: without a mask they
        are alike, and each page is read once for all of them.
        """
        shape, (num_places, num_heads, head_dim) = plan.shape, query.shape
        folded = query.view(num_places, -1, self._per_kv, head_dim).transpose(1, 2)
        output, lse = self.kernel.call(
            folded.flatten(0, 1),  # [places * per_kv, kv_heads, head_dim]
            keys,
            values,
            plan.query_starts,
            plan.key_starts,
            max(shape.width, shape.wide_width) * self._per_kv,
            shape.num_pages * self.page_size,
            return_aux=AuxRequest(lse=True),
            scale=scaling,
            seqused_k=plan.num_cached,
            block_table=plan.pages,
            num_splits=self.kernel.num_splits,
        )
        output = output.view(num_places, self._per_kv, -1, head_dim).transpose(1, 2)
        lse = lse.view(-1, num_places, self._per_kv).transpose(0, 1)
        return output.flatten(1, 2), lse.reshape(num_places, num_heads)

    def _attend_own(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, plan: VarlenPlan
    ) -> tuple[Tensor, Tensor]:
        """float32 [places, heads, head_dim] and [places, heads] over what the step itself feeds."""
        parts = []
        if plan.shape.num_narrow:
            q, k, v = (part.index_select(0, plan.rectangle) for part in (query, key, value))
            parts.append(_attend_rectangle(q, k, v, plan.hidden, scaling))
        if plan.shape.num_wide:
            q, k, v = (part.index_select(0, plan.wide_places) for part in (query, key, value))
            parts.append(self._attend_wide(q, k, v, scaling, plan))
        output, lse = (torch.cat(part) for part in zip(*parts, strict=True))
        return output.index_select(0, plan.order), lse.index_select(0, plan.order)

    def _attend_wide(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, plan: VarlenPlan
    ) -> tuple[Tensor, Tensor]:
        output, lse = self.kernel.call(
            query,
            key,
            value,
            plan.wide_starts,
            plan.wide_starts,
            plan.shape.wide_width,
            plan.shape.wide_width,
            return_aux=AuxRequest(lse=True),
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=self._per_kv > 1,
        )
        return output.float(), lse.transpose(0, 1)

    def _slots(self, rows: Sequence[Row]) -> list[int]:
        size = self.page_size
        slots: list[int] = []
        for row in rows:
            tokens = range(row.num_cached, row.num_cached + row.num_tokens)
            slots += [row.pages[token // size] * size + token % size for token in tokens]
            slots += [self._waste] * row.num_masks
        return slots


def _split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Narrow rows and wide ones. A causal kernel serves the wide ones, so that rows with several
    groups of masks are narrow whatever their length.
    """
    narrow = [row for row in rows if _is_narrow(row)]
    return narrow, [row for row in rows if not _is_narrow(row)]


def _is_narrow(row: Row) -> bool:
    return row.length <= MAX_NARROW or not row.is_causal


def _order(rows: Sequence[Row], shape: StepShape) -> list[int]:
    """Where each place's result stands once the rectangle and then the wide rows are laid flat."""
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
    hidden: Tensor,  # float32 [rows, 1, 1, width, width]
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Attention of each row to itself, in float32: a row has few keys, and their sum is merged."""
    width, (_, num_kv_heads, head_dim) = hidden.shape[-1], key.shape
    rows = len(key) // width
    keys, values = (
        part.float().view(rows, width, num_kv_heads, head_dim).transpose(1, 2)
        for part in (key, value)
    )  # [rows, kv_heads, width, head_dim]
    queries = query.float().view(rows, width, num_kv_heads, -1, head_dim)
    queries = queries.permute(0, 2, 3, 1, 4)  # [rows, kv_heads, per_kv, width, head_dim]
    folded = (queries * scaling).flatten(2, 3)
    scores = torch.matmul(folded, keys.transpose(-1, -2)).view(*queries.shape[:-1], width) + hidden
    lse = scores.logsumexp(-1)  # [rows, kv_heads, per_kv, width]
    weights = (scores - lse[..., None]).exp()
    output = torch.matmul(weights.flatten(2, 3), values).view(queries.shape)
    output = output.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
    return output, lse.permute(0, 3, 1, 2).flatten(2, 3).flatten(0, 1)
