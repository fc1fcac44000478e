"""Attention over a contiguous copy of each row's pages, exact on any device.

Keys and values of masks are written to the copy alone, which no later step reads.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mars_serve.engine.attention.interface import LayerGroup
from mars_serve.engine.batch import BatchRow, StepBatch

_KEY_BLOCK = 512
"""Number of keys in a block of torch's CPU kernel; keys are padded to a multiple of it if results
must not depend on padding."""
_MOST_SCORES = 2**23
"""Most scores that are computed at once, unless one position of each row has more."""


class _Part(NamedTuple):
    """Positions of each row of a group that attend in one call."""

    queries: slice
    keys: slice
    """Keys among which are all that the positions see."""


@dataclass(frozen=True)
class _Group:
    """Rows that attend together, padded to a rectangle."""

    positions: Tensor
    """int64 [rows, width], positions in the step; padding repeats a row's first one."""
    pages: Tensor
    """int64 [rows * kv_heads * pages], pages to be copied, laid out by head."""
    masks: Tensor
    """int64 [3, masks], the position in the step of each mask, its row, and its key in the copy."""
    bias: Tensor
    """float [rows, width, keys], 0 for a visible key and -inf for any other."""
    parts: Sequence[_Part]


@dataclass(frozen=True)
class GatheredMetadata:
    """Attention metadata of one step."""

    slots: Tensor
    """int64 [2, positions], the page and the place in it of each position's key."""
    groups: list[_Group]
    order: Tensor
    """int64 [positions], index of each position in the concatenated outputs of the groups."""


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
        self.page_size = page_size
        self._layers, self._device, self._dtype = group, device, dtype
        self._batch_invariant = batch_invariant
        # Padding reads a page of zeros and writes to another page, as masks do.
        self._zeros, self._waste = num_pages, num_pages + 1
        size = group.num_layers, num_pages + 2, group.kv_heads, page_size
        create = partial(torch.zeros, dtype=dtype, device=device)
        self.keys: Tensor = create((*size, group.key_dim))
        """Keys, [layers, pages, kv_heads, page_size, key_dim]; two pages follow the pool's."""
        self.values: Tensor = self.keys[..., : group.value_dim]
        """Values, laid out as the keys, of which they may be a part."""
        if not group.value_in_key:
            self.values = create((*size, group.value_dim))

    def prepare(self, batch: StepBatch) -> GatheredMetadata:
        """See `Attention.prepare`."""
        self._clear_fresh(batch.rows)
        groups, order, count = list[_Group](), np.zeros(len(batch.ids), dtype=np.int64), 0
        for rows in self._members(batch.rows):
            lengths = np.array([[row.length] for row in rows])
            starts = np.array([[row.start] for row in rows])
            place = np.arange(lengths.max())
            positions = starts + np.where(place < lengths, place, 0)  # [rows, width]
            own = np.flatnonzero(place < lengths)
            order[positions.flat[own]] = count + own
            count += positions.size
            groups.append(self._group(rows, positions, batch))
        return GatheredMetadata(self._slots(batch), groups, self._to_device(order))

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
        page, place = metadata.slots
        if not is_cached:
            self.keys[layer][page, :, place] = key
            if not self._layers.value_in_key:
                self.values[layer][page, :, place] = value
        scores, outputs = _Scores(scaling, softcap, sinks), list[Tensor]()
        for group in metadata.groups:
            keys = self._gather(group, self.keys[layer], key)
            values = keys[..., : self._layers.value_dim]
            if not self._layers.value_in_key:
                values = self._gather(group, self.values[layer], value)
            attended = [
                self._attend_part(
                    query[group.positions[:, part.queries]],
                    keys[:, :, part.keys],
                    values[:, :, part.keys],
                    group.bias[:, part.queries, part.keys],
                    scores,
                )
                for part in group.parts
            ]
            outputs.append(torch.cat(attended, 1).flatten(0, 1))
        return torch.cat(outputs).index_select(0, metadata.order)

    def recover(self) -> None:
        """See `Attention.recover`."""
        self._clear([self._waste])

    def _clear_fresh(self, rows: Sequence[BatchRow]) -> None:
        """Zero the pages that rows start to fill in this step.

        Keys that no query sees still enter a product, with weight 0, and a NaN among them would
        spread.
        """
        size = self.page_size
        self._clear(
            [
                page
                for row in rows
                for page in self._layers.pages(row)[-(-row.num_cached // size) : self._end(row)]
            ]
        )

    def _clear(self, pages: list[int]) -> None:
        where = self._to_device(np.array(pages, dtype=np.int64))
        self.keys.index_fill_(1, where, 0.0)
        self.values.index_fill_(1, where, 0.0)

    def _gather(self, group: _Group, pages: Tensor, fresh: Tensor) -> Tensor:
        """Copy a group's keys or values side by side, those of masks from the step:
        [rows, kv_heads, keys, head_dim].
        """
        copy = pages.flatten(0, 1).flatten(1).index_select(0, group.pages)
        size = len(group.positions), self._layers.kv_heads, group.bias.shape[2], pages.shape[-1]
        positions, rows, keys = group.masks
        copy.view(size)[rows, :, keys] = fresh[positions]
        return copy.view(size)

    def _attend_part(
        self, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scores: _Scores
    ) -> Tensor:
        """Let queries, [rows, width, heads, head_dim], attend: [rows, width, heads, value_dim]."""
        num_rows, kv_heads, per_kv = len(queries), self._layers.kv_heads, self._layers.per_kv
        if self._batch_invariant:  # each position is a row, whose keys are those of the only row
            queries, bias = queries.transpose(0, 1), bias.transpose(0, 1)
            keys, values = (each.expand(len(queries), -1, -1, -1) for each in (keys, values))
        rows, width = queries.shape[:2]
        # Query heads that share a key/value head become further queries of it: no key is repeated.
        folded = queries.reshape(rows, width, kv_heads, per_kv, -1)
        folded = folded.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [rows, kv_heads, per_kv * width, d]
        bias = bias.repeat(1, per_kv, 1).unsqueeze(1)
        is_plain = scores.softcap is not None or scores.sinks is not None
        if is_plain or keys.shape[-1] != values.shape[-1]:
            if scores.sinks is not None:
                sinks = scores.sinks.view(kv_heads, per_kv).repeat_interleave(width, dim=1)
                scores = scores._replace(sinks=sinks.unsqueeze(-1))
            one = 1 if self._batch_invariant else rows
            each = (torch.split(part, one) for part in (folded, keys, values, bias))
            output = torch.cat(
                [_plain_attention(scores, *some) for some in zip(*each, strict=True)]
            )
        else:
            output = F.scaled_dot_product_attention(
                folded, keys, values, attn_mask=bias, scale=scores.scaling
            )
        output = output.view(rows, kv_heads, per_kv, width, -1).permute(0, 3, 1, 2, 4)
        return output.reshape(num_rows, -1, self._layers.heads, values.shape[-1])

    def _members(self, rows: Sequence[BatchRow]) -> list[list[BatchRow]]:
        """Return the rows of each group: rows of similar length and number of keys."""
        groups: dict[Hashable, list[BatchRow]] = {}
        for row in rows:
            num_pages = -(-(row.num_cached + row.length) // self.page_size) - self._hidden(row)
            size = ((row.length - 1).bit_length() + 1) // 2, num_pages.bit_length()
            groups.setdefault(row.start if self._batch_invariant else size, []).append(row)
        return list(groups.values())

    def _end(self, row: BatchRow) -> int:
        """Count the pages of a row's tokens."""
        return -(-(row.num_cached + row.num_tokens) // self.page_size)

    def _hidden(self, row: BatchRow) -> int:
        """Count a row's pages before all that it sees."""
        hidden: int = self._layers.oldest(row.num_cached) // self.page_size
        return hidden

    def _slots(self, batch: StepBatch) -> Tensor:
        slots: list[tuple[int, int]] = []
        for row in batch.rows:
            pages = self._layers.pages(row)
            for token in range(row.num_cached, row.num_cached + row.num_tokens):
                page, place = divmod(token, self.page_size)
                slots.append((pages[page], place))
            slots += [(self._waste, 0)] * row.num_masks
        slots += [(self._waste, 0)] * (len(batch.ids) - len(slots))
        return self._to_device(np.array(slots).T)

    def _group(
        self, rows: list[BatchRow], positions: NDArray[np.int64], batch: StepBatch
    ) -> _Group:
        # No block of keys may begin elsewhere if results must not depend on padding.
        hidden = [0 if self._batch_invariant else self._hidden(row) for row in rows]
        cached = [row.num_cached - n * self.page_size for row, n in zip(rows, hidden, strict=True)]
        num_keys = max(row.length + n for row, n in zip(rows, cached, strict=True))
        if self._batch_invariant:
            num_keys += -num_keys % _KEY_BLOCK
        num_pages = -(-num_keys // self.page_size)
        table = np.full((len(rows), num_pages), self._zeros)
        for each, row, first in zip(table, rows, hidden, strict=True):
            begin, end = self._hidden(row), self._end(row)
            each[begin - first : end - first] = self._layers.pages(row)[begin:end]
        heads = np.arange(self._layers.kv_heads)[:, None]
        offset = positions - positions[:, :1]
        is_mask = offset >= np.array([[row.num_tokens] for row in rows])
        keys = np.array(cached)[:, None] + offset
        masks = np.stack([positions[is_mask], is_mask.nonzero()[0], keys[is_mask]])
        visible = self._visible(batch, positions, keys, np.array(hidden), num_pages)
        bias = np.where(visible, np.float32(0), np.float32(-np.inf))
        return _Group(
            positions=self._to_device(positions),
            pages=self._to_device((table[:, None] * len(heads) + heads).ravel()),
            masks=self._to_device(masks),
            bias=self._to_device(bias).to(self._dtype),
            parts=self._parts(visible),
        )

    def _visible(
        self,
        batch: StepBatch,
        positions: NDArray[np.int64],
        keys: NDArray[np.int64],
        hidden: NDArray[np.int64],
        num_pages: int,
    ) -> NDArray[np.bool_]:
        """Return which of its keys each position of a group sees, [rows, width, keys].

        ``keys``, [rows, width], are the positions' own ones; ``hidden`` many pages of each row are
        left out before the first.
        """
        offset = positions - positions[:, :1]
        leading, own = batch.visible[:, positions] - offset + keys
        ids = np.array(batch.position_ids)[positions]
        oldest = self._layers.oldest(ids)
        first = np.maximum(own, keys - ids + oldest)[..., None]
        key = np.arange(num_pages * self.page_size)
        is_before = key >= (oldest - hidden[:, None] * self.page_size)[..., None]
        is_before &= key < leading[..., None]
        visible: NDArray[np.bool_] = is_before | (key >= first) & (key <= keys[..., None])
        return visible

    def _parts(self, visible: NDArray[np.bool_]) -> list[_Part]:
        """Divide the positions of a group by the keys that they see, [rows, width, keys]."""
        rows, width, num_keys = visible.shape
        if self._batch_invariant:
            last = num_keys - visible[0, :, ::-1].argmax(axis=1)
            blocks = (-(-last // _KEY_BLOCK) * _KEY_BLOCK).tolist()
            runs = [list(run) for _, run in groupby(range(width), key=blocks.__getitem__)]
            return [_Part(slice(run[0], run[-1] + 1), slice(blocks[run[0]])) for run in runs]
        size = max(1, _MOST_SCORES // (rows * num_keys * self._layers.heads))
        parts = []
        for begin in range(0, width, size):
            queries = slice(begin, min(begin + size, width))
            seen = np.flatnonzero(visible[:, queries].any(axis=(0, 1)))
            parts.append(_Part(queries, slice(int(seen[0]), int(seen[-1]) + 1)))
        return parts

    def _to_device(self, numbers: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(numbers).to(self._device, non_blocking=True)


def _plain_attention(
    how: _Scores,  # its sinks are [kv_heads, queries, 1]
    queries: Tensor,  # [rows, kv_heads, queries, head_dim]
    keys: Tensor,  # [rows, kv_heads, keys, head_dim]
    values: Tensor,  # [rows, kv_heads, keys, value_dim]
    bias: Tensor,  # [rows, 1, queries, keys]
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
