"""One decoder layer of Qwen2, Qwen3, Llama or Mistral, with merged weights and fused operators.

A layer takes nine launches beside those of attention that combine parts of long contexts; the
layers of transformers take about eighty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mars_serve.engine.attention.paged import PagedAttention
from mars_serve.engine.decoder.adapter import FixedLinear, with_adapters
from mars_serve.engine.kernels.layer import add_rms_norm, rotate_and_write, silu_mul


class Rotation(NamedTuple):
    """Cosines and sines of a step's positions, float32 [positions, head_dim] each."""

    cos: Tensor
    sin: Tensor


class MergedLayer(nn.Module):
    """A decoder layer over the positions of a step, which writes its keys and values to pages."""

    def __init__(self, layer: Any, attention: PagedAttention) -> None:
        """Take over the weights of a decoder layer, which loses each as its merged copy is made."""
        super().__init__()
        own, mlp = layer.self_attn, layer.mlp
        self._attention, self._index = attention, own.layer_idx
        self._head_dim, self._scaling = own.head_dim, own.scaling
        self._num_heads = own.q_proj.out_features // own.head_dim
        self._num_kv_heads = own.k_proj.out_features // own.head_dim
        self.attention_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.query_norm = getattr(own, "q_norm", None)
        self.key_norm = getattr(own, "k_norm", None)
        self.qkv = merge(own, ("q_proj", "k_proj", "v_proj"))
        self.gate_up = merge(mlp, ("gate_proj", "up_proj"))
        self.output, self.down = own.o_proj, mlp.down_proj

    def forward(
        self, residual: Tensor, added: Tensor | None, rotation: Rotation, metadata: Any
    ) -> Tensor:
        """Run the layer up to its last sum, which the next layer's norm computes.

        ``residual``, ``added`` and the result are [positions, hidden_size]. ``added``, if any, is
        still to be added to ``residual``, which is overwritten; so is the result. ``rotation`` and
        ``metadata``, attention's, are those of the step.
        """
        merged = self.qkv(_norm(self.attention_norm, residual, added))
        attended = self.output(self._attend(merged, rotation, metadata))
        normed = _norm(self.mlp_norm, residual, attended)
        product: Tensor = self.down(silu_mul(self.gate_up(normed)))
        return product

    def _attend(self, merged: Tensor, rotation: Rotation, metadata: Any) -> Tensor:
        attention, index = self._attention, self._index
        query_norm, key_norm = self.query_norm, self.key_norm
        rotate_and_write(
            merged,
            *rotation,
            metadata.slots,
            attention.keys[index],
            attention.values[index],
            None if query_norm is None else query_norm.weight,
            None if key_norm is None else key_norm.weight,
            0.0 if query_norm is None else query_norm.variance_epsilon,
        )
        heads = merged.view(len(merged), -1, self._head_dim)
        query, key, value = torch.split(
            heads, [self._num_heads, self._num_kv_heads, self._num_kv_heads], dim=1
        )
        output = attention.attend(index, query, key, value, self._scaling, metadata, is_cached=True)
        return output.flatten(1)


def _norm(norm: Any, residual: Tensor, added: Tensor | None) -> Tensor:
    return add_rms_norm(residual, added, norm.weight, norm.variance_epsilon)


@torch.no_grad()
def merge(parent: nn.Module, names: tuple[str, ...]) -> nn.Linear | FixedLinear:
    """Merge linear layers of a module into one, with their adapters, and take them from the module.

    ``names`` are the layers' attributes in ``parent``, in the order of the merged rows. All layers
    have equal numbers of columns, and all or none a bias.
    """
    layers = [parent.get_submodule(name) for name in names]
    own: list[Any] = [each.base_layer if isinstance(each, FixedLinear) else each for each in layers]
    biases: list[Any] = [part.bias for part in own]
    weight = torch.cat([part.weight for part in own])
    merged = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    merged.weight = nn.Parameter(weight, requires_grad=False)
    if biases[0] is not None:
        merged.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    for name in names:
        delattr(parent, name)
    return with_adapters(merged, layers)
