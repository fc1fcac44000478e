"""The operator ``marsray::attend``, by which transformers' models call an attention backend.

A compiler neither looks into the operator nor sees that it writes to the KV cache. Its arguments
are tensors and numbers only, so the backend and the metadata of the running step reach it by a
context variable.
Source: ``transformers.AttentionInterface``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "marsray_paged"
"""Name under which transformers' models find the operator."""

AttendLayer = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""`Attention.attend` with the metadata of one step bound."""
_ATTEND: ContextVar[AttendLayer] = ContextVar("marsray_attend")


@contextmanager
def attending(attend: AttendLayer) -> Iterator[None]:
    """Have models in this thread call ``attend`` for attention."""
    before = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(before)


def _attend(query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float) -> Tensor:
    return _ATTEND.get()(layer, query, key, value, scaling).contiguous()


def _attend_shape(
    query: Tensor, _key: Tensor, _value: Tensor, _layer: int, _scaling: float
) -> Tensor:
    return query.new_empty(query.shape)


def _attention_function(
    module: nn.Module,
    query: Tensor,  # [1, heads, positions, head_dim]
    key: Tensor,  # [1, kv_heads, positions, head_dim]
    value: Tensor,  # [1, kv_heads, positions, head_dim]
    _attention_mask: Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend in one layer; transformers' models call this."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    queries, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))
    if torch.compiler.is_compiling():
        output = torch.ops.marsray.attend.default(queries, keys, values, layer, scaling)
    else:  # a call through the operator takes 10 us more
        output = _ATTEND.get()(layer, queries, keys, values, scaling)
    return output.unsqueeze(0), None


torch.library.define(
    "marsray::attend",
    "(Tensor query, Tensor key, Tensor value, int layer, float scaling) -> Tensor",
)
torch.library.impl("marsray::attend", "CompositeExplicitAutograd", _attend)
torch.library.register_fake("marsray::attend", _attend_shape)
AttentionInterface.register(ATTENTION_NAME, _attention_function)
