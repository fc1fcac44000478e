"""The acceptance rules of all modes, applied to a step's proposals on the device of the logits.

With x_d the token proposed at depth d, from 0 on, a row accepts n = 1 + k tokens, where k is the
length of the leading run of depths d = 1, 2, ... for which the rule of the row's mode holds
(arXiv 2604.07023, section 3.3):

- threshold: the confidence of x_d is at least τ;
- exact: the draft fed at depth d equals x_(d-1), the token that verifies it;
- threshold with a drafter: the rule of mode exact for the drafts; then the tokens proposed by the
  masks behind the right drafts follow, as long as their confidence is at least τ.

Depth 0 is the AR prediction and always accepted. If its confidence is NaN, because the logits hold
a NaN, nothing else of the row is.

τ is that of the span that the row begins in. If spans have a τ of their own, a run that is accepted
by confidence ends with the first marker, so no token is accepted by the τ of another span. A τ for
each depth would save a pass at each marker, of which an output has few, and would have to follow
the markers on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch
import torch.nn.functional as F
from torch import Tensor

from mars_platform.method.mode import Confidence
from mars_platform.method.rules import confidence_of, log_probabilities
from mars_serve.engine.execution.reads import Reads
from mars_serve.engine.outputs import TokenLogprob
from mars_serve.engine.request import Draft, Request
from mars_serve.engine.scheduled_row import ScheduledRow

# Logits handled at once on a CPU. Temporaries of the whole vocabulary beyond its cache take several
# times as long, mostly for the allocation of memory.
_MAX_PART = 2**17

ChooseTokens = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Function from logits, banned tokens being -inf, to int64 [n] reads and the int64 [n] tokens that
it chooses there."""


def exceeds_threshold(confidences: Tensor, thresholds: Tensor) -> Tensor:
    """Apply the rule of mode threshold to depths 1, 2, ...: bool [rows, depths - 1].

    Args:
        confidences: float32 [rows, depths].
        thresholds: float32 [rows].
    """
    return confidences[:, 1:] >= thresholds[:, None]


def equals_verified(tokens: Tensor, drafts: Tensor) -> Tensor:
    """Apply the rule of mode exact to depths 1, 2, ...: bool [rows, depths - 1].

    Args:
        tokens: int [rows, depths], tokens proposed at each depth.
        drafts: int64 [rows, depths - 1], drafts from depth 1 on.
    """
    return tokens[:, :-1] == drafts


def accept(
    logits: Tensor,
    reads: Reads,
    banned: Tensor,
    counts: Tensor | None = None,
    choose_tokens: ChooseTokens | None = None,
) -> Tensor:
    """Choose the token at each read, and count the accepted tokens of each row.

    The token is the likeliest one that may be emitted, unless ``choose_tokens`` replaces it; its
    confidence is taken from the raw logits.

    Args:
        logits: float [reads, vocabulary], any float type. Overwritten: banned tokens become -inf.
        reads: description of the logits.
        banned: int64 [banned], tokens that are never emitted.
        counts: int64 [rows], accepted tokens of each row, instead of those by the rules.
        choose_tokens: function that chooses the tokens of some reads otherwise.

    Returns:
        int32 [rows, 1 + 2 * max_depth], for `unpack`: the count and, for each depth, the token and
        the bits of its float32 confidence. Further rows hold the proposals of groups of masks, for
        `unpack_groups`.
    """
    num_rows, num_depths = len(reads.thresholds), reads.max_depth
    parts = [
        _propose(*part, reads, banned, choose_tokens)
        for part in _parts(logits, split=choose_tokens is None)
    ]
    proposals = parts[0] if len(parts) == 1 else torch.cat(parts)  # [reads, 2]
    table, row = proposals, reads.row
    if reads.direct is not None:
        table, row = table.index_select(0, reads.direct), row.index_select(0, reads.direct)
    if len(table) < num_rows * num_depths:
        # A depth that a row does not propose gets a confidence below any threshold.
        given, table = table, torch.full((num_rows, num_depths, 2), -1.0, device=logits.device)
        table = table.view(torch.int32)
        table[row, reads.depth] = given
    table = table.view(num_rows, num_depths, 2)
    if counts is None:
        counts = _num_accepted(table[:, :, 0], table[:, :, 1].view(torch.float32), reads)
    packed = torch.cat([counts.int()[:, None], table.flatten(1)], dim=1)
    if reads.groups is None:
        return packed
    groups = proposals.index_select(0, reads.groups).flatten()
    width = packed.shape[1]
    return torch.cat([packed, F.pad(groups, (0, -groups.numel() % width)).view(-1, width)])


def unpack(packed: Tensor, num_rows: int | None = None) -> list[tuple[list[int], list[float]]]:
    """Return the accepted tokens of each row and their confidences.

    Args:
        packed: what `accept` returned.
        num_rows: number of rows, if proposals of groups of masks follow them.
    """
    packed = packed[:num_rows].cpu()
    tokens = packed[:, 1::2].tolist()
    confidences = packed[:, 2::2].contiguous().view(torch.float32).tolist()
    return [
        (row_tokens[:count], row_confidences[:count])
        for count, row_tokens, row_confidences in zip(
            packed[:, 0].tolist(), tokens, confidences, strict=True
        )
    ]


def unpack_groups(packed: Tensor, num_rows: int, num_proposals: int) -> list[Draft]:
    """Return the proposals of groups of masks behind the rows of what `accept` returned."""
    flat = packed[num_rows:].cpu().flatten()[: 2 * num_proposals].view(-1, 2)
    confidences = flat[:, 1].contiguous().view(torch.float32).tolist()
    return [Draft(*pair) for pair in zip(flat[:, 0].tolist(), confidences, strict=True)]


def rejected_by_row(row: ScheduledRow, packed: Tensor, result: Accepted) -> list[tuple[int, float]]:
    """Return the proposals of a row that a step rejected, with their confidences.

    These are the drafts that were checked and found wrong, or else the proposals of masks past the
    accepted run.

    Args:
        row: a row that read logits.
        packed: int32 [1 + 2 * max_depth], the row of what `accept` returned.
        result: what was accepted of the row.
    """
    if row.request.checks_drafts:
        drafts = row.request.drafts[: row.num_drafts]
        return [(draft.token, draft.confidence) for draft in drafts[result.num_right :]]
    proposed = packed[1:].view(-1, 2)[len(result.tokens) : row.num_proposed]
    confidences = proposed[:, 1].contiguous().view(torch.float32).tolist()
    return list(zip(proposed[:, 0].tolist(), confidences, strict=True))


@dataclass(slots=True)
class Accepted:
    """One row's result of a step."""

    tokens: list[int]
    confidences: list[float]
    """Confidence of each token."""
    num_right: int = 0
    """Leading drafts of the row that were right."""
    next_drafts: list[Draft] = field(default_factory=list)
    """Drafts for the next step, behind the tokens."""
    num_masks_tried: int = 0
    """Proposals of the model's own masks to which a rule was applied."""
    num_masks_accepted: int = 0
    """Leading proposals among them that were accepted."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probability of each token, if the request wants them."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of further prompt tokens, if the request wants them."""
    rejected: list[tuple[int, float]] = field(default_factory=list)
    """Proposals behind the tokens that were rejected, if the request wants them."""


def accepted_by_row(
    row: ScheduledRow, tokens: list[int], confidences: list[float], groups: Sequence[Draft]
) -> Accepted:
    """Complete a row's result with the proposals of its groups of masks.

    Args:
        row: a row that read logits.
        tokens: tokens that `accept` gave the row.
        confidences: confidence of each of these tokens.
        groups: proposals of all the row's groups of masks, behind checked drafts.
    """
    return _within_span(row.request, _accepted_by_mode(row, tokens, confidences, groups))


def _accepted_by_mode(
    row: ScheduledRow, tokens: list[int], confidences: list[float], groups: Sequence[Draft]
) -> Accepted:
    request, num_right = row.request, len(tokens) - 1
    if not request.checks_drafts:
        return Accepted(
            tokens, confidences, num_masks_tried=row.num_masks, num_masks_accepted=num_right
        )
    begin = sum(row.masks[:num_right])
    behind = groups[begin : begin + row.masks[num_right]] if groups else []
    if request.accepts_by_confidence:
        run = list(takewhile(lambda draft: draft.confidence >= request.threshold, behind))
        return Accepted(
            tokens=[*tokens, *(draft.token for draft in run)],
            confidences=[*confidences, *(draft.confidence for draft in run)],
            num_right=num_right,
            num_masks_tried=len(behind),
            num_masks_accepted=len(run),
        )
    num_own = min(row.num_drafts, request.num_own_drafts)
    return Accepted(
        tokens,
        confidences,
        num_right=num_right,
        next_drafts=list(behind),
        num_masks_tried=num_own,
        num_masks_accepted=min(num_right, num_own),
    )


def _within_span(request: Request, result: Accepted) -> Accepted:
    """Drop what was accepted behind a marker by the τ of the span before it.

    A marker that was a right draft does not count as one: the next pass feeds it, to go on there.
    """
    spans = request.options.spans
    if spans is None or not request.accepts_by_confidence:
        return result
    span_of_each = spans.of_tokens(request.span, result.tokens)[:-1]
    length = len(list(takewhile(lambda span: span is request.span, span_of_each)))
    if length == len(result.tokens):
        return result
    return replace(
        result,
        tokens=result.tokens[:length],
        confidences=result.confidences[:length],
        num_right=min(result.num_right, length - 1),
    )


def _parts(logits: Tensor, *, split: bool) -> Iterable[tuple[Tensor, slice]]:
    """Split the reads into parts that a CPU's cache holds; other devices take all at once."""
    size = len(logits)
    if split and logits.device.type == "cpu" and logits.numel() > _MAX_PART:
        size = max(1, _MAX_PART // logits.shape[1])
    starts = range(0, len(logits), size)
    return [(logits[start : start + size], slice(start, start + size)) for start in starts]


def _propose(
    logits: Tensor, part: slice, reads: Reads, banned: Tensor, choose_tokens: ChooseTokens | None
) -> Tensor:
    """Return the token of each read and the bits of its confidence: int32 [part, 2]."""
    raw = logits if reads.temperatures is None else logits / reads.temperatures[part, None]
    log_probs = log_probabilities(raw)  # of all tokens, banned ones included
    tokens = logits.index_fill_(-1, banned, -torch.inf).max(-1).indices  # faster than argmax
    if choose_tokens is not None:
        tokens.index_copy_(0, *choose_tokens(logits))
    confidences = _confidences(log_probs, tokens, part, reads)
    return torch.stack([tokens.int(), confidences.view(torch.int32)], dim=1)


def _confidences(log_probs: Tensor, tokens: Tensor, part: slice, reads: Reads) -> Tensor:
    """Return the confidence of each token by its row's measure: float32 [part]."""
    first, *others = (measure for measure in Confidence if measure in reads.used_measures)
    confidences = confidence_of(log_probs, tokens, first)
    if others:
        measures = reads.measures[reads.row[part]]  # [part]
    for measure in others:
        uses_measure = measures == tuple(Confidence).index(measure)
        by_measure = confidence_of(log_probs, tokens, measure)
        confidences = torch.where(uses_measure, by_measure, confidences)
    return confidences


def _num_accepted(tokens: Tensor, confidences: Tensor, reads: Reads) -> Tensor:
    """Count the accepted tokens of each row by the rule of its mode: int64 [rows].

    Args:
        tokens: int32 [rows, max_depth].
        confidences: float32 [rows, max_depth], -1 at depths that a row does not propose.
        reads: description of the rows.
    """
    if reads.max_depth == 1:
        return torch.ones(len(tokens), dtype=torch.long, device=tokens.device)
    is_accepted = exceeds_threshold(confidences, reads.thresholds)  # [rows, max_depth - 1]
    if reads.drafts is not None:
        is_right = equals_verified(tokens, reads.drafts)
        is_accepted = torch.where(reads.drafts >= 0, is_right, is_accepted)
    is_sound = ~confidences[:, :1].isnan()
    return 1 + (is_accepted & is_sound).cumprod(dim=1).sum(dim=1)
