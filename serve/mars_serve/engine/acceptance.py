"""Which proposals of a step are accepted: one vectorised function on the device of the logits.

Rows may differ in window, threshold and confidence measure. Knows no request and no model; the
rule is `mars_platform.method`'s, here for ragged rows and with the results packed into one tensor,
so that a step copies to the host once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mars_platform.method import confidence_of, log_probabilities
from mars_platform.mode import Confidence

# Logits handled at once on a CPU: whole-vocabulary temporaries beyond its cache cost several times
# as much, most of it for fresh memory.
_MAX_PART = 2**17


@dataclass(frozen=True)
class Reads:
    """Which logits a step reads: every depth of each row that reaches its cursor, in order."""

    row: Tensor
    """int64 [reads], row of each read, counted from 0."""
    depth: Tensor
    """int64 [reads], depth of each read: 0 .. proposals of its row - 1, each once."""
    num_proposed: Tensor
    """int64 [rows], proposals of each row, at least 1; 1 where no mask was fed."""
    thresholds: Tensor
    """float32 [rows], τ of each row, above 0."""
    measures: Tensor
    """int64 [rows], place of each row's measure in ``tuple(Confidence)``."""
    used: frozenset[Confidence]
    """The measures that rows use, known on the host: no other is computed."""
    max_depth: int
    """Most proposals of any row, known on the host."""


def accept(logits: Tensor, reads: Reads, banned: Tensor, counts: Tensor | None = None) -> Tensor:
    """Choose the token at each depth and count how many of each row are accepted.

    The token is the likeliest one that may be emitted; its confidence is over the raw logits. A row
    whose depth 0 has no number for its confidence (the logits held a NaN) counts 1 token, and that
    NaN is among the confidences; other rows do not notice.

    Args:
        logits: float [reads, vocabulary], any float type. Overwritten: banned tokens become -inf.
        reads: what the logits are.
        banned: int64 [banned], tokens that are never emitted.
        counts: int64 [rows], 1 .. ``num_proposed``; replaces the acceptance rule where given.

    Returns:
        int32 [rows, 1 + 2 * max_depth], for :func:`unpack`: the count, and at each depth the token
        and the bits of its float32 confidence.
    """
    num_rows, depths = reads.num_proposed.shape[0], reads.max_depth
    parts = [_propose(*part, reads, banned) for part in _parts(logits, reads.row)]
    table = parts[0] if len(parts) == 1 else torch.cat(parts)
    if len(table) < num_rows * depths:
        # a depth that a row does not propose is surely below its threshold
        proposed, table = table, torch.full((num_rows, depths, 2), -1.0, device=logits.device)
        table = table.view(torch.int32)
        table[reads.row, reads.depth] = proposed
    table = table.view(num_rows, depths, 2)
    if counts is None:
        counts = _num_accepted(table[:, :, 1].view(torch.float32), reads.thresholds)
    return torch.cat([counts.int()[:, None], table.flatten(1)], dim=1)


def unpack(packed: Tensor) -> list[tuple[list[int], list[float]]]:
    """Accepted tokens of each row and their confidences, from what :func:`accept` returned."""
    packed = packed.cpu()
    rows = packed[:, 1::2].tolist()
    confidences = packed[:, 2::2].view(torch.float32).tolist()
    return [
        (tokens[:count], sure[:count])
        for count, tokens, sure in zip(packed[:, 0].tolist(), rows, confidences, strict=True)
    ]


def _parts(logits: Tensor, row: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """The reads in parts that a CPU's cache holds; other devices take all at once."""
    if logits.device.type != "cpu" or logits.numel() <= _MAX_PART:
        return [(logits, row)]
    size = max(1, _MAX_PART // logits.shape[1])
    return zip(torch.split(logits, size), torch.split(row, size), strict=True)


def _propose(logits: Tensor, row: Tensor, reads: Reads, banned: Tensor) -> Tensor:
    """Token of each read and the bits of its confidence: int32 [part, 2]."""
    log_probs = log_probabilities(logits)  # before the banned tokens go
    tokens = logits.index_fill_(-1, banned, -torch.inf).max(-1).indices  # faster than argmax
    sure = _confidences(log_probs, tokens, row, reads)
    return torch.stack([tokens.int(), sure.view(torch.int32)], dim=1)


def _confidences(log_probs: Tensor, tokens: Tensor, row: Tensor, reads: Reads) -> Tensor:
    """float32 [part], each by the measure of its row."""
    first, *others = (measure for measure in Confidence if measure in reads.used)
    sure = confidence_of(log_probs, tokens, first)
    if others:
        measures = reads.measures[row]  # [part]
    for measure in others:
        place = tuple(Confidence).index(measure)
        sure = torch.where(measures == place, confidence_of(log_probs, tokens, measure), sure)
    return sure


def _num_accepted(sure: Tensor, thresholds: Tensor) -> Tensor:
    """`method.num_accepted` where what is not proposed has a confidence of -1: int64 [rows]."""
    if sure.shape[1] == 1:
        return torch.ones(len(sure), dtype=torch.long, device=sure.device)
    limits = (thresholds + 0 * sure[:, 0]).unsqueeze(1)  # NaN, that nothing reaches, if depth 0 is
    passes = sure[:, 1:] >= limits  # [rows, max_depth - 1]
    return passes.cumprod(dim=1).sum(dim=1) + 1
