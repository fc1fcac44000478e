"""Single steps of attention with random numbers, and their result by dense attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.engine_requests import make_request, make_row
from mars_serve.engine.attention.interface import Attention
from mars_serve.engine.batch import build_batch
from mars_serve.engine.request import Draft

MASK, SCALING = 3, 0.125
RowShape = tuple[int, int, tuple[int, ...]]
"""Cached tokens of a row, tokens that it feeds, and its masks by outcome."""


class AttentionStep:
    """One step of one layer with 8 query and 2 key/value heads; rows have pages of their own."""

    def __init__(
        self,
        rows: Sequence[RowShape],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        page_size: int = 4,
    ) -> None:
        torch.manual_seed(0)
        self.types = {"dtype": dtype, "device": device}
        self.page_size = page_size
        longest = max(num_cached + tokens + len(masks) for num_cached, tokens, masks in rows)
        most = 1 + longest // page_size
        scheduled = []
        for index, (num_cached, tokens, masks) in enumerate(rows):
            pages = [index + len(rows) * page for page in range(most)]
            request = make_request(
                str(index), [5] * (num_cached + tokens), num_cached=num_cached, pages=pages
            )
            request.drafts = [Draft(6, 0.5)] * (len(masks) - 1)
            scheduled.append(make_row(request, tokens, masks))
        self.batch = build_batch(scheduled, MASK)
        num_positions = len(self.batch.ids)
        self.query = torch.randn(num_positions, 8, 64, **self.types)
        self.key, self.value = torch.randn(2, num_positions, 2, 64, **self.types)
        self.num_pages = len(rows) * most
        self.pages = torch.randn(2, self.num_pages, page_size, 2, 64, **self.types)

    def attend(self, attention: Attention, cached: Sequence[Tensor]) -> Tensor:
        """Attend over the step's pages, copied to ``cached``; return the positions in use."""
        for part, pages in zip(cached, self.pages, strict=True):
            part[0, : self.num_pages] = pages
        metadata = attention.prepare(self.batch)
        output = attention.attend(0, self.query, self.key, self.value, SCALING, metadata)
        return output[: self.batch.num_positions]

    def expected(self) -> Tensor:
        """Attend densely in each row by itself."""
        outputs = []
        for row in self.batch.rows:
            own = slice(row.start, row.start + row.length)
            keys, values = (
                torch.cat([pages[row.pages].flatten(0, 1)[: row.num_cached], fresh[own]])
                .float()
                .transpose(0, 1)
                for pages, fresh in zip(self.pages, (self.key, self.value), strict=True)
            )
            seen = torch.ones(row.length, keys.shape[1], device=keys.device)
            seen[:, row.num_cached :] = _seen(row.num_tokens - row.num_drafts, row.masks)
            output = torch.nn.functional.scaled_dot_product_attention(
                self.query[own].float().transpose(0, 1),
                keys,
                values,
                attn_mask=seen.bool(),
                scale=SCALING,
                enable_gqa=True,
            )
            outputs.append(output.transpose(0, 1))
        return torch.cat(outputs)


def _seen(num_tokens: int, masks: tuple[int, ...]) -> Tensor:
    """Visibility in a row: tokens and drafts are causal; masks see their drafts and their group."""
    kept = num_tokens + len(masks) - 1
    seen = torch.ones(kept + sum(masks), kept + sum(masks)).tril()
    begin = kept
    for outcome, count in enumerate(masks):
        seen[begin : begin + count, num_tokens + outcome : begin] = 0
        begin += count
    return seen
