"""The loss of a stage that trains an adapter: that of masks, behind a fixed clean stream.

The clean stream holds no mask, so an adapter changes neither its hidden states nor its loss. It is
computed first, by itself and without gradients, and keeps its keys and values. The noisy stream is
then computed behind them. So the backward pass goes through the noisy stream alone, and no other
activations are kept. Imports no Ray.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from mars_platform.method.rules import RowSlots
from mars_train.method.attention import (
    FLEX_MULTIPLE,
    Attention,
    StoredStream,
    mask_between,
    slots_of,
    use_stored_streams,
)
from mars_train.method.layout import PADDING_DOCUMENT, Batch
from mars_train.method.objective import LossSums, Objective


class AdapterObjective(Objective):
    """The model with an adapter and the loss of its masks, as the module that is wrapped.

    Args:
        model: a model with an adapter attached; its kind of attention is changed in place.
        attention: see `Objective`.
    """

    def __init__(self, model: PreTrainedModel, *, attention: Attention = "sdpa") -> None:
        super().__init__(model, masked=True, attention=attention)
        use_stored_streams(model)

    def forward(self, batch: Batch) -> LossSums:
        """Return the noisy loss of labels behind masks; the clean one, which is constant, is 0."""
        hidden = self._hidden_states(batch)
        masked = batch.depths > 0
        noisy = self._cross_entropy(hidden[batch.noisy_sources[masked]], batch.labels[masked])
        return LossSums(noisy.new_zeros(()), noisy.sum(), len(batch.labels))

    def _hidden_states(self, batch: Batch) -> Tensor:
        multiple_of = FLEX_MULTIPLE if self.attention == "flex" else 1
        clean = _select(batch, ~batch.noisy, multiple_of)
        noisy = _select(batch, batch.noisy, multiple_of)
        stored = StoredStream(self.attention)
        with torch.no_grad():
            clean_hidden = self._pass(batch.tokens, clean, clean.slots, stored)
        stored.is_complete = True
        both = (torch.cat(pair, dim=1) for pair in zip(clean.slots, noisy.slots, strict=True))
        noisy_hidden = self._pass(batch.tokens, noisy, RowSlots(*both), stored)
        num_slots = batch.tokens.shape[1]
        table = noisy_hidden.new_zeros(batch.tokens.numel(), noisy_hidden.shape[-1])
        for stream, hidden in ((clean, clean_hidden), (noisy, noisy_hidden)):
            table = table.index_copy(0, stream.flat_indices(num_slots), hidden[stream.is_used])
        return table

    def _pass(
        self, tokens: Tensor, stream: _Stream, keys: RowSlots, stored: StoredStream
    ) -> Tensor:
        """Return the last hidden states [rows, length, width] of one stream."""
        output = self.model.base_model(
            input_ids=tokens.gather(1, stream.indices),
            position_ids=stream.slots.position,
            attention_mask=mask_between(stream.slots, keys, self.attention),
            use_cache=False,
            stored=stored,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden


@dataclass(frozen=True)
class _Stream:
    """The slots of one stream of a batch, moved to the beginning of their rows."""

    indices: Tensor  # int64 [rows, length], slot in the batch's row
    is_used: Tensor  # bool [rows, length], False for padding
    slots: RowSlots  # columns of [rows, length]

    def flat_indices(self, num_slots: int) -> Tensor:
        """Return the used slots as indices of the flattened ``rows * slots``, int64 [used]."""
        begins = torch.arange(len(self.indices), device=self.indices.device) * num_slots
        return (self.indices + begins[:, None])[self.is_used]


def _select(batch: Batch, wanted: Tensor, multiple_of: int) -> _Stream:
    """Select the slots of a stream, padded to the longest row, rounded up to ``multiple_of``.

    Args:
        batch: the batch.
        wanted: bool [rows, slots], whether a slot belongs to the stream; padding never does.
        multiple_of: the length of the rows is a multiple of it, and at least one slot.
    """
    wanted = wanted & (batch.documents != PADDING_DOCUMENT)
    counts = wanted.sum(dim=1, keepdim=True)  # [rows, 1]
    length = -(-max(int(counts.max()), 1) // multiple_of) * multiple_of
    order = wanted.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    indices = F.pad(order, (0, max(length - order.shape[1], 0)))[:, :length]
    is_used = torch.arange(length, device=wanted.device) < counts
    document, *others = (column.gather(1, indices) for column in slots_of(batch))
    return _Stream(
        indices=indices,
        is_used=is_used,
        slots=RowSlots(document.masked_fill(~is_used, PADDING_DOCUMENT), *others),
    )
