"""Attention over packed rows: SDPA with a dense mask, or flex attention with a block mask.

Both masks are computed from the rule of visibility in `mars_platform.method.rules`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mars_platform.errors import UserError
from mars_platform.method.rules import RowSlots, sees
from mars_platform.mixing.specs import Trait
from mars_train.method.layout import Batch

Attention = Literal["sdpa", "flex"]
TRAINED = frozenset({Trait.VALUE_DIM, Trait.UNEQUAL})
"""Traits of a model's attention that both kinds train."""
FLEX_MULTIPLE = 128
"""Side of a block mask's blocks; with flex attention a row's slots are a multiple of it."""

_FLEX_NAME = "marsray_flex"
_STORED_NAME = "marsray_stored"
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Names by which configurations call the dropout of attention."""
_LEAST_HEAD_DIM = 16
"""Least size of a head that the compiled kernel of flex attention takes."""
_MOST_AT_ONCE = 2**24
"""Most pairs of slots whose visibility is computed at once for a block mask."""
_VARIANTS = 64
"""Most variants of flex attention that are compiled for one factor of the scores."""

_log = logging.getLogger(__name__)

Attend = Callable[[Tensor, Tensor, Tensor, BlockMask], Tensor]
"""Function from query, key, value and block mask to the attention's output."""


def choose_attention(
    wanted: Literal["auto", "sdpa", "flex"], config: PreTrainedConfig, device: torch.device
) -> Attention:
    """Return the attention that a recipe's setting means for a model on a device.

    Raises:
        UserError: flex attention is wanted and cannot train the model there.
    """
    if wanted == "sdpa" or (wanted == "auto" and device.type != "cuda"):
        return "sdpa"
    if device.type != "cuda":
        raise UserError("attention: flex trains on CUDA only; use sdpa, or auto for either")
    reason = why_not_flex(config, device)
    if reason is None:
        return "flex"
    if wanted == "flex":
        raise UserError(f"attention: flex cannot be used, as {reason}; use sdpa, or auto")
    _log.warning("attention: sdpa instead of flex, as %s", reason)
    return "sdpa"


def use_attention(model: PreTrainedModel, attention: Attention) -> None:
    """Make the model's layers use this kind of attention.

    Raises:
        UserError: the model wants something of its attention that flex attention does not do.
    """
    if attention == "flex":
        reason = why_not_flex(model.config, model.device)
        if reason is not None:
            raise UserError(f"attention: flex cannot be used, as {reason}; use sdpa")
    model.set_attn_implementation(_FLEX_NAME if attention == "flex" else attention)


def why_not_flex(config: PreTrainedConfig, device: torch.device) -> str | None:
    """Return why flex attention cannot train a model on a device, or None if it can."""
    dropouts = [name for name in _DROPOUTS if getattr(config, name, None)]
    if dropouts:
        return f"the model has {dropouts[0]}, which flex attention does not do"
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if device.type == "cuda" and size < _LEAST_HEAD_DIM:
        return f"the model's heads have {size} numbers and its kernel needs {_LEAST_HEAD_DIM}"
    return None


def attention_mask(batch: Batch, attention: Attention) -> Tensor | BlockMask:
    """Return the attention mask of a batch; see `mask_between`."""
    slots = slots_of(batch)
    return mask_between(slots, slots, attention)


def slots_of(batch: Batch) -> RowSlots:
    """Return the columns of a batch, [rows, slots] each, that visibility depends on."""
    return RowSlots(batch.documents, batch.position_ids, batch.blocks, batch.noisy)


def mask_between(queries: RowSlots, keys: RowSlots, attention: Attention) -> Tensor | BlockMask:
    """Return the attention mask of some slots of packed rows towards others, or themselves.

    Returns:
        bool [rows, 1, queries, keys] for SDPA, a block mask for flex attention.
    """
    if attention == "flex":
        return block_mask(queries, keys)
    return sees(
        RowSlots(*(column[:, None, :, None] for column in queries)),
        RowSlots(*(column[:, None, None, :] for column in keys)),
    )


def block_mask(queries: RowSlots, keys: RowSlots) -> BlockMask:
    """Return a block mask; numbers of queries and keys must be multiples of ``FLEX_MULTIPLE``.

    Torch's ``create_block_mask`` computes the visibility of all pairs of slots at once unless it is
    compiled; here it is computed and summed up by rows of blocks.
    """
    lengths = queries.position.shape[1], keys.position.shape[1]
    assert not any(length % FLEX_MULTIPLE for length in lengths), lengths

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(
            RowSlots(*(column[row, query] for column in queries)),
            RowSlots(*(column[row, key] for column in keys)),
        )

    num_visible = _num_visible(queries, keys)
    is_full = num_visible == FLEX_MULTIPLE**2
    return BlockMask.from_kv_blocks(
        *_listed((num_visible > 0) & ~is_full),
        *_listed(is_full),
        BLOCK_SIZE=FLEX_MULTIPLE,
        mask_mod=visible,
        seq_lengths=lengths,
    )


def _num_visible(queries: RowSlots, keys: RowSlots) -> Tensor:
    """Count the visible pairs of slots in each pair of blocks.

    Returns:
        int64 [rows, 1, blocks of queries, blocks of keys].
    """
    rows, num_keys = keys.position.shape
    num_blocks = num_keys // FLEX_MULTIPLE
    keys = RowSlots(*(column[:, None, :] for column in keys))
    at_once = max(1, _MOST_AT_ONCE // (rows * FLEX_MULTIPLE * num_keys)) * FLEX_MULTIPLE
    counts = []
    for begin in range(0, queries.position.shape[1], at_once):
        part = slice(begin, begin + at_once)
        visible = sees(RowSlots(*(column[:, part, None] for column in queries)), keys)
        tiles = visible.view(rows, -1, FLEX_MULTIPLE, num_blocks, FLEX_MULTIPLE)
        counts.append(tiles.sum(dim=(2, 4)))
    return torch.cat(counts, dim=1).unsqueeze(1)


def _listed(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of wanted blocks in each row of blocks, and their indices first, int32."""
    order = torch.argsort(wanted.to(torch.int8), dim=-1, descending=True, stable=True)
    return wanted.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)


@cache
def compiled_flex_attention(scaling: float, backend: str | Callable[..., Any] = "inductor") -> Any:
    """Return flex attention compiled for any shape, which never runs unfused.

    Torch compiles a variant for one shape, then variants in which rows and slots are symbols; one
    row or one block of slots take variants of their own, and so do modes of gradients. These are
    more than torch's default limit of 8, behind which it would run flex attention unfused without
    a word: the limit is raised, and ``fullgraph`` makes an error of reaching it.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
        output = flex_attention(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
        assert isinstance(output, Tensor)
        return output

    # Torch keeps variants by code object. With one for each factor, the factor stays a constant, as
    # the kernel needs it, also where a process trains several models.
    attend.__code__ = attend.__code__.replace()
    compiled: Attend = torch.compile(attend, fullgraph=True, backend=backend)

    def call(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
        with torch._dynamo.config.patch(recompile_limit=_VARIANTS):
            return compiled(query, key, value, mask)

    return call


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
    if query.device.type == "cpu" or torch.compiler.is_compiling():
        output = flex_attention(
            query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True
        )
    else:
        output = compiled_flex_attention(scaling)(query, key, value, attention_mask)
    # [rows, heads, slots, head_dim]
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(_FLEX_NAME, _flex)


# --- a stream that was computed before ------------------------------------------------------------


@dataclass
class StoredStream:
    """Keys and values of a stream, by layer, for the passes of another stream that sees it.

    Attention is given one as ``stored`` through the model's forward. transformers' caches do the
    same, but its layers drop them where activations are computed again.
    """

    attention: Attention
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values [rows, kv_heads, slots, head_dim] of each layer."""
    is_complete: bool = False
    """Whether the stream's own pass is over, so that keys and values are read."""


def use_stored_streams(model: PreTrainedModel) -> None:
    """Make the model's layers attend to a `StoredStream` beside their own slots."""
    model.set_attn_implementation(_STORED_NAME)


def _behind_stored(
    module: nn.Module,
    query: Tensor,  # [rows, heads, slots, head_dim]
    key: Tensor,  # [rows, kv_heads, slots, head_dim]
    value: Tensor,  # [rows, kv_heads, slots, head_dim]
    attention_mask: Any,
    *,
    stored: StoredStream | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attend in one layer, and keep its keys and values, or attend to kept ones as well.

    Without a stored stream this is SDPA, as if the model were used elsewhere.
    """
    layer: Any = module.layer_idx
    if stored is not None and stored.is_complete:
        earlier_keys, earlier_values = stored.layers[layer]
        key = torch.cat([earlier_keys, key], dim=2)
        value = torch.cat([earlier_values, value], dim=2)
    elif stored is not None:
        stored.layers[layer] = (key, value)
    is_flex = stored is not None and stored.attention == "flex"
    attend = _flex if is_flex else sdpa_attention_forward
    attended: tuple[Tensor, None] = attend(module, query, key, value, attention_mask, **rest)
    return attended


AttentionInterface.register(_STORED_NAME, _behind_stored)
