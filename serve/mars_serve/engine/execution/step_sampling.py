"""What a step's requests ask of the choice of their tokens: parameters, grammar, reported numbers.

Lays out by request what `sampling` works through by read. Knows no model and no attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mars_platform.method.mode import Mode
from mars_platform.method.rules import log_probabilities
from mars_serve.engine.outputs import TokenLogprob
from mars_serve.engine.request import Request
from mars_serve.engine.sampling.grammar import lookahead
from mars_serve.engine.sampling.sampler import SampledRow, TokenHistory, log_probs_of
from mars_serve.engine.scheduled_row import ScheduledRow


def first_reads(works: Sequence[ScheduledRow]) -> list[int]:
    """Of works that read logits, laid side by side, the first read of each, and their end."""
    starts = [0]
    for work in works:
        starts.append(starts[-1] + work.num_proposed + work.num_coming)
    return starts


def sampled_rows(works: Sequence[ScheduledRow], ends: frozenset[int]) -> list[SampledRow]:
    """What is to be chosen otherwise than as the likeliest token.

    Args:
        works: those that read logits, in order.
        ends: the model's end tokens.
    """
    if all(work.request.options.is_plain for work in works):
        return []
    return [
        row
        for work, start in zip(works, first_reads(works), strict=False)
        if not work.request.options.is_plain
        for row in _rows(work, start, ends)
    ]


def _rows(work: ScheduledRow, start: int, ends: frozenset[int]) -> Iterator[SampledRow]:
    """The row's own proposals and, in mode exact, what each group of masks proposes behind them.

    Drafts that a grammar forbids are refused when they are checked.
    """
    request, sampling = work.request, work.request.options.sampling
    if sampling.needs_history and request.history is None:
        request.history = TokenHistory.of(request.tokens, request.num_prompt)
    length, num_output = len(request.tokens), request.num_output
    end_tokens = ends | request.options.stop_ids

    def row(begin: int, count: int, ahead: int, *, checked: bool) -> SampledRow:
        return SampledRow(
            sampling,
            list(range(begin, begin + count)),
            length + ahead,
            num_output + ahead,
            end_tokens,
            request.history,
            lookahead(request.matcher) if checked and request.matcher is not None else None,
        )

    yield row(start, work.num_proposed, 0, checked=True)
    begin = start + work.num_proposed
    for outcome, count in enumerate(work.masks if work.num_coming else ()):
        if count:
            yield row(begin, count, outcome + 1, checked=False)
        begin += count


def commit(request: Request, tokens: list[int]) -> bool:
    """Move what the choice depends on past newly committed tokens.

    Returns:
        False where they are not in the request's grammar: it allows nothing that may be emitted.
    """
    if request.history is not None:
        request.history.extend(tokens)
    return request.matcher is None or request.matcher.advance(tokens) == len(tokens)


def temperatures(
    works: Sequence[ScheduledRow], by_depth: Sequence[float] | None
) -> list[float] | None:
    """What each read's logits are divided by where a confidence is taken; None: all by 1.

    Args:
        works: those that read logits, in order.
        by_depth: of calibration, from depth 0; None where the model has none.
    """
    if by_depth is None or not any(_is_calibrated(work) for work in works):
        return None
    found: list[float] = []
    for work in works:
        if not _is_calibrated(work):
            found += [1.0] * (work.num_proposed + work.num_coming)
        elif work.request.checks_drafts:
            found += [1.0] * work.num_proposed  # of the model's own choices, at depth 0
            found += [by_depth[depth + 1] for count in work.masks for depth in range(count)]
        else:
            found += by_depth[: work.num_proposed]
    return found


def _is_calibrated(work: ScheduledRow) -> bool:
    request = work.request
    return request.options.calibrated or request.mode is Mode.EXACT


@dataclass(frozen=True)
class Reports:
    """Log-probabilities that requests want reported with their tokens."""

    by_request: dict[str, Tensor]
    """float32 [proposals, vocabulary] of each, by request id."""

    @classmethod
    def of(cls, logits: Tensor, works: Sequence[ScheduledRow]) -> Reports:
        """Taken from raw logits, float [reads, vocabulary]."""
        if all(work.request.options.num_logprobs is None for work in works):
            return cls({})
        return cls(
            {
                work.request.id: log_probabilities(logits[start : start + work.num_proposed])
                for work, start in zip(works, first_reads(works), strict=False)
                if work.request.options.num_logprobs is not None
            }
        )

    def report(self, request: Request, tokens: list[int]) -> list[TokenLogprob]:
        """Of the tokens that a pass gave a request; nothing where it does not ask."""
        found = self.by_request.get(request.id)
        if found is None:
            return []
        num_top = request.options.num_logprobs or 0
        chosen = torch.tensor(tokens, device=found.device)
        own, top, values = log_probs_of(found[: len(tokens)], chosen, num_top)
        from_mask = request.mode is Mode.THRESHOLD
        lines = zip(own.tolist(), top.tolist(), values.tolist(), strict=True)
        return [
            TokenLogprob(logprob, list(zip(ids, numbers, strict=True)), from_mask and depth > 0)
            for depth, (logprob, ids, numbers) in enumerate(lines)
        ]
