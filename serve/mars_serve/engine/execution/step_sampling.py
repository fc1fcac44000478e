"""Prepares the choice of a step's tokens by each request's sampling parameters and grammar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor

from mars_platform.method.mode import Mode
from mars_platform.method.rules import log_probabilities
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.engine.execution.reads import first_reads
from mars_serve.engine.outputs import TokenLogprob
from mars_serve.engine.request import Request
from mars_serve.engine.sampling.grammar import GrammarError
from mars_serve.engine.sampling.grammar_budget import StepGrammars, cost
from mars_serve.engine.sampling.sampler import SampledRow, TokenHistory, log_probs_of
from mars_serve.engine.scheduled_row import ScheduledRow


def sampled_rows(
    rows: Sequence[ScheduledRow], ends: frozenset[int], grammars: StepGrammars
) -> list[SampledRow]:
    """Return the rows whose tokens are not simply the likeliest ones, cheap grammars first.

    Args:
        rows: rows that read logits, in order.
        ends: the model's end tokens.
        grammars: the grammars of the step.
    """
    if all(row.request.options.is_plain for row in rows):
        return []
    chosen = [
        (row, start)
        for row, start in zip(rows, first_reads(rows), strict=False)
        if not row.request.options.is_plain
    ]
    chosen.sort(key=lambda pair: cost(pair[0].request.matcher))
    return [part for row, start in chosen for part in _sampled_parts(row, start, ends, grammars)]


def _sampled_parts(
    row: ScheduledRow, start: int, ends: frozenset[int], grammars: StepGrammars
) -> Iterator[SampledRow]:
    """Split a row's reads into its direct reads and those of each group of masks.

    Groups are sampled without the grammar: drafts that it forbids fail their check.
    """
    request, sampling = row.request, row.request.options.sampling
    if sampling.needs_history and request.history is None:
        request.history = TokenHistory.of(request.tokens, request.num_prompt)
    length, num_output = len(request.tokens), request.num_output
    end_tokens = ends | request.options.stop_ids

    def part(begin: int, count: int, ahead: int, *, is_group: bool) -> SampledRow:
        matcher = None if is_group else request.matcher
        return SampledRow(
            sampling=sampling,
            reads=list(range(begin, begin + count)),
            position=length + ahead,
            num_output=num_output + ahead,
            end_tokens=end_tokens,
            history=request.history,
            allow=None if matcher is None else partial(grammars.allowed, matcher),
        )

    yield part(start, row.num_proposed, 0, is_group=False)
    begin = start + row.num_proposed
    for outcome, count in enumerate(row.masks if row.num_group_proposals else ()):
        if count:
            yield part(begin, count, outcome + 1, is_group=True)
        begin += count


def cut(
    request: Request, accepted: list[int], ends: frozenset[int]
) -> tuple[list[int], FinishReason | None]:
    """Return the accepted tokens up to the first that ends the request, and why it ends.

    Args:
        request: the request that the tokens are for.
        accepted: the tokens.
        ends: the model's end tokens.
    """
    if request.options.stop_ids:
        ends |= request.options.stop_ids
    tokens = accepted[: request.num_left]
    num_before = len(list(takewhile(lambda token: token not in ends, tokens)))
    if num_before < len(tokens):
        return tokens[: num_before + 1], FinishReason.STOP
    return tokens, FinishReason.LENGTH if len(tokens) == request.num_left else None


def commit(request: Request, tokens: list[int]) -> None:
    """Move a request's history and grammar past newly committed tokens.

    Raises:
        GrammarError: the grammar has reached a limit, or does not match the tokens, because it
            allows no token that may be emitted.
    """
    if request.history is not None:
        request.history.extend(tokens)
    if request.matcher is not None and request.matcher.advance(tokens) < len(tokens):
        raise GrammarError("it allows no token of this model")


@dataclass(frozen=True)
class Reports:
    """Log-probabilities of a step's tokens for the requests that want them reported."""

    by_request: dict[str, Tensor]
    """float32 [proposals, vocabulary] by request id."""

    @classmethod
    def of(cls, logits: Tensor, rows: Sequence[ScheduledRow]) -> Reports:
        """Take the log-probabilities from raw logits, float [reads, vocabulary]."""
        if all(row.request.options.num_logprobs is None for row in rows):
            return cls({})
        return cls(
            {
                row.request.id: log_probabilities(logits[start : start + row.num_proposed])
                for row, start in zip(rows, first_reads(rows), strict=False)
                if row.request.options.num_logprobs is not None
            }
        )

    def report(self, request: Request, tokens: list[int]) -> list[TokenLogprob]:
        """Return the log-probabilities of a request's tokens; none if it wants none."""
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
