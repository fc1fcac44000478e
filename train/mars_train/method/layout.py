"""Lays training sequences out as a clean and a noisy stream, and packs them into rows.

The layout is that of the MARS paper (arXiv 2604.07023, section 3.2), without the slots that the
loss never reads. The clean stream ends at the last token that predicts a label. A block's noisy
copy runs from its first mask to the last position of the block that predicts a label; before its
first mask a block's noisy tokens would equal the clean ones, which are used instead.

For example, with blocks of four tokens and the last five tokens supervised ([ ]), M is a mask:

    position           0    1    2    3  |  4    5    6    7
    input id          10   11   12  [13] |[14] [15] [16] [17]

    clean stream      10   11   12   13  | 14   15   16
      slot             0    1    2    3  |  4    5    6
    noisy stream                      M  |  M    M    M
      slot                            7  |  8    9   10

    label                       13   14  | 15   16   17        predicted at this position
      clean source               2    3  |  4    5    6        slot that predicts it, AR loss
      noisy source               2    7  |  8    9   10        slot that predicts it, noisy loss
      depth                      0    1  |  1    2    3        masks that the noisy source sees
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PADDING_DOCUMENT = -1
"""Document number of padding slots."""

_OF_LABELS = ("labels", "previous", "depths", "in_clean_loss", "in_noisy_loss")
_SLOT_INDICES = ("clean_sources", "noisy_sources")
"""Columns of layouts and batches that hold indices of slots; the others just join."""


@dataclass(frozen=True)
class Layout:
    """One sequence as slots of a packed row: first its clean stream, then its noisy one."""

    tokens: NDArray[np.int64]  # [slots]
    position_ids: NDArray[np.int64]  # [slots]
    blocks: NDArray[np.int64]  # [slots], block for the rule of visibility; see `lay_out`
    noisy: NDArray[np.bool_]  # [slots]
    labels: NDArray[np.int64]  # [labels]
    previous: NDArray[np.int64]  # [labels], token before the label
    clean_sources: NDArray[np.int64]  # [labels], slot whose clean logits predict the label
    noisy_sources: NDArray[np.int64]  # [labels], slot whose noisy logits predict the label
    depths: NDArray[np.int64]  # [labels], masks that the noisy source sees
    in_clean_loss: NDArray[np.bool_]  # [labels], whether the label counts in the clean loss
    in_noisy_loss: NDArray[np.bool_]  # [labels], whether the label counts in the noisy loss


def lay_out(
    input_ids: NDArray[np.int64],
    supervised: NDArray[np.bool_],
    block_size: int | None,
    mask_token_id: int,
    block_offset: int = 0,
    *,
    clean_loss: bool = True,
) -> Layout:
    """Lay one sequence out.

    Args:
        input_ids: [length], the clean tokens.
        supervised: [length], whether a token is a label; the first token never is one, because no
            token before it could predict it.
        block_size: B in tokens, or None for the clean stream alone (plain AR training).
        mask_token_id: id that replaces supervised tokens in the noisy stream.
        block_offset: shifts the block borders: position p lies in block
            ``(p + block_offset) // B``; 0 is the paper's layout. Decoding starts a window at any
            position, so training must not tie the borders to the text: with prompts of one length
            the model would see one alignment only.
        clean_loss: whether the sequence is one that the model is to learn to write. Of a sequence
            that it wrote itself, only what masks predict is to be learned.
    """
    labels_at = np.flatnonzero(supervised[1:]) + 1
    sources = labels_at - 1
    length = int(sources[-1]) + 1 if len(sources) else 1
    positions = np.arange(length)
    if block_size is None:
        blocks = depths = np.zeros_like(positions)
        copied = positions[:0]
    else:
        blocks = (positions + block_offset) // block_size
        depths = _depths(supervised[:length], blocks)
        copied = _copied(depths, blocks, sources)

    # A noisy token sees the clean tokens of earlier blocks only. A clean token before its block's
    # first mask replaces its noisy copy, so it counts as part of the block before.
    clean_blocks = np.where(depths == 0, blocks - 1, blocks)
    copy_slots = np.zeros_like(positions)
    copy_slots[copied] = length + np.arange(len(copied))
    noisy_ids = np.where(supervised, mask_token_id, input_ids)
    return Layout(
        tokens=np.concatenate([input_ids[:length], noisy_ids[copied]]),
        position_ids=np.concatenate([positions, copied]),
        blocks=np.concatenate([clean_blocks, blocks[copied]]),
        noisy=np.arange(length + len(copied)) >= length,
        labels=input_ids[labels_at],
        previous=input_ids[sources],
        clean_sources=sources,
        noisy_sources=np.where(depths[sources] > 0, copy_slots[sources], sources),
        depths=depths[sources],
        in_clean_loss=np.full(len(labels_at), clean_loss),
        in_noisy_loss=np.full(len(labels_at), block_size is not None),
    )


def _depths(supervised: NDArray[np.bool_], blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many masks each noisy position sees in its block, itself included, [length]."""
    masks = np.cumsum(supervised, dtype=np.int64)
    block_start = np.searchsorted(blocks, blocks)
    depths: NDArray[np.int64] = masks - masks[block_start] + supervised[block_start]
    return depths


def _copied(
    depths: NDArray[np.int64], blocks: NDArray[np.int64], sources: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the positions from a block's first mask to the last source in the block."""
    sources_before = np.searchsorted(sources, np.arange(len(blocks)))  # [length]
    sources_to_block_end = np.searchsorted(sources, np.searchsorted(blocks, blocks, side="right"))
    return np.flatnonzero((depths > 0) & (sources_to_block_end > sources_before))


@dataclass(frozen=True)
class Batch:
    """Packed rows as tensors; see `Layout`. Sources index the flattened ``rows * slots``."""

    tokens: Tensor  # int64 [rows, slots]
    position_ids: Tensor  # int64 [rows, slots]
    blocks: Tensor  # int64 [rows, slots]
    documents: Tensor  # int64 [rows, slots], number of the sequence within its row
    noisy: Tensor  # bool [rows, slots]
    labels: Tensor  # int64 [labels]
    previous: Tensor  # int64 [labels]
    clean_sources: Tensor  # int64 [labels]
    noisy_sources: Tensor  # int64 [labels]
    depths: Tensor  # int64 [labels]
    in_clean_loss: Tensor  # bool [labels]
    in_noisy_loss: Tensor  # bool [labels]

    @property
    def num_clean(self) -> int:
        """Number of labels of the clean loss."""
        return int(self.in_clean_loss.sum())

    @property
    def num_noisy(self) -> int:
        """Number of labels of the noisy loss, those at depth 0 included."""
        return int(self.in_noisy_loss.sum())

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the clean stream, without padding and noisy copies."""
        return int(((self.documents != PADDING_DOCUMENT) & ~self.noisy).sum())

    def to(self, device: torch.device) -> Batch:
        """Return a copy of the batch on another device."""
        return Batch(**{name: value.to(device) for name, value in vars(self).items()})


def pack(layouts: Sequence[Layout], row_slots: int, multiple_of: int = 1) -> list[list[Layout]]:
    """Distribute layouts, at least one, over the number of rows that leaves the least padding.

    A layout longer than ``row_slots`` raises that limit to its own length, because `collate`, which
    will be called with ``multiple_of``, pads all rows to the longest one.
    """
    largest_first = sorted(layouts, key=lambda item: len(item.tokens), reverse=True)
    sizes = [len(layout.tokens) for layout in largest_first]
    capacity = max(row_slots, sizes[0])
    fewest = -(-sum(sizes) // capacity)
    # Twice the fewest rows always suffice: if a layout fitted nowhere, every row would be at least
    # half full. One row per layout gives the shortest rows, which wins if padding is equal.
    counts = {*range(fewest, min(2 * fewest, len(sizes)) + 1), len(sizes)}
    options = [_distribute(sizes, num_rows) for num_rows in sorted(counts)]

    def area(rows: list[list[int]]) -> tuple[int, int]:
        return _padded(rows, sizes, multiple_of) * len(rows), -len(rows)

    fitting = [rows for rows in options if _padded(rows, sizes) <= capacity]
    return [[largest_first[item] for item in row] for row in min(fitting, key=area)]


def _distribute(sizes: Sequence[int], num_rows: int) -> list[list[int]]:
    """Add each item, largest first, to the emptiest row; return the items of each row."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    fills = [(0, row) for row in range(num_rows)]  # a heap
    for item, size in enumerate(sizes):
        fill, row = fills[0]
        rows[row].append(item)
        heapq.heapreplace(fills, (fill + size, row))
    return rows


def _padded(rows: Sequence[Sequence[int]], sizes: Sequence[int], multiple_of: int = 1) -> int:
    fullest = max(sum(sizes[item] for item in row) for row in rows)
    return -(-fullest // multiple_of) * multiple_of


def collate(rows: Sequence[Sequence[Layout]], pad_token_id: int, multiple_of: int = 1) -> Batch:
    """Pad packed rows to the longest one, rounded up to ``multiple_of`` slots, and make tensors."""
    fullest = max(sum(len(layout.tokens) for layout in row) for row in rows)
    slots = -(-fullest // multiple_of) * multiple_of
    shape = (len(rows), slots)
    tokens = np.full(shape, pad_token_id, np.int64)
    position_ids = np.tile(np.arange(slots), (len(rows), 1))
    documents = np.full(shape, PADDING_DOCUMENT, np.int64)
    blocks = np.zeros(shape, np.int64)
    noisy = np.zeros(shape, bool)
    joined: dict[str, list[NDArray[Any]]] = {name: [] for name in (*_OF_LABELS, *_SLOT_INDICES)}
    for row_index, row in enumerate(rows):
        start = 0
        for document, layout in enumerate(row):
            span = (row_index, slice(start, start + len(layout.tokens)))
            tokens[span], position_ids[span] = layout.tokens, layout.position_ids
            blocks[span], noisy[span] = layout.blocks, layout.noisy
            documents[span] = document
            offset = row_index * slots + start
            for name in _OF_LABELS:
                joined[name].append(getattr(layout, name))
            for name in _SLOT_INDICES:
                joined[name].append(getattr(layout, name) + offset)
            start += len(layout.tokens)
    return Batch(
        tokens=torch.from_numpy(tokens),
        position_ids=torch.from_numpy(position_ids),
        blocks=torch.from_numpy(blocks),
        documents=torch.from_numpy(documents),
        noisy=torch.from_numpy(noisy),
        **{name: torch.from_numpy(np.concatenate(parts)) for name, parts in joined.items()},
    )
