"""Decodes static batches on one block-synchronised cache, to be measured beside the engine.

This is the cache that the MARS paper describes (arXiv 2604.07023, sections 3.4 and 3.5), written
from the description and meant to be as fast as that scheme allows. All rows of a batch share one
cache length. The batch advances in blocks of a fixed number of tokens: within a block every step
feeds all tokens that the block has so far, then masks, against the frozen cache. A row that has
filled its block waits until all rows have; then one forward pass caches the block.

Three choices favour the scheme. The pass that caches a block also feeds the masks of the next
block and costs no pass of its own. Rows that have ended leave the batch with the block. The cache
is one tensor that steps write behind its length: nothing is copied or cropped.

The acceptance rule is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.method.mode import Confidence
from mars_serve.bench.decode.workload import BenchRequest
from mars_serve.engine.execution.acceptance import num_sure
from mars_serve.engine.execution.proposals import Reads, propose, unpack

ATTENTION_NAME = "marsray_block_sync"


class SharedCache:
    """The keys and values of a batch, each [layers, rows, kv_heads, capacity, head_dim]."""

    def __init__(self, model: PreTrainedModel, num_rows: int, capacity: int) -> None:
        """Allocate ``capacity`` slots for each of ``num_rows`` rows."""
        config = model.config
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        shape = (config.num_hidden_layers, num_rows, kv_heads, capacity, head_dim)
        self.keys = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.values = torch.empty_like(self.keys)
        self.group_size = heads // kv_heads
        """Number of query heads that share a key/value head."""
        self.length = 0
        """Number of cached tokens of every row, padding on the left included."""

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but the given ones."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]


@dataclass(frozen=True)
class BlockStep:
    """The attention metadata of one forward pass over ``rows * width`` positions."""

    cache: SharedCache
    bias: Tensor  # [rows, 1, group_size * width, length + width], 0 or -inf


@dataclass
class BlockSyncRow:
    """One request of a batch and its output so far."""

    request: BenchRequest
    """The request."""
    padding: int
    """Number of empty slots before the prompt."""
    passes: list[list[int]] = field(default_factory=list)
    """Tokens of each pass that gave the row some."""
    num_waits: int = 0
    """Number of passes in which the row waited for other rows to fill their block."""
    done: bool = False
    """Whether the output has ended."""
    tokens: list[int] = field(init=False)
    """Committed tokens, the prompt included."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def num_output(self) -> int:
        """Number of output tokens so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def next_slot(self) -> int:
        """Slot of the next token, counted from the start of the padding."""
        return self.padding + len(self.tokens)


class BlockSyncDecoder:
    """Decodes batches greedily on a block-synchronised cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        special: SpecialTokens,
        *,
        block_length: int,
        threshold: float,
        num_masks: int,
        mask_token_id: int,
        draw: Callable[[str, int, int], int] | None = None,
    ) -> None:
        """Take over a model that attends through `ATTENTION_NAME`.

        Args:
            model: any decoder that the engine serves.
            special: token ids that end a row, and token ids that are never emitted.
            block_length: tokens that all rows cache together.
            threshold: τ in (0, 1]; at 1 no mask is fed.
            num_masks: window; the end of a block cuts it short.
            mask_token_id: token id of the mask.
            draw: function that replaces the acceptance rule; it takes the request's id, its number
                of output tokens and its number of proposals, and returns the accepted number.
        """
        self.model, self.special = model, special
        self.block_length = block_length
        self.threshold = threshold
        self.window = num_masks if threshold < 1.0 else 0
        self.mask_token_id = mask_token_id
        self._draw = draw
        self._banned = torch.tensor(
            sorted(special.never_emitted), dtype=torch.long, device=model.device
        )

    @torch.inference_mode()
    def decode(self, requests: Sequence[BenchRequest]) -> list[BlockSyncRow]:
        """Decode one batch to the end and return its rows in the order of the requests."""
        prompt_length = max(len(request.prompt) for request in requests)
        rows = [BlockSyncRow(request, prompt_length - len(request.prompt)) for request in requests]
        num_blocks = -(-max(request.max_tokens for request in requests) // self.block_length)
        capacity = prompt_length + num_blocks * self.block_length
        cache, live, start = SharedCache(self.model, len(rows), capacity), rows, prompt_length
        while live:
            end = start + self.block_length
            self._step(live, cache, end)
            cache.length = start  # the step has cached everything before the block
            while any(_is_open(row, end) for row in live):
                self._step(live, cache, end)
            if any(row.done for row in live):
                left = [index for index, row in enumerate(live) if not row.done]
                live = [live[index] for index in left]
                cache.keep(left)
            start = end
        return rows

    def _step(self, rows: list[BlockSyncRow], cache: SharedCache, end: int) -> None:
        """Feed the uncached tokens and masks of each row, and commit the accepted tokens."""
        masks = [self._num_masks(row, end) for row in rows]
        num_uncached = [row.next_slot - cache.length for row in rows]
        is_open = [_is_open(row, end) for row in rows]
        # rows that wait may be cut off: none of their logits are read
        width = max(n + m for n, m, used in zip(num_uncached, masks, is_open, strict=True) if used)
        cursors = [index * width + n - 1 for index, n in enumerate(num_uncached)]
        chosen = [index for index, used in enumerate(is_open) if used]
        depths = [range(masks[index] + 1) for index in chosen]
        read_positions = [
            cursors[i] + depth for i, each in zip(chosen, depths, strict=True) for depth in each
        ]
        logits = self._forward(rows, cache, width, read_positions)
        num_reads = len(read_positions)
        measures = torch.zeros(num_reads, dtype=torch.long, device=self.model.device)
        reads = Reads(measures, frozenset({Confidence.PROBABILITY}))
        tokens, confidences = unpack(propose(logits, reads, self._banned).cpu())
        begin = 0
        for index, each in zip(chosen, depths, strict=True):
            end = begin + len(each)
            count = self._count(rows[index], confidences[begin:end])
            self._commit(rows[index], tokens[begin : begin + count])
            begin = end
        for row, used in zip(rows, is_open, strict=True):
            row.num_waits += not used and not row.done

    def _num_masks(self, row: BlockSyncRow, end: int) -> int:
        room = min(end - row.next_slot, row.request.max_tokens - row.num_output)
        return max(0, min(self.window, room - 1))

    def _forward(
        self, rows: list[BlockSyncRow], cache: SharedCache, width: int, read_positions: list[int]
    ) -> Tensor:
        """Return the logits at ``read_positions`` of the flattened rows: [reads, vocabulary]."""
        device = self.model.device
        begin = cache.length
        ids = []
        for row in rows:
            own = row.tokens[max(begin - row.padding, 0) :]
            # only the first pass of a batch feeds padding
            own = [self.mask_token_id] * max(row.padding - begin, 0) + own
            ids += (own + [self.mask_token_id] * width)[:width]
        slots = torch.arange(begin, begin + width)
        padding = torch.tensor([row.padding for row in rows])[:, None]
        position_ids = (slots - padding).clamp(min=0)  # [rows, width]
        output = self.model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=position_ids.view(1, -1).to(device),
            use_cache=False,
            logits_to_keep=torch.tensor(read_positions, device=device),
            block=BlockStep(cache, self._attention_bias(cache, slots, padding).to(device)),
        )
        logits: Tensor = output.logits[0]
        return logits

    def _attention_bias(self, cache: SharedCache, slots: Tensor, padding: Tensor) -> Tensor:
        """Return the attention bias: each slot sees its row's own tokens up to itself."""
        key = torch.arange(int(slots[-1]) + 1)
        causal = key <= slots[:, None]  # [width, keys]
        itself = key == slots[:, None]  # padding sees itself, as softmax needs one visible key
        visible = (causal & (key >= padding[:, :, None])) | itself  # [rows, width, keys]
        bias = torch.zeros(visible.shape, dtype=self.model.dtype)
        bias = bias.masked_fill_(~visible, -torch.inf).unsqueeze(1)
        return bias.repeat(1, 1, cache.group_size, 1)

    def _count(self, row: BlockSyncRow, confidences: list[float]) -> int:
        """Return the number of accepted proposals of a row."""
        if self._draw is not None:
            return self._draw(row.request.id, row.num_output, len(confidences))
        return 1 + num_sure(confidences[1:], self.threshold)

    def _commit(self, row: BlockSyncRow, tokens: list[int]) -> None:
        ends = [index for index, token in enumerate(tokens) if token in self.special.eos]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        row.passes.append(tokens)
        row.tokens += tokens
        row.done = bool(ends) or row.num_output >= row.request.max_tokens


def _is_open(row: BlockSyncRow, end: int) -> bool:
    """Return whether a row has not filled the block that ends at slot ``end``."""
    return not row.done and row.next_slot < end


def _attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, rows * width, head_dim]
    key: Tensor,  # [1, kv_heads, rows * width, head_dim]
    value: Tensor,  # [1, kv_heads, rows * width, head_dim]
    _attention_mask: Tensor | None,
    *,
    scaling: float,
    block: BlockStep,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks of each layer; ``block`` is handed through the forward pass."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    cache, head_dim = block.cache, query.shape[-1]
    rows, kv_heads = cache.keys.shape[1:3]
    width = block.bias.shape[2] // cache.group_size
    begin, end = cache.length, cache.length + width

    def by_row(part: Tensor) -> Tensor:  # [rows, kv_heads, n * width, head_dim]
        split = part.view(kv_heads, -1, rows, width, head_dim).permute(2, 0, 1, 3, 4)
        return split.reshape(rows, kv_heads, -1, head_dim)

    keys, values = cache.keys[layer], cache.values[layer]
    keys[:, :, begin:end] = by_row(key)
    values[:, :, begin:end] = by_row(value)
    # Query heads that share a key/value head become more queries of it: no key is repeated.
    output = F.scaled_dot_product_attention(
        by_row(query),
        keys[:, :, :end],
        values[:, :, :end],
        attn_mask=block.bias,
        scale=scaling,
    )
    output = output.view(rows, kv_heads, cache.group_size, width, head_dim).permute(0, 3, 1, 2, 4)
    return output.reshape(1, rows * width, -1, head_dim), None


AttentionInterface.register(ATTENTION_NAME, _attention)
