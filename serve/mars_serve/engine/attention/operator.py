"""The function by which transformers' models call an attention backend.

Not every model of transformers passes further arguments down to it, so the backend and the metadata
of the running step reach it by a context variable.
Source: ``transformers.AttentionInterface``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "marsray_paged"
"""Name under which transformers' models find the function."""

AttendLayer = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""`Attention.attend` with the metadata of one step bound."""
_WINDOWS = ("attention_mask", "sliding_window", "indices", "block_indices")
_SCORES = ("softcap", "s_aux", "sinks", "position_bias")
"""Arguments by which layers ask for other than full causal attention, and for other scores."""
_ATTEND: ContextVar[AttendLayer] = ContextVar("marsray_attend")


@contextmanager
def attending(attend: AttendLayer) -> Iterator[None]:
    """Have models in this thread call ``attend`` for attention."""
    before = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(before)


def _attention_function(
    module: nn.Module,
    query: Tensor,  # [1, heads, positions, head_dim]
    key: Tensor,  # [1, kv_heads, positions, head_dim]
    value: Tensor,  # [1, kv_heads, positions, head_dim]
    attention_mask: Tensor | None = None,
    *,
    scaling: float,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend in one layer; transformers' models call this.

    Raises:
        ValueError: the layer wants something that a short text may not show, such as a
            window, or scores that are capped.
    """
    others["attention_mask"] = attention_mask
    unknown = [name for name in (*_WINDOWS, *_SCORES) if others.get(name) is not None]
    if unknown:
        raise ValueError(f"its attention has {', '.join(unknown)}")
    layer: int = module.layer_idx  # type: ignore[assignment]
    queries, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))
    return _ATTEND.get()(layer, queries, keys, values, scaling).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention_function)
