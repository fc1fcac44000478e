"""The acceptance rules of all modes, applied on the host to the proposals of each row.

With x_d the token proposed at depth d, from 0 on, a row accepts n = 1 + k tokens, where k is the
length of the leading run of depths d = 1, 2, ... for which the rule of the row's mode holds
(arXiv 2604.07023, section 3.3):

- threshold: the confidence of x_d is at least τ;
- exact: the draft fed at depth d equals x_(d-1), the token that verifies it.

Depth 0 is the AR prediction and always accepted. If its confidence is NaN, because the logits hold
a NaN, nothing else of the row is.

τ is that of the span that the row begins in. If spans have a τ of their own, a run that is accepted
by confidence ends with the first marker, so no token is accepted by the τ of another span. A τ for
each depth would save a pass at each marker, of which an output has few.
"""

from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from mars_serve.engine.outputs import TokenLogprob
from mars_serve.engine.request import Draft
from mars_serve.engine.scheduled_row import ScheduledRow


@dataclass(slots=True)
class Accepted:
    """One row's result of a step."""

    tokens: list[int]
    confidences: list[float]
    num_right: int = 0
    """Leading drafts of the row that were right."""
    next_drafts: list[Draft] = field(default_factory=list)
    """Drafts for the next step, behind the tokens."""
    num_masks_tried: int = 0
    """Proposals of the model's own masks of which the step tells whether they were right."""
    num_masks_accepted: int = 0
    """Leading proposals among them that were accepted."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    rejected: list[tuple[int, float]] = field(default_factory=list)
    """Proposals behind the tokens that were rejected, if the request wants them."""


def accept(
    row: ScheduledRow,
    tokens: list[int],
    confidences: list[float],
    count: int,
    *,
    is_drawn: bool = False,
) -> Accepted:
    """Accept tokens of a row that read logits, from the proposals of all its reads.

    The first ``count`` direct reads, as `num_accepted` returns it, are accepted. ``is_drawn`` says
    that the number was drawn, so that tokens do not tell which drafts are right.
    """
    if row.request.plan.checks_drafts:
        result = _by_check(row, tokens, confidences, count)
        if not is_drawn and confidences[0] == confidences[0]:
            _try_next_draft(row, tokens, result)
    else:
        result = _by_confidence(row, tokens, confidences, count)
    if row.request.options.reports_rejected:
        result.rejected = _rejected(row, tokens, confidences, result)
    return result


def num_accepted(row: ScheduledRow, tokens: list[int], confidences: list[float]) -> int:
    """Count the direct reads of a row that are accepted by the rule of its mode."""
    if confidences[0] != confidences[0]:
        return 1
    plan = row.request.plan
    if not plan.checks_drafts:
        return 1 + num_sure(confidences[1 : row.num_proposed], plan.threshold)
    drafts = [draft.token for draft in row.request.drafts[: row.num_drafts]]
    right = zip(drafts, tokens, strict=False)
    return 1 + len(list(takewhile(lambda pair: pair[0] == pair[1], right)))


def num_sure(confidences: list[float], threshold: float) -> int:
    """Count the leading ``confidences`` that reach τ, all compared as float32 numbers."""
    least = float(np.float32(threshold))
    return len(list(takewhile(least.__le__, confidences)))


def _rejected(
    row: ScheduledRow, tokens: list[int], confidences: list[float], result: Accepted
) -> list[tuple[int, float]]:
    """Return the proposals of a row that a step rejected, with their confidences.

    These are the drafts that were checked and found wrong, or else the proposals of masks past the
    accepted run.
    """
    if row.request.plan.checks_drafts:
        drafts = row.request.drafts[: row.num_drafts]
        return [(draft.token, draft.confidence) for draft in drafts[result.num_right :]]
    place = slice(len(result.tokens), row.num_proposed)
    return list(zip(tokens[place], confidences[place], strict=True))


def _by_confidence(
    row: ScheduledRow, tokens: list[int], confidences: list[float], count: int
) -> Accepted:
    """Accept direct reads, up to a marker: behind it, another span has a τ of its own."""
    request, num_kept = row.request, count
    spans = request.options.spans
    if spans is not None:
        span_of_each = spans.of_tokens(request.span, tokens[:count])[:-1]
        num_kept = len(list(takewhile(lambda span: span is request.span, span_of_each)))
    return Accepted(
        tokens[:num_kept],
        confidences[:num_kept],
        num_masks_tried=row.num_masks,
        num_masks_accepted=count - 1,  # what a marker cuts off was not rejected
    )


def _by_check(
    row: ScheduledRow, tokens: list[int], confidences: list[float], count: int
) -> Accepted:
    """Accept direct reads, and take the next drafts from the masks of the outcome they make."""
    num_right = count - 1
    behind = row.group(num_right)
    num_own = row.request.num_own_drafts
    return Accepted(
        tokens[:count],
        confidences[:count],
        num_right=num_right,
        next_drafts=[Draft(tokens[read], confidences[read]) for read in behind],
        num_masks_tried=min(row.num_drafts, num_own),
        num_masks_accepted=min(num_right, num_own),
    )


def _try_next_draft(row: ScheduledRow, tokens: list[int], result: Accepted) -> None:
    """Compare the first draft that was not worth a position with the token in its place.

    Without it, only drafts that seem likely would be counted.
    """
    if result.num_right == row.num_drafts < row.request.num_own_drafts:
        next_draft = row.request.drafts[result.num_right]
        result.num_masks_tried += 1
        result.num_masks_accepted += next_draft.token == tokens[result.num_right]
