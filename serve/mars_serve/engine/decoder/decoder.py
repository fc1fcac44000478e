"""A whole decoder of merged layers, made from a model of transformers in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_platform.mixing.head import decoder_of
from mars_serve.engine.attention.paged import PagedAttention
from mars_serve.engine.decoder.layer import MergedLayer, Rotation
from mars_serve.engine.kernels.layer import add_rms_norm

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def why_unmerged(model: PreTrainedModel) -> str | None:
    """Return why a model's own layers have to be kept, or None if they can be merged."""
    config = model.config.get_text_config()
    if config.model_type not in _FAMILIES:
        return f"it is of the family {config.model_type}, not {', '.join(_FAMILIES)}"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}, not silu"
    decoder = decoder_of(model)
    width = 2 * decoder.rotary_emb.inv_freq.numel()
    head_dim = decoder.layers[0].self_attn.head_dim
    if width != head_dim:
        return f"it rotates {width} of {head_dim} numbers of a head"
    return None


def merge_layers(model: PreTrainedModel, attention: PagedAttention) -> None:
    """Replace a model's layers one by one, so that at most one layer is held twice.

    `why_unmerged` has to return None for ``model``; ``attention`` owns the KV cache.
    """
    layers = decoder_of(model).layers
    for index in range(len(layers)):
        layers[index] = MergedLayer(layers[index], attention)


def is_merged(model: PreTrainedModel) -> bool:
    """Return whether `merge_layers` has replaced a model's layers."""
    return any(isinstance(module, MergedLayer) for module in model.modules())


class MergedDecoder:
    """The decoder of a merged model from token ids to normalised hidden states."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take a model whose layers are merged."""
        base = decoder_of(model)
        self._layers: nn.ModuleList = base.layers
        self._embeddings, self._norm = base.embed_tokens, base.norm
        self._rotary = base.rotary_emb
        self._float = torch.empty(0, device=model.device)

    def __call__(self, ids: Tensor, position_ids: Tensor, metadata: Any) -> Tensor:
        """Return the last layer's hidden states, [positions, hidden_size].

        ``ids``, of tokens, and ``position_ids`` are int64 [positions]; ``metadata`` is attention's.
        """
        # The model's own function knows all rope types; in float32 it rounds nothing.
        cos, sin = self._rotary(self._float, position_ids[None])
        rotation = Rotation(cos[0], sin[0])
        residual: Tensor = self._embeddings(ids)
        added = None
        for layer in self._layers:
            added = layer(residual, added, rotation, metadata)
        return add_rms_norm(residual, added, self._norm.weight, self._norm.variance_epsilon)
