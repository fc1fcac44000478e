"""Which proposals of a step are accepted: one vectorised function on the device of the logits.

Rows may differ in window, threshold and confidence measure, and in whether the confidence decides
or whether a draft is what the model itself chooses (mode exact). Knows no model and of requests
only what a draft is; the rule is `mars_platform.method.rules`'s, here for ragged rows and with the
results packed into one tensor, so that a step copies to the host once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mars_platform.method.mode import Confidence
from mars_platform.method.rules import confidence_of, log_probabilities
from mars_serve.engine.request import Draft

# Logits handled at once on a CPU: whole-vocabulary temporaries beyond its cache cost several times
# as much, most of it for fresh memory.
_MAX_PART = 2**17


@dataclass(frozen=True)
class Reads:
    """Which logits a step reads: every depth of each row that reaches its cursor, in order, and
    among them what masks of rows in mode exact propose for the step after.
    """

    row: Tensor
    """int64 [reads], row of each read, counted from 0."""
    depth: Tensor
    """int64 [reads now], depth of each: 0 .. proposals of its row - 1, each once."""
    num_proposed: Tensor
    """int64 [rows], proposals of each row, at least 1; 1 where neither mask nor draft was fed."""
    thresholds: Tensor
    """float32 [rows], τ of each row, above 0."""
    measures: Tensor
    """int64 [rows], place of each row's measure in ``tuple(Confidence)``."""
    used: frozenset[Confidence]
    """The measures that rows use, known on the host: no other is computed."""
    max_depth: int
    """Most proposals of any row, known on the host."""
    drafts: Tensor | None = None
    """int64 [rows, max_depth - 1], the draft that stands at each depth above 0, -1 where there is
    none; None where no row has any."""
    now: Tensor | None = None
    """int64 [reads now], which reads are of this step; None: all."""
    coming: Tensor | None = None
    """int64 [reads coming], which are for the step after; None: none."""
    temperatures: Tensor | None = None
    """float32 [reads], what logits are divided by where a confidence is taken; None: 1."""


ChooseTokens = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Given logits whose banned tokens are -inf: int64 [n] of the reads, and the tokens they give."""


def accept(
    logits: Tensor,
    reads: Reads,
    banned: Tensor,
    counts: Tensor | None = None,
    choose: ChooseTokens | None = None,
) -> Tensor:
    """ChooseTokens the token at each read and count how many of each row are accepted.

    The token is the likeliest one that may be emitted, unless ``choose`` says otherwise; its
    confidence is over the raw logits. A draft is accepted where the proposal before it is that very
    token; elsewhere the confidence decides. A row whose depth 0 has no number for its confidence
    (the logits held a NaN) counts 1 token, and that NaN is among the confidences; other rows do not
    notice.

    Args:
        logits: float [reads, vocabulary], any float type. Overwritten: banned tokens become -inf.
        reads: what the logits are.
        banned: int64 [banned], tokens that are never emitted.
        counts: int64 [rows], 1 .. ``num_proposed``; replaces the acceptance rule where given.
        choose: replaces the likeliest tokens of some reads.

    Returns:
        int32 [rows, 1 + 2 * max_depth], for :func:`unpack`: the count, and at each depth the token
        and the bits of its float32 confidence. What is for the step after follows as further rows,
        for :func:`unpack_coming`.
    """
    num_rows, depths = reads.num_proposed.shape[0], reads.max_depth
    parts = [
        _propose(*part, reads, banned, choose) for part in _parts(logits, split=choose is None)
    ]
    proposed = parts[0] if len(parts) == 1 else torch.cat(parts)  # [reads, 2]
    coming = None if reads.coming is None else proposed.index_select(0, reads.coming)
    table, row = proposed, reads.row
    if reads.now is not None:
        table, row = proposed.index_select(0, reads.now), row.index_select(0, reads.now)
    if len(table) < num_rows * depths:
        # a depth that a row does not propose is surely below its threshold
        given, table = table, torch.full((num_rows, depths, 2), -1.0, device=logits.device)
        table = table.view(torch.int32)
        table[row, reads.depth] = given
    table = table.view(num_rows, depths, 2)
    if counts is None:
        counts = _num_accepted(table, reads)
    packed = torch.cat([counts.int()[:, None], table.flatten(1)], dim=1)
    if coming is None:
        return packed
    width = packed.shape[1]
    return torch.cat(
        [packed, F.pad(coming.flatten(), (0, -coming.numel() % width)).view(-1, width)]
    )


def unpack(packed: Tensor, num_rows: int | None = None) -> list[tuple[list[int], list[float]]]:
    """Accepted tokens of each row and their confidences, from what :func:`accept` returned.

    Args:
        packed: that.
        num_rows: where rows for the step after follow.
    """
    packed = packed[:num_rows].cpu()
    rows = packed[:, 1::2].tolist()
    confidences = packed[:, 2::2].contiguous().view(torch.float32).tolist()
    return [
        (tokens[:count], sure[:count])
        for count, tokens, sure in zip(packed[:, 0].tolist(), rows, confidences, strict=True)
    ]


def unpack_coming(packed: Tensor, num_rows: int, num_coming: int) -> list[Draft]:
    """What :func:`accept` returned behind its ``num_rows`` rows, in order of the reads."""
    flat = packed[num_rows:].cpu().flatten()[: 2 * num_coming].view(-1, 2)
    sure = flat[:, 1].contiguous().view(torch.float32).tolist()
    return [Draft(*pair) for pair in zip(flat[:, 0].tolist(), sure, strict=True)]


def _parts(logits: Tensor, *, split: bool) -> Iterable[tuple[Tensor, slice]]:
    """The reads in parts that a CPU's cache holds; other devices take all at once."""
    size = len(logits)
    if split and logits.device.type == "cpu" and logits.numel() > _MAX_PART:
        size = max(1, _MAX_PART // logits.shape[1])
    places = range(0, len(logits), size)
    return [(logits[start : start + size], slice(start, start + size)) for start in places]


def _propose(
    logits: Tensor, part: slice, reads: Reads, banned: Tensor, choose: ChooseTokens | None
) -> Tensor:
    """Token of each read and the bits of its confidence: int32 [part, 2]."""
    raw = logits if reads.temperatures is None else logits / reads.temperatures[part, None]
    log_probs = log_probabilities(raw)  # before the banned tokens go
    tokens = logits.index_fill_(-1, banned, -torch.inf).max(-1).indices  # faster than argmax
    if choose is not None:
        tokens.index_copy_(0, *choose(logits))
    sure = _confidences(log_probs, tokens, part, reads)
    return torch.stack([tokens.int(), sure.view(torch.int32)], dim=1)


def _confidences(log_probs: Tensor, tokens: Tensor, part: slice, reads: Reads) -> Tensor:
    """float32 [part], each by the measure of its row."""
    first, *others = (measure for measure in Confidence if measure in reads.used)
    sure = confidence_of(log_probs, tokens, first)
    if others:
        measures = reads.measures[reads.row[part]]  # [part]
    for measure in others:
        place = tuple(Confidence).index(measure)
        sure = torch.where(measures == place, confidence_of(log_probs, tokens, measure), sure)
    return sure


def _num_accepted(table: Tensor, reads: Reads) -> Tensor:
    """`method.num_accepted` where what is not proposed has a confidence of -1: int64 [rows]."""
    sure = table[:, :, 1].view(torch.float32)
    if sure.shape[1] == 1:
        return torch.ones(len(sure), dtype=torch.long, device=sure.device)
    limits = (reads.thresholds + 0 * sure[:, 0])[
        :, None
    ]  # NaN, which nothing reaches, if depth 0 is
    passes = sure[:, 1:] >= limits  # [rows, max_depth - 1]
    if reads.drafts is not None:
        is_right = (table[:, :-1, 0] == reads.drafts) & (limits == limits)
        passes = torch.where(reads.drafts >= 0, is_right, passes)
    return passes.cumprod(dim=1).sum(dim=1) + 1
