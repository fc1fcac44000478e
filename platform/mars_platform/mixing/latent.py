"""Lets layers of latent attention attend to latents, in place of the keys and values made of them.

Such a layer makes one latent of each token, and of it, by a matrix for each head, the head's key
and value; beside it, all heads share a rotated part of their keys. A score is the same if the
matrix of the keys acts on the query, and an output if that of the values acts on the mean of the
latents. So nothing but latents and rotated parts need be cached. Imports no Ray or HTTP library.
Source: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mars_platform.mixing.specs import AttentionSpec

EXPANSION = "kv_b_proj"
"""Name that all families have for the layer that makes keys and values of latents."""
_ABSORBED = "absorbed"


class HeadLinear(nn.Module):
    """A linear layer without gradients in which each head has a matrix of its own."""

    def __init__(self, weight: Tensor) -> None:
        """Take ``weight``, [heads, inputs of a head, outputs of a head]."""
        super().__init__()
        num_heads, inputs, outputs = weight.shape
        self.in_features, self.out_features = num_heads * inputs, num_heads * outputs
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        heads = inputs.reshape(-1, *self.weight.shape[:2]).transpose(0, 1)
        outputs = torch.bmm(heads, self.weight).transpose(0, 1)
        return outputs.reshape(*inputs.shape[:-1], self.out_features)


class Absorbed(nn.Module):
    """The expansion of one layer's latents, split into what acts on queries and on outputs."""

    def __init__(self, module: Any) -> None:
        """Share the weight of a layer's expansion."""
        super().__init__()
        self._sizes = [module.qk_nope_head_dim, module.qk_rope_head_dim]
        weight = module.get_submodule(EXPANSION).weight.detach()
        heads = weight.view(-1, self._sizes[0] + module.v_head_dim, weight.shape[-1])
        keys, values = torch.split(heads, [self._sizes[0], module.v_head_dim], dim=1)
        self.keys, self.values = HeadLinear(keys), HeadLinear(values.transpose(1, 2))

    def queries(self, query: Tensor) -> Tensor:
        """Map queries [rows, heads, positions, key_dim] to ones of latents."""
        plain, rotated = torch.split(query.transpose(1, 2), self._sizes, dim=-1)
        latent = self.keys(plain.flatten(2)).view(*rotated.shape[:-1], -1)
        return torch.cat([latent, rotated], dim=-1).transpose(1, 2)

    def outputs(self, attended: Tensor) -> Tensor:
        """Map means of latents [rows, positions, heads, rank] to means of values."""
        output: Tensor = self.values(attended.flatten(2))
        return output.view(*attended.shape[:-1], -1)


def absorbed(module: nn.Module) -> Absorbed | None:
    """Return what `absorb` has made of a layer of latent attention; None for any other layer."""
    found = module._modules.get(_ABSORBED)
    return found if isinstance(found, Absorbed) else None


def is_latent(module: nn.Module) -> bool:
    """Return whether a module is a layer of latent attention, as transformers has it."""
    return hasattr(module, "expand_kv")


def absorb(model: nn.Module, specs: Sequence[AttentionSpec]) -> tuple[AttentionSpec, ...]:
    """Change a model's layers of latent attention, in place, to ones that attend to latents.

    Returns ``specs``, what its layers ask for, as they do from then on. A layer whose expansion is
    more than a matrix goes on to make keys and values.
    """
    changed = dict[int, dict[str, Any]]()
    for module in model.modules():
        expansion = getattr(module, EXPANSION, None)
        if is_latent(module) and type(expansion) is nn.Linear and expansion.bias is None:
            changed |= _absorb(module)
    return tuple(replace(spec, **changed.get(spec.layer, {})) for spec in specs)


def _absorb(module: Any) -> dict[int, dict[str, Any]]:
    """Change one layer, and return what it now asks for, by its index."""
    rank, rotated = module.get_submodule(EXPANSION).in_features, module.qk_rope_head_dim
    setattr(module, _ABSORBED, Absorbed(module))
    delattr(module, EXPANSION)
    module.expand_kv = _unexpanded
    sizes = {"kv_heads": 1, "key_dim": rank + rotated, "value_dim": rank}
    return {module.layer_idx: {**sizes, "value_in_key": True}}


def _unexpanded(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Return the one key that all heads share, and its beginning as their value."""
    key = torch.cat([latent, rotated], dim=-1)
    return key, key[..., : latent.shape[-1]]
