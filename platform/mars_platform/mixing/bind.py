"""Binds attention into transformers' models: their layers call what mixes positions at the time.

Not every model of transformers passes further arguments down to its layers, so that the running
step or batch is reached by a context variable. Imports no Ray or HTTP library.
Source: ``transformers.AttentionInterface``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "marsray"
"""Name under which transformers' models find the function that attends by what is bound."""

_WITHOUT_EFFECT = {
    *("cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states"),
    *("output_router_logits", "position_embeddings", "position_ids", "return_dict", "use_cache"),
}
"""Keyword arguments of layers that say nothing about which keys a query sees, or how."""


class UnknownAttentionError(ValueError):
    """A layer says something that is not known here; the message says what the model does."""


class AttentionCall(NamedTuple):
    """All that one layer says when it attends."""

    layer: int
    query: Tensor
    """[rows, heads, positions, key_dim]."""
    key: Tensor
    """[rows, kv_heads, positions, key_dim]."""
    value: Tensor
    """[rows, kv_heads, positions, value_dim]."""
    scaling: float
    """Factor of the scores."""
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    """[heads], a further score of each head, which has no value; None for none."""


class Mixing(Protocol):
    """Lets the positions of one step or batch act on one another."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend in one layer: [rows, positions, heads, value_dim]."""


_MIXING: ContextVar[Mixing] = ContextVar("marsray_mixing")


@contextmanager
def bound(mixing: Mixing) -> Iterator[None]:
    """Have models in this thread mix positions by ``mixing``."""
    before = _MIXING.set(mixing)
    try:
        yield
    finally:
        _MIXING.reset(before)


def scale_by_position(model: nn.Module) -> None:
    """Have a model scale its queries by their position ids, in place, if it does by their order.

    Llama 4 scales queries of long texts by a factor that depends on their place in the row, which
    is another one than their position where rows are packed or hold a part of a text.
    """
    for layer in model.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False):
            attention.attn_temperature_tuning = False
            if not attention.use_rope:
                layer.register_forward_pre_hook(_note_factors, with_kwargs=True)


def _note_factors(layer: Any, _args: Any, kwargs: Mapping[str, Any]) -> None:
    """Note the factor of each query of a layer's pass: float32 [rows, positions]."""
    attention, counts = layer.self_attn, kwargs["position_ids"].float() + 1
    steps = torch.log1p(torch.floor(counts / attention.floor_scale))
    attention.query_factors = steps * attention.attn_scale + 1


def read_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> AttentionCall:
    """Return what a layer of transformers says by its arguments.

    Raises:
        UnknownAttentionError: it says something else as well, by which attention would differ, or
            not which layer it is.
    """
    unknown = sorted(
        name
        for name, value in others.items()
        if name not in _WITHOUT_EFFECT and value is not None and value is not False
    )
    if unknown:
        raise UnknownAttentionError(f"its attention has {', '.join(unknown)}")
    factors: Tensor | None = getattr(module, "query_factors", None)
    if factors is not None:
        query = (query * factors[:, None, :, None]).to(query.dtype)
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnknownAttentionError("its attention does not say in which layer it is")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return AttentionCall(layer, query, key, value, scaling, sliding_window, softcap, s_aux)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend in one layer; transformers' models call this."""
    call = read_call(module, query, key, value, mask=attention_mask, **others)
    return _MIXING.get().attend(call), None


AttentionInterface.register(ATTENTION_NAME, _attend)
