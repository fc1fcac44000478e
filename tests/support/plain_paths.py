"""Losses of packed rows, and of plain forward passes over what each slot sees."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from mars_platform.method.rules import visibility
from mars_train.method.layout import PADDING_DOCUMENT, Batch, Layout, collate, lay_out
from mars_train.method.objective import Objective

LENGTHS = (21, 9, 17)


def layouts(mask: int) -> list[Layout]:
    """Lay documents out in which every token but the first is a label, behind each of its slots."""
    rng = np.random.default_rng(0)
    return [
        lay_out(rng.integers(1, mask, length), np.arange(length) > 0, 4, mask, block_offset=offset)
        for offset, length in enumerate(LENGTHS)
    ]


def packed_rows(mask: int, multiple_of: int = 1) -> Batch:
    """Pack the documents into one row."""
    return collate([layouts(mask)], 0, multiple_of)


@torch.no_grad()
def plain_logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the logits of each slot behind the tokens that it sees, by transformers' own forward.

    Returns:
        [rows * slots, vocabulary]; zeros for padding.
    """
    seen = visibility(batch.documents, batch.position_ids, batch.blocks, batch.noisy)
    rows, slots = batch.tokens.shape
    table = torch.zeros(rows, slots, model.config.get_text_config().vocab_size)
    left = batch.documents != PADDING_DOCUMENT
    while left.any():
        row, slot = divmod(int((seen.sum(-1) * left).argmax()), slots)
        path = seen[row, slot].nonzero().squeeze(1)
        path = path[batch.position_ids[row, path].argsort()]
        assert batch.position_ids[row, path].tolist() == list(range(len(path)))
        logits = model(batch.tokens[row, path][None], use_cache=False).logits[0]
        # an earlier slot of the path sees the path up to itself
        assert torch.equal(seen[row, path][:, path], torch.ones(len(path), len(path)).tril() > 0)
        table[row, path] = logits
        left[row, path] = False
    return table.flatten(0, 1)


def losses(objective: Objective, batch: Batch) -> Tensor:
    with torch.no_grad():
        return torch.stack(objective.label_losses(batch))


def expected_losses(model: PreTrainedModel, batch: Batch) -> Tensor:
    table = plain_logits(model, batch)
    sources = torch.stack([batch.clean_sources, batch.noisy_sources])
    used = (batch.documents != PADDING_DOCUMENT).flatten().nonzero().squeeze(1)
    assert torch.equal(sources.unique(), used)  # so that each slot is judged
    return torch.stack(
        [F.cross_entropy(table[each], batch.labels, reduction="none") for each in sources]
    )
