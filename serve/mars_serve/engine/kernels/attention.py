"""The operator ``marsray::paged_attention``, and its twin in plain torch.

It attends from the queries of a step to cached keys, which lie in pages, and to the step's own.
Each row of the step has cached keys, all of which its queries see, and keys of its own, of which
two integers a query say what it sees. The work is cut into pieces, which the host lists. A piece
has up to a tile of neighbouring queries of one row and a range of its blocks of keys; the blocks of
cached keys come first, those of the row's own keys follow. The results of a tile that has several
pieces are combined.

The twin computes densely in float32, tile by tile: slowly, and as the oracle of the kernel.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import torch
from torch import Tensor

PIECE_FIELDS = 8
"""Integers of a piece: its row in the page table; its first query and the one behind its last; the
first position of its row; cached tokens of the row; its first block of keys and the one behind its
last; and its slot among the partial results, or -1 if it is the only piece of its tile. Blocks
before the tile's oldest visible key are in no piece. A piece whose first query is not below its
last one is padding."""
COMBINE_FIELDS = 3
"""Integers of a position: the first slot of its tile and their number, 0 if there is nothing to
combine; and the position's rank in its tile."""

LARGE_MEMORY = frozenset({(8, 0), (9, 0), (10, 0), (10, 3)})
"""Compute capabilities whose blocks may take 160 KiB of shared memory or more; others have 99."""


@cache
def has_large_memory(device: torch.device) -> bool:
    """Return whether a device's capability is in `LARGE_MEMORY`; those without one count as so."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in LARGE_MEMORY


def heads_of_tile(per_kv: int, block_m: int) -> int:
    """Return how many query heads of a key/value head share a tile of ``block_m`` rows.

    They are all of ``per_kv`` if they fit, or else the largest part that divides them.
    """
    return next(
        per_kv // n for n in range(1, per_kv + 1) if per_kv % n == 0 and per_kv <= n * block_m
    )


SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor key_pages, Tensor value_pages, "
    "Tensor page_table, Tensor leading, Tensor own, Tensor positions, Tensor pieces, "
    "Tensor combine, float scaling, int block_m, int block_n, int num_slots, "
    "Tensor? oldest=None, float? softcap=None, Tensor? sinks=None, float key_scale=1.0, "
    "float value_scale=1.0) -> Tensor"
)


def paged_attention_twin(
    query: Tensor,  # [positions, heads, key_dim]
    key: Tensor,  # [positions, kv_heads, key_dim]
    value: Tensor,  # [positions, kv_heads, value_dim]
    key_pages: Tensor,  # [pages, page_size, kv_heads, key_dim]
    value_pages: Tensor,  # [pages, page_size, kv_heads, value_dim]
    page_table: Tensor,  # int64 [rows, pages of a row]
    leading: Tensor,  # int64 [positions]
    own: Tensor,  # int64 [positions]
    positions: Tensor,  # int64 [positions]
    pieces: Tensor,  # int64 [pieces, PIECE_FIELDS]
    combine: Tensor,  # int64 [positions, COMBINE_FIELDS]
    scaling: float,
    block_m: int,
    block_n: int,
    num_slots: int,
    oldest: Tensor | None = None,  # int64 [positions]
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [heads]
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Attend from all positions of a step in one layer, in plain torch.

    Args:
        query: queries; the last dimension of queries, keys and values is contiguous.
        key: keys of the step itself.
        value: values of the step itself.
        key_pages: cached keys.
        value_pages: cached values; if they are the first numbers of the cached keys, so is
            ``value`` of ``key``.
        page_table: pages of each row's cached tokens.
        leading: see `BatchRow.visible`, as for the next.
        own: the position sees those of its row before ``leading``, and from ``own`` to itself.
        positions: the position of each token in its text, for ``oldest``.
        pieces: the work; see `PIECE_FIELDS`. Every query is in a tile.
        combine: see `COMBINE_FIELDS`.
        scaling: factor of the scores.
        block_m: queries of a tile times its `heads_of_tile`, and room for more.
        block_n: keys in a block.
        num_slots: room for partial results; 0 if each tile is one piece.
        oldest: the first position that each query sees; None for 0. No earlier cached key or value
            is read.
        softcap: largest size of a score; None for any.
        sinks: a further score of each head, which takes part in the softmax and has no value.
        key_scale: factor of the cached keys, for pages in 8-bit numbers.
        value_scale: factor of the cached values.

    Returns:
        [positions, heads, value_dim]; 0 for queries without a visible key.
    """
    del combine, block_m, num_slots  # a tile is computed as a whole
    output = query.new_zeros(*query.shape[:2], value.shape[-1])
    tiles = defaultdict[tuple[int, ...], list[tuple[int, int]]](list)
    for *tile, begin, stop, _ in pieces.tolist():
        tiles[tuple(tile)].append((begin, stop))
    page_size, num_kv_heads = key_pages.shape[1:3]
    for (row, first, end, start, num_cached), ranges in tiles.items():
        if first >= end:
            continue
        pages, tile = page_table[row, : -(-num_cached // page_size)], slice(first, end)
        unread = 0 if oldest is None else min(num_cached, int(oldest[tile].min()))
        keys, values = (
            torch.cat(
                [
                    fresh.new_zeros(unread, *fresh.shape[1:], dtype=torch.float32),
                    stored[pages].flatten(0, 1)[unread:num_cached].float() * scale,
                    fresh[start:end].float(),
                ]
            )
            for stored, fresh, scale in (
                (key_pages, key, key_scale),
                (value_pages, value, value_scale),
            )
        )
        visible = _visible(leading[tile], own[tile], first - start, num_cached)
        if oldest is not None:
            seen = torch.arange(num_cached, device=query.device)
            visible &= torch.cat([seen, positions[start:end]]) >= oldest[tile, None]
        visible &= _covered(ranges, num_cached, end - start, block_n).to(query.device)
        queries = query[tile].float().reshape(end - first, num_kv_heads, -1, query.shape[-1])
        scores = torch.einsum("qhgd,khd->qhgk", queries, keys) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
        weights = _softmax(scores, sinks)
        output[tile] = torch.einsum("qhgk,khd->qhgd", weights, values).flatten(1, 2).to(query.dtype)
    return output


def _visible(leading: Tensor, own: Tensor, first: int, num_cached: int) -> Tensor:
    """Return what each query of a tile sees: bool [queries, cached and own keys]."""
    offset = torch.arange(first, first + len(leading), device=leading.device)[:, None]
    key = torch.arange(first + len(leading), device=leading.device)
    visible = (key < leading[:, None]) | ((key >= own[:, None]) & (key <= offset))
    return torch.nn.functional.pad(visible, (num_cached, 0), value=True)


def _covered(ranges: list[tuple[int, int]], num_cached: int, num_own: int, block_n: int) -> Tensor:
    """Return which keys of a tile its pieces cover: bool [cached and own keys]."""
    num_blocks = -(-num_cached // block_n)
    cached, own = torch.arange(num_cached), torch.arange(num_own)
    block = torch.cat([cached // block_n, num_blocks + own // block_n])
    covered = torch.zeros(len(block), dtype=torch.bool)
    for begin, stop in ranges:
        covered |= (block >= begin) & (block < stop)
    return covered


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the weights of keys, 0 for all if a query sees none."""
    if sinks is not None:
        sink = sinks.float().view(1, *scores.shape[1:3], 1).expand(len(scores), -1, -1, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)
    if sinks is None:
        return weights.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)
    return weights[..., :-1]


def _shape(query: Tensor, _: Tensor, value: Tensor, *__: object, **___: object) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])


torch.library.define("marsray::paged_attention", SCHEMA)
torch.library.impl("marsray::paged_attention", "CPU", paged_attention_twin)
torch.library.register_fake("marsray::paged_attention", _shape)
