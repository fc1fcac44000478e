"""The training loss over a packed batch: AR cross-entropy, or MARS's two terms.

    loss = CE(noisy logits, labels) + ar_weight * CE(clean logits, labels)

(arXiv 2604.07023, section 3.2.) Knows no data format, optimizer or cluster.
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
"""Logits that exist at once, forward and backward: elements, 256 MiB in float32."""


class LossSums(NamedTuple):
    """Cross-entropy summed over the batch's supervised labels; divide by ``num_labels``.

    A tuple, so that whatever wraps the objective finds the tensors in its output: FSDP2 hangs the
    start of the backward pass on them.
    """

    clean: Tensor  # float32 [], nats
    noisy: Tensor  # float32 [], nats; zero for plain AR training
    num_labels: int


class Objective(nn.Module):
    """Wraps the model so that one ``forward`` yields the loss sums.

    Being the module that data parallelism wraps, it runs the decoder and the output layer itself:
    logits are computed only where a label reads them, never for whole rows.

    Args:
        model: any decoder that takes its attention through transformers' interface; which one it
            uses is changed in place.
        masked: whether the noisy stream is trained (MARS) or the clean one alone (AR).
        attention: ``sdpa`` runs everywhere under a dense mask; ``flex`` skips what is masked,
            trains on CUDA only and wants rows of a multiple of ``FLEX_MULTIPLE`` slots.
        compile: compile the decoder layers and the loss, for any shape of batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        masked: bool,
        attention: Attention = "sdpa",
        compile: bool = False,  # noqa: A002 - torch's own word
    ) -> None:
        super().__init__()
        use_attention(model, attention)
        self.model = model
        self.masked = masked
        self.attention = attention
        self._token_losses = _token_losses
        if compile:
            # Layer by layer: one graph serves all layers, and FSDP2, which gathers and frees
            # layers, works as before.
            for layer in model.base_model.layers:
                layer.compile(dynamic=True)
            self._token_losses = torch.compile(_token_losses, dynamic=True)

    def forward(self, batch: Batch) -> LossSums:
        """Loss sums of one packed batch; with no label in it, zeros that have gradients."""
        clean, noisy = self._label_losses(batch)
        return LossSums(clean.sum(), noisy.sum(), len(batch.labels))

    def label_losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Losses of each label, for evaluation: clean and noisy, float32 [labels] each, nats.

        Where FSDP2 shards the objective, it must be told of this method
        (``torch.distributed.fsdp.register_fsdp_forward_method``), as of any but ``forward``.
        """
        return self._label_losses(batch)

    def _label_losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = self._hidden_states(batch)  # [rows * slots, width]
        if not self.masked:
            clean = self._cross_entropy(hidden[batch.clean_sources], batch.labels)
            return clean, torch.zeros_like(clean)
        behind = batch.depths > 0  # the others' noisy logits equal the clean ones
        sources = torch.cat([batch.clean_sources, batch.noisy_sources[behind]])
        losses = self._cross_entropy(
            hidden[sources], torch.cat([batch.labels, batch.labels[behind]])
        )
        clean, masked = losses.tensor_split([len(batch.labels)])
        return clean, clean.masked_scatter(behind, masked)

    def _hidden_states(self, batch: Batch) -> Tensor:
        output = self.model.base_model(
            input_ids=batch.tokens,
            position_ids=batch.positions,
            attention_mask=attention_mask(batch, self.attention),
            use_cache=False,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden.flatten(0, 1)

    def _cross_entropy(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Losses of [labels, width] hidden states, never more than ``MAX_LOGITS`` at once.

        Chunks are checkpointed: their logits are computed again in the backward pass.
        ``F.linear_cross_entropy`` would do the same (torch 2.13, unreduced), but torch 2.11 lacks
        it, and it takes the weight where this takes whatever module the output layer is.
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
