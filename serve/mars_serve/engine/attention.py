"""Attention of one step over paged keys and values, through transformers' attention interface.

A step holds several requests' positions side by side in one row. Each sees the stored pages of
its own request and, causally, the step's own positions of the same request. Only committed
tokens' keys and values are written to pages: what a mask computed is gone after the step.
Source: ``transformers.AttentionInterface``; the implementation is exact scaled dot-product
attention over gathered pages, on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

ATTENTION_NAME = "marsray_paged"


class PagedKeyValues:
    """Key and value pages of all layers: each [layers, pages, page_size, kv_heads, head_dim]."""

    def __init__(
        self,
        config: PreTrainedConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        shape = (config.num_hidden_layers, num_pages, page_size, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)


@dataclass(frozen=True)
class RowGroup:
    """Rows (one a request) of similar length that attend in one call, padded to a rectangle."""

    positions: Tensor  # int64 [rows, width], places in the step; padding repeats place 0
    pages: Tensor  # int64 [rows, pages], stored pages; padding repeats page 0
    visible: Tensor  # bool [rows, 1, width, pages * page_size + width]

    def to(self, device: torch.device) -> RowGroup:
        """The same group on another device."""
        return RowGroup(*(part.to(device) for part in vars(self).values()))


@dataclass(frozen=True)
class PagedStep:
    """Where the positions of one step read and write keys and values."""

    storage: PagedKeyValues
    committed: Tensor  # int64 [tokens], places in the step whose keys and values are kept
    slots: Tensor  # int64 [tokens], flat page slots that they go to
    groups: list[RowGroup]
    places: Tensor  # int64 [positions], where each place lies in the groups' outputs laid flat


def build_group(
    starts: list[int], stored: list[int], lengths: list[int], pages: list[list[int]], page_size: int
) -> RowGroup:
    """Group rows given, for each: its first place in the step, its stored tokens, its length
    in this step and its pages.
    """
    width, num_pages = max(lengths), max(-(-count // page_size) for count in stored)
    place = torch.arange(width)
    length, count = torch.tensor(lengths)[:, None], torch.tensor(stored)[:, None]
    inside = place < length  # [rows, width]
    positions = torch.where(inside, torch.tensor(starts)[:, None] + place, 0)
    table = torch.zeros(len(lengths), num_pages, dtype=torch.long)
    for row, (held, tokens) in enumerate(zip(pages, stored, strict=True)):
        used = -(-tokens // page_size)
        table[row, :used] = torch.tensor(held[:used], dtype=torch.long)
    in_pages = torch.arange(num_pages * page_size) < count  # [rows, keys]
    causal = place[None, :] <= place[:, None]  # a padding query sees place 0: no empty row
    visible = torch.cat(
        [
            in_pages[:, None, :].expand(-1, width, -1),
            causal[None] & inside[:, None, :],
        ],
        dim=-1,
    )
    return RowGroup(positions, table, visible.unsqueeze(1))


def _paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, positions, head_dim]
    key: Tensor,  # [1, kv_heads, positions, head_dim]
    value: Tensor,  # [1, kv_heads, positions, head_dim]
    _attention_mask: Tensor | None,
    *,
    scaling: float,
    step: PagedStep,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in each layer; ``step`` comes through the forward."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    queries, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))
    stored_keys, stored_values = step.storage.keys[layer], step.storage.values[layer]
    outputs = [
        _attend(group, queries, keys, values, stored_keys, stored_values, scaling)
        for group in step.groups
    ]
    stored_keys.flatten(0, 1).index_copy_(0, step.slots, keys[step.committed])
    stored_values.flatten(0, 1).index_copy_(0, step.slots, values[step.committed])
    return torch.cat(outputs).index_select(0, step.places).unsqueeze(0), None


def _attend(
    group: RowGroup,
    queries: Tensor,  # [positions, heads, head_dim]
    keys: Tensor,  # [positions, kv_heads, head_dim]
    values: Tensor,  # [positions, kv_heads, head_dim]
    stored_keys: Tensor,  # [pages, page_size, kv_heads, head_dim]
    stored_values: Tensor,  # [pages, page_size, kv_heads, head_dim]
    scaling: float,
) -> Tensor:
    """One group's attention output, padding included: [rows * width, heads, head_dim]."""
    rows, width = group.positions.shape
    heads, head_dim = queries.shape[1:]
    per_kv_head = heads // keys.shape[1]
    own = group.positions.flatten()
    num_stored = group.pages.shape[1] * stored_keys.shape[1]

    def gather(stored: Tensor, fresh: Tensor) -> Tensor:
        past = stored[group.pages.flatten()].view(rows, num_stored, *fresh.shape[1:])
        return torch.cat([past, fresh[own].view(rows, width, *fresh.shape[1:])], 1).transpose(1, 2)

    # Query heads that share a key/value head become further queries of it: nothing is repeated.
    folded = queries[own].view(rows, width, -1, per_kv_head, head_dim)
    folded = folded.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [rows, kv_heads, per_kv * width, dim]
    output = F.scaled_dot_product_attention(
        folded,
        gather(stored_keys, keys),
        gather(stored_values, values),
        attn_mask=group.visible.repeat(1, 1, per_kv_head, 1),
        scale=scaling,
    )
    unfolded = output.view(rows, -1, per_kv_head, width, head_dim).permute(0, 3, 1, 2, 4)
    return unfolded.reshape(rows * width, heads, head_dim)


AttentionInterface.register(ATTENTION_NAME, _paged_attention)
