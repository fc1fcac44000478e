"""Lays training sequences out as a clean and a noisy stream and packs them into rows.

Works on token ids alone; knows no model, tokenizer or file. The layout is the one of the MARS
paper (arXiv 2604.07023, section 3.2) with what the loss never reads left out: a block's noisy
copy runs from its first mask to the last position that predicts a label, and the clean stream
ends where the last label is predicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PADDING_DOCUMENT = -1
"""Document number of padding slots."""


@dataclass(frozen=True)
class Layout:
    """One sequence as slots of a packed row; labels and what follows run over its labels."""

    tokens: NDArray[np.int64]  # [slots]
    positions: NDArray[np.int64]  # [slots]
    blocks: NDArray[np.int64]  # [slots]
    noisy: NDArray[np.bool_]  # [slots]
    labels: NDArray[np.int64]  # [labels]
    clean_sources: NDArray[np.int64]  # [labels], slot whose clean logits predict the label
    noisy_sources: NDArray[np.int64]  # [labels], slot whose noisy logits predict the label
    depths: NDArray[np.int64]  # [labels], masks that the noisy prediction sees


def lay_out(
    input_ids: NDArray[np.int64],
    supervised: NDArray[np.bool_],
    block_size: int | None,
    mask_token_id: int,
    block_offset: int = 0,
) -> Layout:
    """Lay one sequence out.

    Args:
        input_ids: [length], the clean tokens.
        supervised: [length], which tokens are labels; the first token never is, having no
            predecessor to predict it.
        block_size: B in tokens, or None for the clean stream alone (plain AR training).
        mask_token_id: id that stands for a hidden token in the noisy stream.
        block_offset: shifts the block borders, so that position p lies in block
            ``(p + block_offset) // B``; 0 is the paper's layout. Decoding starts a window at any
            position, so training must not tie the borders to the text (data whose prompts all
            have one length would otherwise show the model one alignment only).
    """
    labels_at = np.flatnonzero(supervised[1:]) + 1
    sources = labels_at - 1
    length = int(sources[-1]) + 1 if len(sources) else 1
    positions = np.arange(length)
    blocks = depths = np.zeros_like(positions)
    copied = positions[:0]
    if block_size is not None:
        blocks = (positions + block_offset) // block_size
        depths = _depths(supervised[:length], blocks)
        copied = _copied(depths, blocks, sources)
        # Before its block's first mask a noisy token equals its clean one, which stands in for
        # it: in visibility's terms, it belongs to the block before.
        blocks = blocks - (depths == 0)
    label_depths = depths[sources]
    noisy_slot = np.zeros_like(positions)
    noisy_slot[copied] = length + np.arange(len(copied))
    hidden = np.where(supervised, mask_token_id, input_ids)
    return Layout(
        tokens=np.concatenate([input_ids[:length], hidden[copied]]),
        positions=np.concatenate([positions, copied]),
        blocks=np.concatenate([blocks, blocks[copied]]),
        noisy=np.arange(length + len(copied)) >= length,
        labels=input_ids[labels_at],
        clean_sources=sources,
        noisy_sources=np.where(label_depths > 0, noisy_slot[sources], sources),
        depths=label_depths,
    )


def _depths(supervised: NDArray[np.bool_], blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Masks of its own block that each noisy position sees, itself included. [length]"""
    masks = np.cumsum(supervised, dtype=np.int64)
    block_start = np.searchsorted(blocks, blocks)
    depths: NDArray[np.int64] = masks - masks[block_start] + supervised[block_start]
    return depths


def _copied(
    depths: NDArray[np.int64], blocks: NDArray[np.int64], sources: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Positions whose noisy token is read by a source in their block, itself or a later one."""
    sources_before = np.searchsorted(sources, np.arange(len(blocks)))  # [length]
    sources_to_block_end = np.searchsorted(sources, np.searchsorted(blocks, blocks, side="right"))
    return np.flatnonzero((depths > 0) & (sources_to_block_end > sources_before))


@dataclass(frozen=True)
class Batch:
    """Packed rows as tensors; sources index the flattened ``rows * slots``."""

    tokens: Tensor  # int64 [rows, slots]
    positions: Tensor  # int64 [rows, slots]
    blocks: Tensor  # int64 [rows, slots]
    documents: Tensor  # int64 [rows, slots]
    noisy: Tensor  # bool [rows, slots]
    labels: Tensor  # int64 [labels]
    clean_sources: Tensor  # int64 [labels]
    noisy_sources: Tensor  # int64 [labels]
    depths: Tensor  # int64 [labels]

    @property
    def num_tokens(self) -> int:
        """Tokens of the clean stream: no padding, no noisy copies."""
        return int(((self.documents != PADDING_DOCUMENT) & ~self.noisy).sum())

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return Batch(**{name: value.to(device) for name, value in vars(self).items()})


def pack(layouts: Sequence[Layout], row_slots: int, multiple_of: int = 1) -> list[list[Layout]]:
    """Share layouts out evenly over the number of rows that leaves the least padding.

    Rows hold at most ``row_slots`` slots, or as many as the longest layout has, since all rows of
    a batch are padded to that length anyway. ``multiple_of`` is what :func:`collate` is given.
    """
    largest_first = sorted(layouts, key=lambda item: len(item.tokens), reverse=True)
    sizes = [len(layout.tokens) for layout in largest_first]
    capacity = max(row_slots, sizes[0])
    fewest = -(-sum(sizes) // capacity)
    # Twice the fewest always suffice: if a layout fitted nowhere, every row would be half full.
    # A row each has the shortest rows, which counts where padding is the same.
    counts = {*range(fewest, min(2 * fewest, len(sizes)) + 1), len(sizes)}
    options = [_share_out(sizes, num_rows) for num_rows in sorted(counts)]

    def area(rows: list[list[int]]) -> tuple[int, int]:
        return _padded(rows, sizes, multiple_of) * len(rows), -len(rows)

    fitting = [rows for rows in options if _padded(rows, sizes) <= capacity]
    return [[largest_first[item] for item in row] for row in min(fitting, key=area)]


def _share_out(sizes: Sequence[int], num_rows: int) -> list[list[int]]:
    """Each item, largest first, to the row that is emptiest so far; items of each row."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    fills = [(0, row) for row in range(num_rows)]  # a heap
    for item, size in enumerate(sizes):
        fill, row = fills[0]
        rows[row].append(item)
        heapq.heapreplace(fills, (fill + size, row))
    return rows


def _padded(rows: Sequence[Sequence[int]], sizes: Sequence[int], multiple_of: int = 1) -> int:
    """Slots of the fullest row, rounded up."""
    fullest = max(sum(sizes[item] for item in row) for row in rows)
    return -(-fullest // multiple_of) * multiple_of


def collate(rows: Sequence[Sequence[Layout]], pad_token_id: int, multiple_of: int = 1) -> Batch:
    """Pad packed rows to the longest one, rounded up to ``multiple_of`` slots, as tensors."""
    fullest = max(sum(len(layout.tokens) for layout in row) for row in rows)
    slots = -(-fullest // multiple_of) * multiple_of
    shape = (len(rows), slots)
    tokens = np.full(shape, pad_token_id, np.int64)
    positions = np.tile(np.arange(slots), (len(rows), 1))
    documents = np.full(shape, PADDING_DOCUMENT, np.int64)
    blocks = np.zeros(shape, np.int64)
    noisy = np.zeros(shape, bool)
    labels, clean, masked, depths = [], [], [], []
    for row_index, row in enumerate(rows):
        start = 0
        for document, layout in enumerate(row):
            span = (row_index, slice(start, start + len(layout.tokens)))
            tokens[span], positions[span] = layout.tokens, layout.positions
            blocks[span], noisy[span] = layout.blocks, layout.noisy
            documents[span] = document
            offset = row_index * slots + start
            labels.append(layout.labels)
            depths.append(layout.depths)
            clean.append(layout.clean_sources + offset)
            masked.append(layout.noisy_sources + offset)
            start += len(layout.tokens)
    return Batch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        blocks=torch.from_numpy(blocks),
        documents=torch.from_numpy(documents),
        noisy=torch.from_numpy(noisy),
        labels=torch.from_numpy(np.concatenate(labels)),
        clean_sources=torch.from_numpy(np.concatenate(clean)),
        noisy_sources=torch.from_numpy(np.concatenate(masked)),
        depths=torch.from_numpy(np.concatenate(depths)),
    )
