"""Merged decoder layers whose parts between the products are functions of C++, on a CPU."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mars_platform.mixing.bind import mixing_now
from mars_serve.engine.kernels.native import Native

if TYPE_CHECKING:
    from mars_serve.engine.decoder.merged import MergedLayer

_NUM_TRIED = 7
_CLOSE = 1e-4
"""Largest difference between a module and what is computed in its place, in float32."""


class Norm(NamedTuple):
    """A norm by the root mean square."""

    weight: Tensor
    """float32 [size], factors of the normed numbers."""
    epsilon: float

    @classmethod
    def of(cls, norm: Any) -> Norm | None:
        """Return a module in this form, or None if that computes something else."""
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        own = getattr(norm, "weight", None)
        if not isinstance(epsilon, float) or not isinstance(own, Tensor) or own.dim() != 1:
            return None
        exact, size = copy.deepcopy(norm).float(), len(own)
        weight = exact(torch.ones(1, size))[0] * (1 + epsilon) ** 0.5  # some families add 1 to it
        inputs = _trial_numbers(size)
        outputs = F.rms_norm(inputs, (size,), weight, epsilon)
        return cls(weight, epsilon) if _is_close(exact(inputs), outputs) else None


class Norms(NamedTuple):
    """The norms of a layer, before its attention and its MLP, and of its heads if it has them."""

    attention: Norm
    mlp: Norm
    query: Norm | None
    key: Norm | None


class NativeLayer(nn.Module):
    """A `MergedLayer` that runs few operators besides its products."""

    def __init__(self, merged: MergedLayer, native: Native, norms: Norms) -> None:
        """Take over the parts of a layer that has these norms and SiLU for its activation."""
        super().__init__()
        self.qkv, self.output = merged.qkv, merged.output
        self.gate_up, self.down = merged.gate_up, merged.down
        self._call, self._heads, self._head_dim = merged.call, merged.heads, merged.head_dim
        self._native, self._norms = native, norms

    @classmethod
    def of(cls, merged: MergedLayer, native: Native) -> NativeLayer | None:
        """Return a layer in this form, or None if its norms or its activation are others."""
        numbers = _trial_numbers(_NUM_TRIED)
        if not _is_close(merged.activation(numbers), F.silu(numbers)):
            return None
        attention, mlp = Norm.of(merged.attention_norm), Norm.of(merged.mlp_norm)
        query, key = (
            None if each is None else Norm.of(each) for each in (merged.query_norm, merged.key_norm)
        )
        if attention is None or mlp is None or (query is None) != (merged.query_norm is None):
            return None
        if (key is None) != (merged.key_norm is None):
            return None
        return cls(merged, native, Norms(attention, mlp, query, key))

    def forward(
        self, hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], **__: Any
    ) -> Tensor:
        """Map hidden states [1, positions, hidden_size] to those of the next layer."""
        native, norms = self._native, self._norms
        qkv = self.qkv(native.norm(hidden_states, *norms.attention))
        native.rotate(qkv[0], position_embeddings, self._heads[:2], norms.query, norms.key)
        heads = qkv.view(*qkv.shape[:2], -1, self._head_dim).transpose(1, 2)
        query, key, value = torch.split(heads, self._heads, dim=1)
        call = self._call._replace(query=query, key=key, value=value)
        attended = self.output(mixing_now().attend(call).flatten(2))
        hidden_states, normed = native.add_norm(hidden_states, attended, *norms.mlp)
        product: Tensor = self.down(native.gate(self.gate_up(normed)))
        return product.add_(hidden_states)


def _trial_numbers(size: int) -> Tensor:
    return torch.randn(_NUM_TRIED, size, generator=torch.Generator().manual_seed(0))


def _is_close(own: Tensor, other: Tensor) -> bool:
    return torch.allclose(own.float(), other.float(), rtol=_CLOSE, atol=_CLOSE)
