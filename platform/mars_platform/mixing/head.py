"""The two halves of a causal model: the decoder, and what makes logits of its hidden states.

A multimodal model has both in its text part, beside parts for images and sound.

Imports no Ray or HTTP library.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # importing it takes seconds, and a server's ingress loads no model
    from transformers import PreTrainedModel


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the part of a causal or multimodal model that makes hidden states of token ids.

    Some families call the causal model itself their base model.
    """
    causal: Any = causal_of(model)
    base: Any = causal.base_model
    if base is causal:
        base = next((part for part in causal.children() if hasattr(part, "config")), base)
    inner = dict(base.named_children())
    return inner.get("language_model") or inner.get("text_model") or base


def causal_of(model: PreTrainedModel) -> Any:
    """Return the causal model of text that a multimodal one is made around, or the model itself."""
    inner: Any = dict(model.named_children()).get("language_model")
    return model if inner is None or inner.get_output_embeddings() is None else inner


def text_prefixes(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the beginnings of the names of all weights that text passes through.

    The decoder's comes first.
    """
    names = {module: f"{name}." if name else "" for name, module in model.named_modules()}
    parts = decoder_of(model), model.get_output_embeddings()
    return tuple(names[part] for part in parts if part is not None)


def drop_towers(model: PreTrainedModel) -> None:
    """Drop the models of images and sound from a multimodal one, in place; text needs none."""
    config: Any = model.config
    if config.get_text_config() is config:
        return  # what lies beside its decoder is for text as well, such as a head
    for key in type(config).sub_configs:
        if getattr(config, key) is not config.get_text_config():
            setattr(config, key, None)  # or transformers warns that its model is missing
    parent: Any = model
    for name in text_prefixes(model)[0].split(".")[:-1]:
        for other, part in list(parent.named_children()):
            if other != name and hasattr(part, "config"):
                setattr(parent, other, None)
        parent = getattr(parent, name)


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of a causal model's decoder."""
    decoder = decoder_of(model)
    lists = (each for each in decoder.modules() if isinstance(each, nn.ModuleList))
    found: nn.ModuleList = getattr(decoder, "layers", None) or next(lists)
    return found


def per_layer_embedding(model: PreTrainedModel) -> nn.Embedding | None:
    """Return the embedding of tokens that gives each layer a further input; None for none."""
    found: nn.Embedding | None = getattr(decoder_of(model), "embed_tokens_per_layer", None)
    return found


class Head:
    """The output layer, and what its family does to the logits; the model keeps the weights.

    Fields of the configuration are taken by their names. Families multiply or divide by them, or
    leave them alone; which of it, the model's own logits of one hidden state tell. Where a family
    means something else, the logits are not its own, as `mars_platform.mixing.probe` finds.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config.get_text_config()
        self.layer: Any = model.get_output_embeddings()
        self.cap = _declared(config, "final_logit_softcapping", None)
        ways = {1.0}
        for name in ("logit_scale", "lm_head_multiplier", "logits_scaling"):
            size = _declared(config, name, 1.0)
            ways = {way * factor for way in ways for factor in (1.0, size, 1.0 / size)}
        self.factor = next(iter(ways)) if len(ways) == 1 else self._own_factor(model, ways)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocabulary] of hidden states [..., hidden_size]."""
        return self._settled(self.layer(hidden), self.factor)

    def write(self, hidden: Tensor, logits: Tensor) -> None:
        """Write the logits of hidden states [n, hidden_size] to a table [n, vocabulary]."""
        if type(self.layer) is not nn.Linear or self.layer.bias is not None:
            logits.copy_(self(hidden))
            return
        torch.mm(hidden, self.layer.weight.t(), out=logits)
        if self.factor != 1.0 or self.cap is not None:
            logits.copy_(self._settled(logits, self.factor))

    def _settled(self, logits: Tensor, factor: float) -> Tensor:
        if factor != 1.0:
            logits = logits * factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    @torch.no_grad()
    def _own_factor(self, model: PreTrainedModel, ways: Collection[float]) -> float:
        """Return the factor by which the model itself makes logits of a hidden state."""
        from transformers.modeling_outputs import MoeModelOutputWithPast

        width = model.config.get_text_config().hidden_size
        hidden = torch.ones(1, 1, width, dtype=model.dtype, device=model.device)
        decoded = MoeModelOutputWithPast(last_hidden_state=hidden)
        with patch.object(decoder_of(model), "forward", lambda *_, **__: decoded):
            ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            own = causal_of(model)(input_ids=ids, use_cache=False).logits
        raw = self.layer(hidden)
        return min(ways, key=lambda way: float((self._settled(raw, way) - own).abs().max()))


def _declared(config: Any, name: str, default: Any) -> Any:
    """Return a field that the family has; a file may name others, which mean nothing there."""
    value = getattr(config, name, None) if hasattr(type(config), name) else None
    return default if value is None else value
