"""The loss of a stage that trains an adapter: that of masks, behind a fixed clean stream.

The clean stream holds no mask, so an adapter changes neither its hidden states nor its loss. It is
computed first, by itself and without gradients, and keeps its keys and values. The noisy stream is
then computed behind them. So the backward pass goes through the noisy stream alone, and no other
activations are kept. Imports no Ray.

A recurrent layer hands no keys from the clean stream to the noisy one, so that a model with such
layers is computed in one pass, as in other stages.
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
    RowMasks,
    StoredStream,
    slots_of,
)
from mars_train.method.layout import PADDING_DOCUMENT, Batch
from mars_train.method.objective import MaskLoss, Objective


class AdapterObjective(Objective):
    """The model with an adapter and the loss of its masks, as the module that is wrapped.

    The model's kind of attention is changed in place; see `Objective`. The clean loss, which is
    constant, is not computed and counts 0.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        mask_loss: MaskLoss | None = None,
        attention: Attention = "sdpa",
    ) -> None:
        super().__init__(model, masked=True, mask_loss=mask_loss, attention=attention)
        self._multiple_of = FLEX_MULTIPLE if attention == "flex" else 1

    def _hidden_states(self, batch: Batch) -> Tensor:
        if self._is_recurrent:
            return super()._hidden_states(batch)
        clean, noisy = self._clean_pass(batch), _select(batch, batch.noisy, self._multiple_of)
        pairs = zip(clean.stream.slots, noisy.slots, strict=True)
        both = RowSlots(*(torch.cat(pair, dim=1) for pair in pairs))
        hidden = self._pass(batch.tokens, noisy, both, clean.stored)
        table = hidden.new_zeros(batch.tokens.numel(), hidden.shape[-1])
        for stream, states in ((clean.stream, clean.hidden), (noisy, hidden)):
            indices = stream.flat_indices(batch.tokens.shape[1])
            table = table.index_copy(0, indices, states[stream.is_used])
        return table

    @torch.no_grad()
    def _clean_pass(self, batch: Batch) -> _CleanStream:
        stream = _select(batch, ~batch.noisy, self._multiple_of)
        stored = StoredStream()
        hidden = self._pass(batch.tokens, stream, stream.slots, stored)
        stored.is_complete = True
        return _CleanStream(stream, hidden, stored)

    def _pass(
        self, tokens: Tensor, stream: _Stream, keys: RowSlots, stored: StoredStream
    ) -> Tensor:
        masks = RowMasks(stream.slots, keys, self.attention, stored)
        return self._decode(tokens.gather(1, stream.indices), masks)

    def _clean_losses(self, hidden: Tensor, batch: Batch) -> Tensor:
        return torch.zeros(len(batch.labels), device=hidden.device)


@dataclass(frozen=True)
class _Stream:
    indices: Tensor  # int64 [rows, length], slot in the batch's row
    is_used: Tensor  # bool [rows, length], False for padding
    slots: RowSlots  # columns of [rows, length]

    def flat_indices(self, num_slots: int) -> Tensor:
        """Return the used slots as indices of the flattened ``rows * slots``, int64 [used]."""
        begins = torch.arange(len(self.indices), device=self.indices.device) * num_slots
        return (self.indices + begins[:, None])[self.is_used]


@dataclass(frozen=True)
class _CleanStream:
    stream: _Stream
    hidden: Tensor  # [rows, length, width], last hidden states
    stored: StoredStream


def _select(batch: Batch, wanted: Tensor, multiple_of: int) -> _Stream:
    """Select the slots that are ``wanted``, bool [rows, slots], padded to the longest row.

    The length is a multiple of ``multiple_of``, and at least one slot; padding is never selected.
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
