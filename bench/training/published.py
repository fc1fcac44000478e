"""Trains with two conventions of the MARS paper's published code, to measure what they change.

- `fill_last_block` supervises end tokens behind a conversation's own, up to the end of its block.
- `PerConversationTrainer` takes the mean over conversations of the mean over each one's labels;
  the recipe takes the mean over all labels.

A bench passes the filled store as a job's data, or the trainer in place of `StageTrainer`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mars_train.data.token_store import TokenStore, TokenStoreWriter
from mars_train.method.layout import Batch
from mars_train.method.objective import Objective
from mars_train.stage.trainer import StageTrainer


def fill_last_block(
    data: TokenStore, output: Path, *, block_size: int, end_token: int, max_length: int
) -> TokenStore:
    """Write a store whose conversations go on with supervised end tokens.

    Block borders are drawn while training, so each conversation gets ``block_size - 1`` of them,
    which fill its last block wherever the borders lie. The clean loss is taken on them as well.

    Args:
        data: the conversations; one that does not end with a supervised end token was cut, and
            stays as it is.
        output: place of the new store.
        block_size: B in tokens.
        end_token: id of the end token.
        max_length: most tokens of a conversation.
    """
    with TokenStoreWriter(output) as writer:
        for row in range(len(data)):
            input_ids, supervised = data[row]
            last = int(np.flatnonzero(supervised)[-1])
            if input_ids[last] == end_token:
                most = min(last + block_size, max_length)
                filler = np.full(most - last - 1, end_token)
                input_ids = np.concatenate([input_ids[: last + 1], filler])
                supervised = np.concatenate([supervised[: last + 1], np.ones_like(filler, bool)])
            writer.append(
                keys=np.array([[0, row]], np.int64),
                lengths=np.array([len(input_ids)], np.int32),
                tokens=input_ids.astype(np.int32),
                supervised=supervised,
            )
        return writer.finish()


class PerConversation(Objective):
    """The objective with the same weight for every conversation of a batch."""

    def label_weights(self, batch: Batch) -> tuple[Tensor, Tensor]:
        clean, noisy = super().label_weights(batch)
        rows = batch.clean_sources // batch.tokens.shape[1]
        documents = batch.documents.flatten()[batch.clean_sources]
        pairs = torch.stack([rows, documents])
        found, owner, counts = torch.unique(pairs, dim=1, return_inverse=True, return_counts=True)
        mean = len(batch.labels) / max(found.shape[1], 1)  # keeps the sum of weights
        return clean * mean / counts[owner], noisy * mean / counts[owner]


class PerConversationTrainer(StageTrainer):
    """The trainer of a stage with `PerConversation` as its objective."""

    objective_type = PerConversation
