"""Decoder layers whose products of the same input are one, for steps that run eagerly.

On a CPU a decoding step of a small model spends as long between operators as in them, so a layer of
the usual kind (norm, attention, norm, gated MLP, each half added to its input) runs as few of them
as there can be. Which layers are of that kind is found by trying: a merged layer has to compute
what transformers' own does with the hidden states of some tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_platform.mixing.bind import AttentionCall, bound, mixing_now
from mars_platform.mixing.head import decoder_of, layers_of
from mars_serve.engine.decoder.native import NativeLayer
from mars_serve.engine.kernels.native import Native

_PARTS = {
    "": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
_DECODER_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_NUM_TRIED = 5
_CLOSE = {torch.float32: 1e-3, torch.float64: 1e-9}
"""Largest mean difference from transformers' own layer, relative to the mean of its numbers."""
_CLOSE_NARROW = 2e-2
"""Largest such difference in narrow types, whose roundings differ."""


class MergedLinear(nn.Module):
    """Linear layers of one input side by side, as one product if none has an adapter."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        if all(type(layer) is nn.Linear for layer in layers):
            self.layers = nn.ModuleList([_merge(layers)])

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [..., in_features] to the outputs of all layers, [..., sum of out_features]."""
        outputs = [layer(inputs) for layer in self.layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


class MergedLayer(nn.Module):
    """A decoder layer that attends by what is bound, called as transformers calls its own."""

    def __init__(self, layer: Any, call: AttentionCall) -> None:
        """Take over a layer's parts; ``call`` is what the layer says when it attends."""
        super().__init__()
        own, mlp = layer.self_attn, layer.mlp
        none = torch.empty(0)
        self.call = call._replace(query=none, key=none, value=none)
        self.heads = [call.query.shape[1], call.key.shape[1], call.value.shape[1]]
        self.head_dim = call.query.shape[-1]
        self.attention_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.query_norm, self.key_norm = getattr(own, "q_norm", None), getattr(own, "k_norm", None)
        self.qkv = MergedLinear([own.q_proj, own.k_proj, own.v_proj])
        self.output, self.gate_up = own.o_proj, MergedLinear([mlp.gate_proj, mlp.up_proj])
        self.down, self.activation = mlp.down_proj, mlp.act_fn

    def forward(
        self, hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], **__: Any
    ) -> Tensor:
        """Map hidden states [1, positions, hidden_size] to those of the next layer."""
        normed = self.attention_norm(hidden_states)
        hidden_states = hidden_states + self.output(self._attend(normed, position_embeddings))
        gate, up = self.gate_up(self.mlp_norm(hidden_states)).chunk(2, dim=-1)
        product: Tensor = self.down(self.activation(gate).mul_(up))
        return product.add_(hidden_states)

    def _attend(self, normed: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        heads = self.qkv(normed).view(*normed.shape[:2], -1, self.head_dim)
        query, key, value = torch.split(heads, self.heads, dim=2)
        if self.query_norm is None or self.key_norm is None:
            rotated = _rotate(heads[:, :, : -self.heads[2]], rotation)
            query, key = torch.split(rotated, self.heads[:2], dim=2)
        else:
            query = _rotate(self.query_norm(query), rotation)
            key = _rotate(self.key_norm(key), rotation)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        call = self.call._replace(query=query, key=key, value=value)
        return mixing_now().attend(call).flatten(2)


class MergedDecoder(nn.Module):
    """A decoder of merged layers, without the masks and caches that transformers makes."""

    def __init__(self, decoder: Any) -> None:
        """Share a decoder's parts."""
        super().__init__()
        self.embedding, self.rotary = decoder.embed_tokens, decoder.rotary_emb
        self.layers, self.norm = decoder.layers, decoder.norm

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> tuple[Tensor]:
        """Map tokens [1, positions] at positions [1, positions] to their hidden states."""
        hidden_states = self.embedding(input_ids)
        rotation = self.rotary(hidden_states, position_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings=rotation)
        return (self.norm(hidden_states),)


def _rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the two halves of heads, [1, positions, heads, head_dim]."""
    cos, sin = (part.unsqueeze(2) for part in rotation)
    first, second = heads.chunk(2, dim=-1)
    return torch.addcmul(heads * cos, torch.cat([-second, first], dim=-1), sin)


@torch.no_grad()
def _merge(layers: Sequence[nn.Linear]) -> nn.Linear:
    weight = torch.cat([layer.weight for layer in layers])
    merged = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    merged.weight = nn.Parameter(weight, requires_grad=False)
    if any(layer.bias is not None for layer in layers):
        biases: list[Tensor] = [
            weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias
            for layer in layers
        ]
        merged.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return merged


@torch.inference_mode()
def merge_layers(model: PreTrainedModel, native: Native | None = None) -> int:
    """Replace a model's layers, in place, by merged ones that compute the same; return how many.

    They run functions of C++ where there are some for them. The model's attention has to be what is
    bound, and its adapters those of an engine's steps. Layers are replaced one by one, so that at
    most one is held twice.
    """
    layers = layers_of(model)
    usual = [index for index, layer in enumerate(layers) if _has_usual_parts(layer)]
    count = 0
    for index, trial in zip(usual, _try([layers[index] for index in usual], model), strict=True):
        merged = trial.merged(layers[index], native)
        if merged is not None:
            layers[index] = merged
            count += 1
    return count


@torch.inference_mode()
def decoder_for_steps(model: PreTrainedModel) -> nn.Module:
    """Return what makes hidden states in a model's steps: its decoder, or a merged form of it.

    It is merged if all layers are, and if that computes the same bit for bit.
    """
    decoder: nn.Module = decoder_of(model)
    parts = {name for name, _ in decoder.named_children()}
    kinds = MergedLayer | NativeLayer
    if parts != _DECODER_PARTS or not all(isinstance(each, kinds) for each in layers_of(model)):
        return decoder
    rotations, rotary = list[Any](), decoder.get_submodule("rotary_emb")
    hook = rotary.register_forward_hook(lambda *call: rotations.append(call[2]), with_kwargs=True)
    own = _run(decoder, model, _Recorder())
    hook.remove()
    if len(rotations) != 1 or rotations[0].keys() - {"position_ids"}:
        return decoder
    merged = MergedDecoder(decoder)
    return merged if torch.equal(_run(merged, model, _Recorder()), own) else decoder


def _has_usual_parts(layer: nn.Module) -> bool:
    parts = {name: set[str]() for name in _PARTS}
    for name, _ in layer.named_modules():
        parent, _, own = name.rpartition(".")
        parts.setdefault(parent, set()).add(own)
    if any(parts[name] - {"", *_HEAD_NORMS} != _PARTS[name] for name in _PARTS):
        return False
    config = getattr(layer.self_attn, "config", None)
    return getattr(config, "clip_qkv", None) is None  # a trial need not reach these bounds


class _Recorder:
    """Attends causally, and keeps the last call."""

    def attend(self, call: AttentionCall) -> Tensor:
        """See `mars_platform.mixing.bind.Mixing`."""
        self.call = call
        dtype = call.value.dtype  # some families rotate in float32
        parts = call.query.to(dtype), call.key.to(dtype), call.value
        output = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        return output.transpose(1, 2)


class _Trial(NamedTuple):
    """The call of a layer of transformers on some hidden states, and its result."""

    inputs: tuple[Any, ...]
    """The hidden states, [1, positions, hidden_size], and other arguments."""
    named: dict[str, Any]
    output: Any
    call: AttentionCall

    def merged(self, layer: Any, native: Native | None) -> nn.Module | None:
        """Return the layer in merged form, or None if that does something else."""
        rotation, attention = self.named.get("position_embeddings"), layer.self_attn
        query, key, value = parts = self.call[1:4]
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        if not (
            isinstance(rotation, tuple)
            and isinstance(self.output, Tensor)
            and rotation[0].shape[-1] == query.shape[-1] == key.shape[-1] == value.shape[-1]
            and all(
                part.shape[1] * part.shape[-1] == projection.out_features
                for part, projection in zip(parts, projections, strict=True)
            )
        ):
            return None
        merged = MergedLayer(layer, self.call)
        if not self._is_computed_by(merged):
            return None
        rotates_alike = all(
            part.shape == (1, *self.call.query.shape[2:])
            and part.dtype == self.output.dtype
            and part.is_contiguous()
            for part in rotation
        )
        quick = NativeLayer.of(merged, native) if native is not None and rotates_alike else None
        return quick if quick is not None and self._is_computed_by(quick) else merged

    def _is_computed_by(self, merged: nn.Module) -> bool:
        recorder = _Recorder()
        with bound(recorder):
            output = merged(*self.inputs, **self.named)
        pairs = [(self.output - self.inputs[0], output - self.inputs[0])]
        pairs += zip(self.call[1:4], recorder.call[1:4], strict=True)
        return all(_are_close(*pair) for pair in pairs)


def _try(layers: Sequence[nn.Module], model: PreTrainedModel) -> list[_Trial]:
    """Run a model on some tokens, and return what each of these layers did."""
    if not layers:
        return []
    recorder, trials = _Recorder(), list[_Trial]()

    def keep(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        trials.append(_Trial(inputs, named, output, recorder.call))

    hooks = [layer.register_forward_hook(keep, with_kwargs=True) for layer in layers]
    _run(decoder_of(model), model, recorder)
    for hook in hooks:
        hook.remove()
    return trials


def _run(decoder: Any, model: PreTrainedModel, recorder: _Recorder) -> Tensor:
    """Run a model's decoder, in one form or another, on some tokens."""
    weight: Any = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(weight), (1, _NUM_TRIED), generator=generator).to(weight.device)
    # The last positions that the model takes: some families scale queries from a position on.
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _NUM_TRIED
    positions = torch.arange(_NUM_TRIED, device=weight.device) + max(0, most - _NUM_TRIED)
    with bound(recorder):
        output = decoder(input_ids=ids, position_ids=positions[None], use_cache=False)
    hidden: Tensor = output[0]
    return hidden


def _are_close(own: Tensor, other: Tensor) -> bool:
    difference = (own.float() - other.float()).abs().mean()
    return bool(difference <= _CLOSE.get(own.dtype, _CLOSE_NARROW) * own.float().abs().mean())
