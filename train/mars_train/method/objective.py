"""The training loss over a packed batch: AR cross-entropy, or MARS's two terms.

    loss = CE(noisy logits, labels) + ar_weight * CE(clean logits, labels)

(arXiv 2604.07023, section 3.2). Imports no Ray.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from mars_train.method.attention import Attention, attention_mask, use_attention
from mars_train.method.layout import Batch

MAX_LOGITS = 2**26
"""Most logits in memory at once, forward or backward, in elements (256 MiB in float32)."""


class LossSums(NamedTuple):
    """Cross-entropy summed over a batch's supervised labels; divide by ``num_labels``.

    It is a tuple because FSDP2 searches the objective's output for tensors, to which it attaches
    the start of its backward pass.
    """

    clean: Tensor  # float32 [], nats
    noisy: Tensor  # float32 [], nats; zero for plain AR training
    num_labels: int


class Objective(nn.Module):
    """The model and its loss as the one module that data parallelism wraps.

    It calls the decoder and the output layer separately, and computes logits only for the slots
    that predict a label.

    Args:
        model: any decoder that takes its attention through transformers' interface; its kind of
            attention is changed in place.
        masked: whether the noisy stream is trained (MARS) or the clean one alone (AR).
        attention: ``sdpa`` runs everywhere with a dense mask; ``flex`` skips masked blocks, trains
            on CUDA only and needs rows of a multiple of ``FLEX_MULTIPLE`` slots.
        compile: compile the decoder layers and the loss, for any shape of batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        masked: bool,
        attention: Attention = "sdpa",
        compile: bool = False,  # noqa: A002 - named as in torch
    ) -> None:
        super().__init__()
        use_attention(model, attention)
        self.model = model
        self.masked = masked
        self.attention = attention
        self._token_losses = _token_losses
        if compile:
            # Layers are compiled one by one: they share one graph, and FSDP2 can still gather and
            # free each of them.
            for layer in model.base_model.layers:
                layer.compile(dynamic=True)
            self._token_losses = torch.compile(_token_losses, dynamic=True)

    def forward(self, batch: Batch) -> LossSums:
        """Return the loss sums of one packed batch; without labels, zeros that have gradients."""
        clean, noisy = self.label_losses(batch)
        return LossSums(clean.sum(), noisy.sum(), len(batch.labels))

    def label_losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the clean and the noisy loss of each label, float32 [labels] each, in nats."""
        hidden = self._hidden_states(batch)  # [rows * slots, width]
        if not self.masked:
            clean = self._cross_entropy(hidden[batch.clean_sources], batch.labels)
            return clean, torch.zeros_like(clean)
        masked = batch.depths > 0  # at depth 0 the noisy logits equal the clean ones
        sources = torch.cat([batch.clean_sources, batch.noisy_sources[masked]])
        losses = self._cross_entropy(
            hidden[sources], torch.cat([batch.labels, batch.labels[masked]])
        )
        clean, noisy = losses.tensor_split([len(batch.labels)])
        return clean, clean.masked_scatter(masked, noisy)

    def _hidden_states(self, batch: Batch) -> Tensor:
        output = self.model.base_model(
            input_ids=batch.tokens,
            position_ids=batch.position_ids,
            attention_mask=attention_mask(batch, self.attention),
            use_cache=False,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden.flatten(0, 1)

    def _cross_entropy(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the losses of hidden states [labels, width], in chunks of ``MAX_LOGITS`` logits.

        Several chunks are checkpointed: the backward pass computes their logits again.
        ``F.linear_cross_entropy`` would do the same, but torch 2.11 lacks it, and it takes a weight
        matrix instead of any module as the output layer.
        """
        num_chunks = -(-len(labels) * self.model.config.vocab_size // MAX_LOGITS)
        if num_chunks <= 1:
            return self._chunk_losses(hidden, labels)
        recompute = partial(
            checkpoint, self._chunk_losses, use_reentrant=False, preserve_rng_state=False
        )
        return torch.cat(list(map(recompute, hidden.chunk(num_chunks), labels.chunk(num_chunks))))

    def _chunk_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return self._token_losses(self.model.get_output_embeddings()(hidden), labels)


def _token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="none")
