"""The model as a function of a step's tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_serve.engine.attention.interface import Attention
from mars_serve.engine.attention.operator import attending
from mars_serve.engine.decoder.adapter import step_gate
from mars_serve.engine.decoder.decoder import MergedDecoder, is_merged


class StepFunction:
    """The decoder and the output layer over the positions of a step."""

    def __init__(self, model: PreTrainedModel, attention: Attention) -> None:
        """Take a model whose layers, merged or its own, do not change any more."""
        self._output = model.get_output_embeddings()
        self._decode = MergedDecoder(model) if is_merged(model) else _OwnDecoder(model, attention)
        self._gate = step_gate(model)

    @property
    def is_gated(self) -> bool:
        """Whether it matters if the adapter acts in a step."""
        return self._gate is not None

    def hidden(
        self, ids: Tensor, position_ids: Tensor, metadata: Any, *, has_masks: bool = True
    ) -> Tensor:
        """Return the last layer's hidden states of all positions, [positions, hidden_size].

        ``ids``, of tokens, and ``position_ids`` are int64 [positions]. An adapter acts only if
        ``has_masks``, which says that ``ids`` may hold the mask.
        """
        if self._gate is not None:
            self._gate.set(ids if has_masks else None)
        return self._decode(ids, position_ids, metadata)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, vocabulary] of hidden states [n, hidden_size]."""
        logits: Tensor = self._output(hidden)
        return logits

    def write_logits(self, hidden: Tensor, logits: Tensor) -> None:
        """Write the logits of hidden states to a table [n, vocabulary]."""
        output: Any = self._output
        if type(output) is nn.Linear and output.bias is None:
            torch.mm(hidden, output.weight.t(), out=logits)
        else:
            logits.copy_(self.logits(hidden))


class _OwnDecoder:
    """The decoder of a model with layers of transformers, called like `MergedDecoder`."""

    def __init__(self, model: PreTrainedModel, attention: Attention) -> None:
        self._decoder: Any = model.base_model  # the model's forward would wrap its output twice
        self._attention = attention

    def __call__(self, ids: Tensor, position_ids: Tensor, metadata: Any) -> Tensor:
        with attending(partial(self._attention.attend, metadata=metadata)):
            output = self._decoder(
                input_ids=ids[None], position_ids=position_ids[None], use_cache=False
            )
        hidden: Tensor = output[0][0]
        return hidden
