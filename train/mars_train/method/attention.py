"""Attention over packed rows: SDPA with a dense mask, or flex attention with a block mask.

Both masks are computed from the rule of visibility in `mars_platform.method.rules`.
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
"""Side of a block mask's blocks; with flex attention a row's slots are a multiple of it."""

_FLEX_NAME = "marsray_flex"


def use_attention(model: PreTrainedModel, attention: Attention) -> None:
    """Make the model's layers use this kind of attention.

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
    """Return the attention mask: bool [rows, 1, slots, slots] for SDPA, a block mask for flex."""
    if attention == "flex":
        return block_mask(batch)
    return visibility(batch.documents, batch.position_ids, batch.blocks, batch.noisy).unsqueeze(1)


def block_mask(batch: Batch) -> BlockMask:
    """Return the batch's block mask; its slots must be a multiple of ``FLEX_MULTIPLE``."""
    rows, slots = batch.tokens.shape
    assert slots % FLEX_MULTIPLE == 0, slots
    columns = (batch.documents, batch.position_ids, batch.blocks, batch.noisy)

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(
            RowSlots(*(column[row, query] for column in columns)),
            RowSlots(*(column[row, key] for column in columns)),
        )

    return create_block_mask(visible, rows, None, slots, slots, device=batch.tokens.device)


@cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention)


# transformers has its own "flex_attention", which takes block masks as well. But it compiles on
# every device, and on a CPU the compiler fails on masks that read tensors once shapes are dynamic
# (torch 2.13: C++ that does not build). It also repeats keys and values if the number of heads is
# not a power of two.
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
    """Attend in one layer, as transformers calls it; on a CPU it is slow and has no backward."""
    plain = query.device.type == "cpu" or torch.compiler.is_compiling()
    attend = flex_attention if plain else _compiled_flex_attention()
    output = attend(
        query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True
    )  # [rows, heads, slots, head_dim]
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(_FLEX_NAME, _flex)
