"""The paged attention kernel in plain torch, in float32 on any device: the fast kernels' oracle.

For a query without a key it returns NaN, the worst that a kernel may return there.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest

from mars_serve.engine.attention.paged_kernel import PagedKernel


def plain_varlen_attn(
    query: Tensor,  # [queries, heads, head_dim]
    key: Tensor,  # [keys, kv_heads, head_dim] or [pages, page_size, kv_heads, head_dim]
    value: Tensor,  # like key
    cu_seq_q: Tensor,  # int32 [rows + 1]
    cu_seq_k: Tensor | None,  # int32 [rows + 1]
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest,
    scale: float,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``torch.nn.attention.varlen.varlen_attn`` for the arguments that are used here.

    Returns:
        [queries, heads, head_dim] and the log-sum-exps, float32 [heads, queries].
    """
    assert return_aux.lse
    assert num_splits in (None, 1)
    assert enable_gqa or query.shape[1] == key.shape[-2]
    assert cu_seq_q.dtype == torch.int32
    output = torch.full_like(query, torch.nan)
    lse = query.new_full(query.shape[1::-1], torch.inf, dtype=torch.float32)
    starts = cu_seq_q.tolist()
    for row, (begin, end) in enumerate(pairwise(starts)):
        keys, values = (
            _of_row(part, row, cu_seq_k, seqused_k, block_table) for part in (key, value)
        )
        assert end - begin <= max_q
        assert len(keys) <= max_k
        if begin == end or not len(keys):
            continue
        keys, values = (
            part.float().repeat_interleave(query.shape[1] // part.shape[1], dim=1)
            for part in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].float(), keys) * scale
        if window_size == (-1, 0):
            hidden = torch.ones_like(scores[0], dtype=torch.bool)
            scores = scores.masked_fill(hidden.triu(1 + len(keys) - (end - begin)), -torch.inf)
        lse[:, begin:end] = scores.logsumexp(-1)
        output[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return output, lse


def _of_row(
    stored: Tensor,
    row: int,
    starts: Tensor | None,
    used: Tensor | None,
    table: Tensor | None,
) -> Tensor:
    """Return the keys or values of one row: [keys, kv_heads, head_dim]."""
    if table is None:
        assert starts is not None
        begin, end = starts[row : row + 2].tolist()
        return stored[begin:end]
    assert used is not None
    assert table.dtype == used.dtype == torch.int32
    return stored[table[row].long()].flatten(0, 1)[: int(used[row])]


def plain_kernel(*, needs_key_starts: bool = False) -> PagedKernel:
    """Return the plain kernel, with or without a need for cumulative key lengths."""
    return PagedKernel("plain torch", plain_varlen_attn, needs_key_starts, num_splits=None)
