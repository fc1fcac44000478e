"""Binds attention into transformers' models: their layers call what mixes positions at the time.

Not every model of transformers passes further arguments down to its layers, so that the running
step or batch is reached by a context variable. Imports no Ray or HTTP library.
Source: ``transformers.AttentionInterface``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from mars_platform.mixing.latent import absorbed
from mars_platform.mixing.specs import Temperature

ATTENTION_NAME = "marsray"
"""Name under which transformers' models find the function that attends by what is bound."""

_WITHOUT_EFFECT = {
    *("cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states"),
    *("output_router_logits", "position_embeddings", "position_ids", "return_dict", "use_cache"),
    "mixing",  # for the layers of `mars_platform.mixing.recurrent`
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
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    """[heads], a further score of each head, which has no value; None for none."""
    temperature: Temperature | None = None
    """How the queries are scaled, by their places in the call."""

    def query_at(self, positions: Tensor) -> Tensor:
        """Return the queries as scaled by their positions, int64 [rows, positions]."""
        if self.temperature is None:
            return self.query
        scale = self.temperature.scale
        places = torch.arange(positions.shape[1], device=positions.device)
        ratio: Tensor = scale(positions) / scale(places)
        return (self.query * ratio[:, None, :, None]).to(self.query.dtype)


class Mixing(Protocol):
    """Lets the positions of one step or batch act on one another."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend in one layer: [rows, positions, heads, value_dim]."""


_MIXING: ContextVar[Mixing] = ContextVar("marsray_mixing")


def mixing_now() -> Mixing:
    """Return what is bound in this thread."""
    return _MIXING.get()


@contextmanager
def bound(mixing: Mixing) -> Iterator[None]:
    """Have models in this thread mix positions by ``mixing``."""
    before = _MIXING.set(mixing)
    try:
        yield
    finally:
        _MIXING.reset(before)


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
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnknownAttentionError("its attention does not say in which layer it is")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return AttentionCall(
        layer, query, key, value, scaling, sliding_window, softcap, s_aux, _temperature(module)
    )


def _temperature(module: Any) -> Temperature | None:
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return None
    return Temperature(float(module.floor_scale), float(module.attn_scale))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    call = read_call(module, query, key, value, mask=attention_mask, **others)
    latents = absorbed(module)
    if latents is None:
        return _MIXING.get().attend(call), None
    call = call._replace(query=latents.queries(call.query))
    return latents.outputs(_MIXING.get().attend(call)), None


AttentionInterface.register(ATTENTION_NAME, _attend)
