"""The two halves of a causal model: the decoder, and what makes logits of its hidden states.

Imports no Ray or HTTP library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # importing it takes seconds, and a server's ingress loads no model
    from transformers import PreTrainedModel


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the part of a causal model that makes hidden states of token ids.

    Some families call the causal model itself their base model.
    """
    base: Any = model.base_model
    inner = (part for part in model.children() if hasattr(part, "config"))
    return base if base is not model else next(inner, base)


def per_layer_embedding(model: PreTrainedModel) -> nn.Embedding | None:
    """Return the embedding of tokens that gives each layer a further input; None for none."""
    found: nn.Embedding | None = getattr(decoder_of(model), "embed_tokens_per_layer", None)
    return found


class Head:
    """The output layer, and what its family does to the logits; the model keeps the weights.

    Fields of the configuration are taken by their names. Where a family means something else by
    them, the logits are not the model's own, as `mars_platform.mixing.probe` finds.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config.get_text_config()
        self.layer: Any = model.get_output_embeddings()
        self.factor = _declared(config, "logit_scale", 1.0)
        self.factor *= _declared(config, "lm_head_multiplier", 1.0)
        self.factor /= _declared(config, "logits_scaling", 1.0)
        self.cap = _declared(config, "final_logit_softcapping", None)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocabulary] of hidden states [..., hidden_size]."""
        return self._settled(self.layer(hidden))

    def write(self, hidden: Tensor, logits: Tensor) -> None:
        """Write the logits of hidden states [n, hidden_size] to a table [n, vocabulary]."""
        if type(self.layer) is not nn.Linear or self.layer.bias is not None:
            logits.copy_(self(hidden))
            return
        torch.mm(hidden, self.layer.weight.t(), out=logits)
        if self.factor != 1.0 or self.cap is not None:
            logits.copy_(self._settled(logits))

    def _settled(self, logits: Tensor) -> Tensor:
        if self.factor != 1.0:
            logits = logits * self.factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def _declared(config: Any, name: str, default: Any) -> Any:
    """Return a field that the family has; a file may name others, which mean nothing there."""
    value = getattr(config, name, None) if hasattr(type(config), name) else None
    return default if value is None else value
