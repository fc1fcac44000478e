"""Lays training sequences out as a clean and a noisy stream and packs them into rows.

Works on token ids alone; knows no model, tokenizer or file. The layout is the one of the MARS
paper (arXiv 2604.07023, section 3.2) with what the loss never reads left out: only blocks in
which a label is predicted from behind a mask get a noisy copy.
"""

from __future__ import annotations

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
    positions = np.arange(len(input_ids))
    labels_at = np.flatnonzero(supervised[1:]) + 1
    sources = labels_at - 1
    blocks = np.zeros_like(positions)
    depths: NDArray[np.int64] = np.zeros(len(sources), np.int64)
    if block_size is not None:
        blocks = (positions + block_offset) // block_size
        depths = _depths(supervised, blocks)[sources]
    # At depth 0 no mask is seen: the noisy logits equal the clean ones, which are read instead.
    copied = np.flatnonzero(np.isin(blocks, blocks[sources[depths > 0]]))
    noisy_slot = np.zeros_like(positions)
    noisy_slot[copied] = len(positions) + np.arange(len(copied))
    hidden = np.where(supervised, mask_token_id, input_ids)
    return Layout(
        tokens=np.concatenate([input_ids, hidden[copied]]),
        positions=np.concatenate([positions, copied]),
        blocks=np.concatenate([blocks, blocks[copied]]),
        noisy=np.arange(len(positions) + len(copied)) >= len(positions),
        labels=input_ids[labels_at],
        clean_sources=sources,
        noisy_sources=np.where(depths > 0, noisy_slot[sources], sources),
        depths=depths,
    )


def _depths(supervised: NDArray[np.bool_], blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Masks of its own block that each noisy position sees, itself included. [length]"""
    masks = np.cumsum(supervised, dtype=np.int64)
    block_start = np.searchsorted(blocks, blocks)
    depths: NDArray[np.int64] = masks - masks[block_start] + supervised[block_start]
    return depths


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
        """Tokens of the sequences themselves: no padding, no noisy copies."""
        return int(((self.documents != PADDING_DOCUMENT) & ~self.noisy).sum())

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return Batch(**{name: value.to(device) for name, value in vars(self).items()})


def pack(layouts: Sequence[Layout], row_slots: int) -> list[list[Layout]]:
    """Group layouts into rows of at most ``row_slots`` slots, first fit decreasing.

    A layout longer than ``row_slots`` gets a row of its own.
    """
    rows: list[list[Layout]] = []
    room: list[int] = []
    for layout in sorted(layouts, key=lambda item: len(item.tokens), reverse=True):
        size = len(layout.tokens)
        for index, free in enumerate(room):
            if size <= free:
                rows[index].append(layout)
                room[index] -= size
                break
        else:
            rows.append([layout])
            room.append(max(row_slots - size, 0))
    return rows


def collate(rows: Sequence[Sequence[Layout]], pad_token_id: int) -> Batch:
    """Pad packed rows to the longest one and turn them into tensors."""
    slots = max(sum(len(layout.tokens) for layout in row) for row in rows)
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
