"""Binds recurrences and short convolutions into transformers' models, beside attention.

Layers call functions of their family's module for both, and hand keyword arguments of the decoder
down to them. So these functions are replaced, once, by ones that mix positions by the object that
the decoder gets as ``mixing``, and go on as before without one. A keyword, not a context variable,
because layers whose activations are dropped are computed again in another thread. Imports no Ray or
HTTP library. Source: the functions of the same names in transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from math import inf
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers.activations import ACT2FN


class ScanCall(NamedTuple):
    """All that one layer says when its state runs along the positions; float32.

    A head's state S, [key_dim, value_dim], begins as zeros. At each position it decays,
    ``S = exp(decay) * S``. Then it learns: ``S += key (rate * (value - key S))``, or, without a
    rate, ``S += key value``. The output is ``query S``.
    """

    query: Tensor
    """[rows, positions, heads, key_dim]."""
    key: Tensor
    """[rows, positions, heads, key_dim]."""
    value: Tensor
    """[rows, positions, heads, value_dim]."""
    decay: Tensor
    """[rows, positions, heads, 1 or key_dim], a logarithm, at most 0."""
    rate: Tensor | None
    """[rows, positions, heads]; None for a state to which values are added."""


class ConvolveCall(NamedTuple):
    """All that one layer says when each channel becomes a weighted sum over the last positions."""

    inputs: Tensor
    """[rows, positions, channels]."""
    weight: Tensor
    """[channels, kernel]; the last acts on the position itself."""


class Recurrence(Protocol):
    """Lets the positions of one step or batch act on one another through states.

    The calls of a pass do not say which layer makes them; all passes make them in the same order.
    """

    def scan(self, call: ScanCall) -> Tensor:
        """Run one layer's states: [rows, positions, heads, value_dim]."""

    def convolve(self, call: ConvolveCall) -> Tensor:
        """Convolve in one layer: [rows, positions, channels]."""


def _convolve(
    mixing: Recurrence,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    inputs = hidden_states.to(weight.dtype).transpose(1, 2)
    outputs = mixing.convolve(ConvolveCall(inputs, weight))
    if bias is not None:
        outputs = outputs + bias
    if activation is not None:
        outputs = ACT2FN[activation](outputs)
    return outputs.to(hidden_states.dtype).transpose(1, 2)


def _delta(
    mixing: Recurrence,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    queries, keys = (_repeated(each, value.shape[2]) for each in (query, key))
    if use_qk_l2norm_in_kernel:
        queries, keys = _unit(queries), _unit(keys)
    decay = g.float() if g.dim() == key.dim() else g.float()[..., None]
    queries = queries * queries.shape[-1] ** -0.5
    call = ScanCall(queries, keys, value.float(), decay, beta.float())
    return mixing.scan(call).to(query.dtype), None


def _state_space(
    mixing: Recurrence,
    inputs: Tensor,
    step: Tensor,
    slope: Tensor,
    keys: Tensor,
    queries: Tensor,
    *,
    dt_limit: tuple[float, float] = (0.0, inf),
    **options: Any,
) -> Tensor:
    skip, bias = options["D"], options["dt_bias"]
    if bias is not None:
        step = step + bias.to(step.dtype)
    if options["dt_softplus"]:
        step = softplus(step)
    step = step.clamp(*dt_limit).float()[..., None]
    inputs = inputs.float()
    queries, keys = (_repeated(each, inputs.shape[2]) for each in (queries, keys))
    call = ScanCall(queries, keys, inputs * step, slope.float()[:, None] * step, None)
    outputs = mixing.scan(call)
    return outputs if skip is None else outputs + skip[:, None] * inputs


def _repeated(vectors: Tensor, heads: int) -> Tensor:
    """Return a vector for each head, of ones that neighbouring heads share."""
    return vectors.float().repeat_interleave(heads // vectors.shape[2], dim=2)


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)


def _unfused(*_: Any, **__: Any) -> None:
    """Have the layer compute its parts one by one, as the functions above see them."""


_ADAPTERS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "mamba2_chunk_scan": _state_space,
    "mamba2_split_conv1d_scan_combined": _unfused,
}
"""Functions of transformers' modules, and what stands in for each where positions are mixed."""
_BOUND = set[Callable[..., Any]]()
"""All functions that have replaced others."""


def bind_recurrence(decoder: nn.Module) -> bool:
    """Have a decoder's layers mix positions by what it gets as ``mixing``, a `Recurrence`.

    Returns whether it takes that keyword: whether it has layers with states or convolutions.
    """
    found = False
    for name in {type(part).__module__ for part in decoder.modules()}:
        names = vars(sys.modules[name])
        for function, adapter in _ADAPTERS.items():
            original = names.get(function)
            found |= original is not None
            if original is not None and original not in _BOUND:
                names[function] = _dispatching(original, adapter)
                _BOUND.add(names[function])
    return found


def _dispatching(original: Callable[..., Any], adapter: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def dispatch(*given: Any, mixing: Recurrence | None = None, **named: Any) -> Any:
        return original(*given, **named) if mixing is None else adapter(mixing, *given, **named)

    return dispatch
