"""Attention over packed rows: SDPA under a dense mask, or flex attention under a block mask.

Both masks come from the one rule in ``mars_platform.method.rules``. Knows no loss and no data.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, PreTrainedModel

from mars_platform.errors import UserError
from mars_platform.method.rules import RowSlots, sees, visibility
from mars_train.method.layout import Batch

Attention = Literal["sdpa", "flex"]
FLEX_MULTIPLE = 128
"""Slots of a row under flex attention are a multiple of this: the side of a mask's blocks."""

_FLEX_NAME = "marsray_flex"


def use_attention(model: PreTrainedModel, attention: Attention) -> None:
    """Make the model's layers attend this way.

    Raises:
        UserError: the model does not take its attention through transformers' interface, or wants
            something of it that flex attention does not do.
    """
    if attention == "flex" and getattr(model.config, "attention_dropout", None):
        raise UserError("model: flex attention has no attention_dropout; use sdpa attention")
    name = _FLEX_NAME if attention == "flex" else attention
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise UserError(
            f"model: {model.config.model_type} does not take its attention through transformers' "
            "interface; name a Qwen2, Qwen3, Llama or Mistral model"
        )


def attention_mask(batch: Batch, attention: Attention) -> Tensor | BlockMask:
    """The mask that the model's layers are given: bool [rows, 1, slots, slots], or as blocks."""
    if attention == "flex":
        return block_mask(batch)
    return visibility(batch.documents, batch.positions, batch.blocks, batch.noisy).unsqueeze(1)


def block_mask(batch: Batch) -> BlockMask:
    """The batch's visibility as a block mask; its slots are a multiple of ``FLEX_MULTIPLE``."""
    rows, slots = batch.tokens.shape
    assert slots % FLEX_MULTIPLE == 0, slots
    columns = (batch.documents, batch.positions, batch.blocks, batch.noisy)

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(
            RowSlots(*(column[row, query] for column in columns)),
            RowSlots(*(column[row, key] for column in columns)),
        )

    return create_block_mask(visible, rows, None, slots, slots, device=batch.tokens.device)


@cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention)


# transformers has a "flex_attention" of its own, which takes a block mask too. But it compiles on
# every device, and on a CPU the compiler fails on masks that read tensors once shapes are dynamic
# (torch 2.13: C++ that does not build); and it repeats keys and values where the number of heads
# is no power of two.
def _flex(
    _module: nn.Module,
    query: Tensor,  # [rows, heads, slots, head_dim]
    key: Tensor,  # [rows, kv_heads, slots, head_dim]
    value: Tensor,  # [rows, kv_heads, slots, head_dim]
    attention_mask: BlockMask,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in each layer; on a CPU forward only, and slow."""
    plain = query.device.type == "cpu" or torch.compiler.is_compiling()
    attend = flex_attention if plain else _compiled_flex_attention()
    output = attend(
        query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True
    )  # [rows, heads, slots, head_dim]
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(_FLEX_NAME, _flex)
