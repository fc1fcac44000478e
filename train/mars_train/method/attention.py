"""Attention over packed rows: SDPA with a dense mask, or flex attention with a block mask.

Both masks are computed from the rule of visibility in `mars_platform.method.rules`. A model asks
for those of its layers when a pass begins, and hands each layer its own.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mars_platform.errors import UserError
from mars_platform.method.rules import RowSlots, oldest_visible, sees
from mars_platform.mixing.bind import AttentionCall, read_call
from mars_platform.mixing.probe import reach_of
from mars_platform.mixing.specs import AttentionSpec
from mars_train.method.layout import Batch

Attention = Literal["sdpa", "flex"]
FLEX_MULTIPLE = 128
"""Side of a block mask's blocks; with flex attention a row's slots are a multiple of it."""

_NAME = "marsray_rows"
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Names by which configurations call the dropout of attention."""
_HEAD_DIMS = range(16, 257)
"""Sizes of a head that the compiled kernel of flex attention takes; larger ones may not fit into a
GPU's shared memory."""
_MOST_AT_ONCE = 2**24
"""Most pairs of slots whose visibility is computed at once for a block mask."""
_VARIANTS = 64
"""Most variants of flex attention that are compiled for one factor of the scores."""

_log = logging.getLogger(__name__)

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, BlockMask], Tensor]
"""Function from query, key, value, sinks and block mask to the attention's output."""


def choose_attention(
    wanted: Literal["auto", "sdpa", "flex"],
    config: PreTrainedConfig,
    specs: Sequence[AttentionSpec],
    device: torch.device,
) -> Attention:
    """Return the attention that a recipe's setting means for a model on a device.

    ``specs`` say what the model's layers ask for.

    Raises:
        UserError: flex attention is wanted and cannot train the model there.
    """
    if wanted == "sdpa" or (wanted == "auto" and device.type != "cuda"):
        return "sdpa"
    if device.type != "cuda":
        raise UserError("attention: flex trains on CUDA only; use sdpa, or auto for either")
    reason = why_not_flex(config, specs)
    if reason is None:
        return "flex"
    if wanted == "flex":
        raise UserError(f"attention: flex cannot be used, as {reason}; use sdpa, or auto")
    _log.warning("attention: sdpa instead of flex, as %s", reason)
    return "sdpa"


def use_attention(model: PreTrainedModel, attention: Attention) -> None:
    """Make the model's layers attend by the masks of this module, in each pass `within` them.

    Raises:
        UserError: the model wants something of its attention that flex attention does not do.
    """
    reason = why_not_flex(model.config, ())
    if attention == "flex" and reason is not None:
        raise UserError(f"attention: flex cannot be used, as {reason}; use sdpa")
    model.set_attn_implementation(_NAME)


def why_not_flex(config: PreTrainedConfig, specs: Sequence[AttentionSpec]) -> str | None:
    """Return why flex attention cannot train a model's layers on a GPU, or None if it can."""
    text = config.get_text_config()
    dropouts = [name for name in _DROPOUTS if getattr(text, name, None)]
    if dropouts:
        return f"the model has {dropouts[0]}, which flex attention does not do"
    sizes = {size for spec in specs for size in (spec.key_dim, spec.value_dim)}
    odd = sorted(sizes - set(_HEAD_DIMS))
    if not odd:
        return None
    allowed = f"{_HEAD_DIMS[0]} to {_HEAD_DIMS[-1]}"
    return f"the model's heads have {odd[0]} numbers and its kernel takes {allowed}"


def slots_of(batch: Batch) -> RowSlots:
    """Return the columns of a batch, [rows, slots] each, that visibility depends on."""
    return RowSlots(batch.documents, batch.position_ids, batch.blocks, batch.noisy)


def mask_between(
    queries: RowSlots, keys: RowSlots, attention: Attention, oldest: Tensor | None = None
) -> Tensor | BlockMask:
    """Return the attention mask of some slots of packed rows towards others, or themselves.

    It is bool [rows, 1, queries, keys] for SDPA, a block mask for flex attention. ``oldest``, int
    [rows, queries], limits what each query sees; see `sees`.
    """
    if attention == "flex":
        return block_mask(queries, keys, oldest)
    return sees(
        RowSlots(*(column[:, None, :, None] for column in queries)),
        RowSlots(*(column[:, None, None, :] for column in keys)),
        None if oldest is None else oldest[:, None, :, None],
    )


def block_mask(queries: RowSlots, keys: RowSlots, oldest: Tensor | None = None) -> BlockMask:
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
            None if oldest is None else oldest[row, query],
        )

    num_visible = _num_visible(queries, keys, oldest)
    is_full = num_visible == FLEX_MULTIPLE**2
    return BlockMask.from_kv_blocks(
        *_listed((num_visible > 0) & ~is_full),
        *_listed(is_full),
        BLOCK_SIZE=FLEX_MULTIPLE,
        mask_mod=visible,
        seq_lengths=lengths,
    )


def _num_visible(queries: RowSlots, keys: RowSlots, oldest: Tensor | None) -> Tensor:
    """Count the visible pairs of slots: int64 [rows, 1, blocks of queries, blocks of keys]."""
    rows, num_keys = keys.position.shape
    num_blocks = num_keys // FLEX_MULTIPLE
    keys = RowSlots(*(column[:, None, :] for column in keys))
    at_once = max(1, _MOST_AT_ONCE // (rows * FLEX_MULTIPLE * num_keys)) * FLEX_MULTIPLE
    counts = []
    for begin in range(0, queries.position.shape[1], at_once):
        part = slice(begin, begin + at_once)
        limit = None if oldest is None else oldest[:, part, None]
        visible = sees(RowSlots(*(column[:, part, None] for column in queries)), keys, limit)
        tiles = visible.view(rows, -1, FLEX_MULTIPLE, num_blocks, FLEX_MULTIPLE)
        counts.append(tiles.sum(dim=(2, 4)))
    return torch.cat(counts, dim=1).unsqueeze(1)


def _listed(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of wanted blocks in each row of blocks, and their indices first, int32."""
    order = torch.argsort(wanted.to(torch.int8), dim=-1, descending=True, stable=True)
    return wanted.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)


# --- what layers call -----------------------------------------------------------------------------


@dataclass
class StoredStream:
    """Keys and values of a stream, by layer, for the pass of another stream that sees it.

    transformers' caches do the same, but its layers drop them where activations are computed again.
    """

    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values [rows, kv_heads, slots, head_dim] of each layer."""
    is_complete: bool = False
    """Whether the stream's own pass is over, so that keys and values are read."""

    def join(self, call: AttentionCall) -> AttentionCall:
        """Keep a layer's keys and values, or put the kept ones before them."""
        if not self.is_complete:
            self.layers[call.layer] = (call.key, call.value)
            return call
        pairs = zip(self.layers[call.layer], (call.key, call.value), strict=True)
        key, value = (torch.cat(pair, dim=2) for pair in pairs)
        return call._replace(key=key, value=value)


@dataclass(eq=False)
class LayerMask:
    """Stands for the attention mask that a model hands its layers."""

    visible: Tensor | BlockMask
    positions: Tensor | None = None
    """int64 [rows, queries]; None if they are the places in the rows."""
    stored: StoredStream | None = None

    def __getitem__(self, _: Any) -> Self:
        """Return the mask of all queries, to which Gemma 4 cuts that of its last layers."""
        return self


@dataclass
class RowMasks:
    """The masks of one pass over packed rows; each is made when a layer first asks for it."""

    queries: RowSlots
    keys: RowSlots
    attention: Attention
    stored: StoredStream | None = None
    """Stream that layers keep, or whose slots stand before those of the pass as keys."""
    _made: dict[tuple[int | None, int | None], LayerMask] = field(default_factory=dict)

    def of(self, window: int | None, chunk: int | None) -> LayerMask:
        """Return the mask of layers with a window, or a chunk, or neither."""
        reach = window, chunk
        if reach not in self._made:
            oldest = oldest_visible(self.queries.position, window, chunk)
            visible = mask_between(self.queries, self.keys, self.attention, oldest)
            self._made[reach] = LayerMask(visible, self.queries.position, self.stored)
        return self._made[reach]


_MASKS: ContextVar[RowMasks] = ContextVar("marsray_row_masks")


@contextmanager
def within(masks: RowMasks) -> Iterator[None]:
    """Have passes of models in this thread, that `use_attention` prepared, attend by ``masks``."""
    before = _MASKS.set(masks)
    try:
        yield
    finally:
        _MASKS.reset(before)


def _mask(
    *, mask_function: Callable[..., Any], local_size: int | None = None, **how: Any
) -> LayerMask:
    """Make the mask that a model asks for; transformers calls this before the first layer.

    Outside of a pass over packed rows it is that of a plain forward pass.
    """
    masks = _MASKS.get(None)
    if masks is None:
        how = {**how, "allow_is_causal_skip": False}
        visible = sdpa_mask(mask_function=mask_function, local_size=local_size, **how)
        assert isinstance(visible, Tensor)
        return LayerMask(visible)
    if local_size is None:
        return masks.of(None, None)
    return masks.of(*reach_of(mask_function, local_size, how["device"]))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask,
    *,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend in one layer, as transformers calls it.

    On a CPU, flex attention is slow and has no backward.
    """
    call, mask = read_call(module, query, key, value, **others), attention_mask
    if mask.positions is not None:
        call = call._replace(query=call.query_at(mask.positions))
    if mask.stored is not None:
        call = mask.stored.join(call)
    query, key, value = call.query, call.key, call.value
    scaling, softcap, sinks, visible = call.scaling, call.softcap, call.sinks, mask.visible
    if isinstance(visible, Tensor):
        if softcap is None and sinks is None:
            attended: tuple[Tensor, None] = sdpa_attention_forward(
                module, query, key, value, visible, dropout=dropout, scaling=scaling
            )
            return attended
        output = _plain_attention(call, visible, dropout)
    elif query.device.type == "cpu" or torch.compiler.is_compiling():
        output = _flex_attention(query, key, value, sinks, visible, scaling, softcap)
    else:
        attend = compiled_flex_attention(scaling, softcap)
        output = attend(query, key, value, sinks, visible)
    # [rows, heads, slots, value_dim]
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _mask)


def _plain_attention(call: AttentionCall, visible: Tensor, dropout: float) -> Tensor:
    """Attend by two products, between which scores are capped and compete with sinks."""
    groups = call.query.shape[1] // call.key.shape[1]
    key, value = (repeat_kv(each, groups) for each in (call.key, call.value))
    scores = _capped(call.query @ key.transpose(2, 3) * call.scaling, call.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if call.sinks is not None:
        sinks = call.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)[..., : key.shape[2]]
    output: Tensor = F.dropout(weights, dropout) @ value
    return output


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


# transformers has its own "flex_attention", which takes block masks as well. But it compiles on
# every device, and on a CPU the compiler fails on masks that read tensors once shapes are dynamic
# (torch 2.13: C++ that does not build). It also repeats keys and values if the number of heads is
# not a power of two.
def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    mask: BlockMask,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return _capped(score, softcap)

    output, aux = flex_attention(
        query,
        key,
        value,
        score_mod=None if softcap is None else capped,
        block_mask=mask,
        scale=scaling,
        enable_gqa=True,
        return_aux=AuxRequest(lse=sinks is not None),
    )
    if sinks is None:
        return output
    assert aux.lse is not None
    share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])  # of all that is no sink
    return output * share.unsqueeze(-1).to(output.dtype)


@cache
def compiled_flex_attention(
    scaling: float, softcap: float | None = None, backend: str | Callable[..., Any] = "inductor"
) -> Attend:
    """Return flex attention compiled for any shape, which never runs unfused.

    Torch compiles a variant for one shape, then variants in which rows and slots are symbols; one
    row or one block of slots take variants of their own, and so do sinks, windows and modes of
    gradients. These are more than torch's default limit of 8, behind which it would run flex
    attention unfused without a word: the limit is raised, and ``fullgraph`` makes an error of
    reaching it.
    """

    def attend(
        query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: BlockMask
    ) -> Tensor:
        return _flex_attention(query, key, value, sinks, mask, scaling, softcap)

    # Torch keeps variants by code object. With one for each factor, the factor stays a constant, as
    # the kernel needs it, also where a process trains several models.
    attend.__code__ = attend.__code__.replace()
    compiled: Attend = torch.compile(attend, fullgraph=True, backend=backend)

    def call(
        query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: BlockMask
    ) -> Tensor:
        with torch._dynamo.config.patch(recompile_limit=_VARIANTS):
            return compiled(query, key, value, sinks, mask)

    return call
