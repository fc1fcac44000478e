"""The training loss over a packed batch: AR cross-entropy, or MARS's two terms.

    loss = CE(noisy logits, labels) + ar_weight * CE(clean logits, labels)

(arXiv 2604.07023, section 3.2.) Knows no data format, optimizer or cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_platform.method import visibility
from mars_train.layout import Batch


@dataclass(frozen=True)
class LossSums:
    """Cross-entropy summed over the batch's supervised labels; divide by ``num_labels``."""

    clean: Tensor  # float32 [], nats
    noisy: Tensor  # float32 [], nats; zero for plain AR training
    num_labels: int


class Objective(nn.Module):
    """Wraps the model so that one ``forward`` yields the loss sums.

    Being the module that data parallelism wraps, it runs the decoder and the output layer itself:
    logits are computed only where a label reads them, never for whole rows.
    """

    def __init__(self, model: PreTrainedModel, *, masked: bool) -> None:
        super().__init__()
        self.model = model
        self.masked = masked

    def forward(self, batch: Batch) -> LossSums:
        """Loss sums of one packed batch."""
        hidden = self._hidden_states(batch)  # [rows * slots, width]
        clean = self._cross_entropy(hidden[batch.clean_sources], batch.labels)
        if not self.masked:
            return LossSums(clean.sum(), clean.new_zeros(()), len(batch.labels))
        copied = batch.depths > 0
        noisy = self._cross_entropy(hidden[batch.noisy_sources[copied]], batch.labels[copied])
        return LossSums(clean.sum(), noisy.sum() + clean[~copied].sum(), len(batch.labels))

    def _hidden_states(self, batch: Batch) -> Tensor:
        visible = visibility(batch.documents, batch.positions, batch.blocks, batch.noisy)
        output = self.model.base_model(
            input_ids=batch.tokens,
            position_ids=batch.positions,
            attention_mask=visible.unsqueeze(1),  # [rows, 1, slots, slots]
            use_cache=False,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden.flatten(0, 1)

    def _cross_entropy(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.model.get_output_embeddings()(hidden)
        return F.cross_entropy(logits.float(), labels, reduction="none")
