"""Single steps of attention with random numbers, and their result by dense attention."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.engine_requests import make_request, make_row
from mars_serve.engine.attention.interface import Attention, LayerGroup
from mars_serve.engine.batch import BatchRow, build_batch
from mars_serve.engine.request import Draft

MASK = 3
RowShape = tuple[int, int, tuple[int, ...]]
"""Cached tokens of a row, tokens that it feeds, and its masks by outcome."""


class AttentionStep:
    """One step of one layer; rows have pages of their own, in an order by chance."""

    def __init__(
        self,
        rows: Sequence[RowShape],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        page_size: int = 4,
        *,
        num_heads: int = 8,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        value_dim: int | None = None,
        window: int | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        has_sinks: bool = False,
        value_in_key: bool = False,
    ) -> None:
        torch.manual_seed(0)
        value_dim = value_dim or head_dim
        self.group = LayerGroup(
            *(1, num_heads, num_kv_heads, head_dim, value_dim),
            window=window,
            chunk=chunk,
            value_in_key=value_in_key,
        )
        self.softcap, self.scaling = softcap, head_dim**-0.5
        self.sinks = torch.randn(num_heads, dtype=dtype, device=device) if has_sinks else None
        self.types = {"dtype": dtype, "device": device}
        self.page_size = page_size
        longest = max(num_cached + tokens + len(masks) for num_cached, tokens, masks in rows)
        most = 1 + longest // page_size
        self.num_pages = len(rows) * most
        order = random.Random(0).sample(range(self.num_pages), self.num_pages)
        scheduled = []
        for index, (num_cached, tokens, masks) in enumerate(rows):
            request = make_request(
                str(index),
                [5] * (num_cached + tokens),
                num_cached=num_cached,
                pages=order[index * most : (index + 1) * most],
            )
            request.drafts = [Draft(6, 0.5)] * (len(masks) - 1)
            scheduled.append(make_row(request, tokens, masks))
        self.batch = build_batch(scheduled, MASK)
        # As transformers' layers have them: queries and keys lie by head, some in wider products.
        positions, wide = len(self.batch.ids), num_heads + num_kv_heads
        product = torch.randn(wide, positions, head_dim, **self.types).transpose(0, 1)
        self.query, self.key = product.split([num_heads, num_kv_heads], dim=1)
        values = torch.randn(positions, num_kv_heads, value_dim + 8, **self.types)
        self.value = values[..., :value_dim]
        self.pages = [
            torch.randn(self.num_pages, page_size, num_kv_heads, size, **self.types)
            for size in (head_dim, value_dim)
        ]
        if value_in_key:
            self.value, self.pages[1] = (
                part[..., :value_dim] for part in (self.key, self.pages[0])
            )

    def attend(self, attention: Attention, cached: Sequence[Tensor]) -> Tensor:
        """Attend over the step's pages, copied to ``cached``; return the positions in use."""
        for part, pages in zip(cached, self.pages, strict=True):
            part[0, : self.num_pages] = pages
        metadata = attention.prepare(self.batch)
        output = attention.attend(
            *(0, self.query, self.key, self.value, self.scaling, metadata, self.softcap, self.sinks)
        )
        return output[: self.batch.num_positions]

    def hide(self, row: BatchRow) -> None:
        """Put NaN into the pages before the first cached token that a row sees."""
        window, chunk, first = self.group.window, self.group.chunk, 0
        if window is not None:
            first = max(0, row.num_cached - window + 1)
        if chunk is not None:
            first = row.num_cached // chunk * chunk
        for part in self.pages:
            part[row.pages[: first // self.page_size]] = torch.nan

    def expected(self) -> Tensor:
        """Attend densely in each row by itself."""
        return torch.cat([self._expected(row) for row in self.batch.rows])

    def _expected(self, row: BatchRow) -> Tensor:
        own = slice(row.start, row.start + row.length)
        queries = self.query[own].float()
        keys, values = (
            torch.cat([pages[row.pages].flatten(0, 1)[: row.num_cached], fresh[own]])
            .float()
            .repeat_interleave(queries.shape[1] // fresh.shape[1], dim=1)
            for pages, fresh in zip(self.pages, (self.key, self.value), strict=True)
        )
        seen = torch.ones(row.length, len(keys), device=keys.device)
        seen[:, row.num_cached :] = _seen(row.num_tokens - row.num_drafts, row.masks)
        positions = torch.tensor(
            [*range(row.num_cached), *self.batch.position_ids[own]], device=keys.device
        )
        own_positions = positions[row.num_cached :, None]
        if self.group.window is not None:
            seen *= positions > own_positions - self.group.window
        if self.group.chunk is not None:
            seen *= positions // self.group.chunk == own_positions // self.group.chunk
        for part in (keys, values):  # what no query of the row sees may be anything
            part[: row.num_cached][~seen.bool().any(0)[: row.num_cached]] = 0.0
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.scaling
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~seen.bool(), -torch.inf)
        if self.sinks is not None:
            sink = self.sinks.float()[:, None, None].expand(-1, row.length, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(-1)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", weights, values)


def _seen(num_tokens: int, masks: tuple[int, ...]) -> Tensor:
    """Visibility in a row: tokens and drafts are causal; masks see their drafts and their group."""
    kept = num_tokens + len(masks) - 1
    seen = torch.ones(kept + sum(masks), kept + sum(masks)).tril()
    begin = kept
    for outcome, count in enumerate(masks):
        seen[begin : begin + count, num_tokens + outcome : begin] = 0
        begin += count
    return seen
