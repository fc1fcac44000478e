"""Prepares the choice of a step's tokens by each request's sampling parameters and grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor

from mars_platform.method.rules import log_probabilities
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.engine.device.transfer import HostCopy
from mars_serve.engine.execution.proposals import first_reads
from mars_serve.engine.outputs import TokenLogprob
from mars_serve.engine.request import Request
from mars_serve.engine.sampling.grammar import GrammarError
from mars_serve.engine.sampling.grammar_budget import StepGrammars, cost
from mars_serve.engine.sampling.sampler import (
    Behind,
    SampledRow,
    TokenHistory,
    bias_of,
    log_probs_of,
)
from mars_serve.engine.sampling.thinking_rules import ThinkingRules
from mars_serve.engine.sampling.token_rules import NoTokenLeft, TokenRules
from mars_serve.engine.scheduled_row import ScheduledRow

REFUSALS = (GrammarError, NoTokenLeft)
"""Errors of what a request asks for, which show only while its output is written."""


def sampled_rows(
    rows: Sequence[ScheduledRow], grammars: StepGrammars, *, has_head: bool, waits: bool
) -> list[SampledRow]:
    """Return the rows whose tokens are not simply the likeliest ones, cheap grammars first.

    ``rows`` are those that read logits, in order. ``has_head`` says that a draft head acts at the
    model's own masks. If choosing ``waits`` for the tokens anyway, since the host chooses them,
    only the groups of masks of outcomes that come about are sampled.
    """
    chosen = [
        (row, start)
        for row, start in zip(rows, first_reads(rows), strict=False)
        if not row.request.options.is_plain or (has_head and row.has_own_masks)
    ]
    for row, _ in chosen:
        row.request.sampling_s = 0.0
        row.request.num_choices = 0 if row.request.options.is_plain else row.num_reads
    chosen.sort(key=lambda pair: cost(pair[0].request.matcher))
    how = {"has_head": has_head, "waits": waits}
    return [part for row, start in chosen for part in _sampled_parts(row, start, grammars, **how)]


def prepare(request: Request, vocabulary: int, ends: frozenset[int]) -> None:
    """Make what a request's choices need, with the model's end tokens; any thread may call this."""
    sampling, options = request.options.sampling, request.options
    request.end_ids = options.stop_ids if options.ignore_eos else ends | options.stop_ids
    if options.thinking is not None and request.thinking is None:
        has_grammar = options.grammar is not None
        request.thinking = ThinkingRules(
            options.thinking, vocabulary, ends, has_grammar=has_grammar
        )
    if sampling.needs_history and request.history is None:
        request.history = TokenHistory.of(request.tokens, request.num_prompt)
    if sampling.limits_tokens and request.rules is None:
        request.rules = TokenRules(sampling, vocabulary)
    if sampling.logit_bias and request.bias is None:
        request.bias = bias_of(sampling)
    if sampling.min_tokens and request.ends is None:
        early = ends | request.options.stop_ids
        if options.thinking is not None and options.thinking.budget is not None:
            early -= {options.thinking.end}  # the budget asks for it, though it may be a stop token
        request.ends = torch.tensor(sorted(early), dtype=torch.long)


def _sampled_parts(
    row: ScheduledRow, start: int, grammars: StepGrammars, *, has_head: bool, waits: bool
) -> Iterator[SampledRow]:
    """Split a row's reads into its direct reads and those of each group of masks.

    The group of the outcome that comes about goes on where the direct reads end; the others are of
    no use. Where neither a grammar nor a draft head needs the tokens there and the host would have
    to wait for them, all groups are sampled together, without the tokens before them that bad words
    may begin with: drafts that are forbidden fail their check.
    """
    request, sampling, thinking = row.request, row.request.options.sampling, row.request.thinking
    length, num_output = len(request.tokens), request.num_output
    is_delayed = thinking is not None and thinking.delays_grammar
    has_grammar = request.matcher is not None and not is_delayed
    may_run_out = thinking is not None and thinking.may_run_out(row.num_proposed)
    has_head = has_head and row.has_own_masks

    def part(
        begin: int, count: int, ahead: int, behind: Behind | None = None, before: int = -1
    ) -> SampledRow:
        is_alone = ahead > 0 and behind is None
        is_headed = has_head and (behind is not None or not request.plan.checks_drafts)
        return SampledRow(
            sampling=sampling,
            reads=list(range(begin, begin + count)),
            position=length + ahead,
            num_output=num_output + ahead,
            end_tokens=request.ends,
            history=request.history,
            bias=request.bias,
            allow=_allow(request, None if is_alone else grammars, has_grammar=has_grammar),
            allow_follows=has_grammar or may_run_out or sampling.follows_output,
            has_grammar=has_grammar,
            charge=float if request.options.is_plain else request.charge,
            behind=behind,
            previous=[before, *range(begin, begin + count - 1)] if is_headed else (),
        )

    checked = part(start, row.num_proposed, 0)
    yield checked
    drafts = [draft.token for draft in request.drafts[: row.num_drafts]]
    begin = start + row.num_proposed
    waits = waits or has_head or has_grammar
    for outcome, count in enumerate(row.masks if row.num_group_proposals else ()):
        if count:
            behind = Behind(checked, drafts, outcome) if waits else None
            yield part(begin, count, outcome + 1, behind, start + outcome)
        begin += count


def _allow(
    request: Request, grammars: StepGrammars | None, *, has_grammar: bool
) -> Callable[[list[int]], Tensor | None] | None:
    """Return `SampledRow.allow` of a row, or of a group of masks that stands alone, without
    ``grammars``.
    """
    by_grammar: Callable[[list[int]], Tensor | None] | None = None
    if grammars is not None and has_grammar and request.matcher is not None:
        by_grammar = partial(grammars.allowed, request.matcher)
    if grammars is not None and request.thinking is not None:
        by_grammar = partial(request.thinking.allowed_after, by_grammar=by_grammar)
    rules = request.rules
    if rules is None:
        return by_grammar
    before = [] if grammars is None else _end_of_output(request, rules)

    def allow(chosen: list[int]) -> Tensor:
        allowed = rules.allowed_after([*before, *chosen])
        matching = None if by_grammar is None else by_grammar(chosen)
        return allowed if matching is None else allowed & matching

    return allow


def _end_of_output(request: Request, rules: TokenRules) -> list[int]:
    """Return the last committed tokens of an output, as many as its rules look at."""
    tokens = request.tokens
    return tokens[max(request.num_prompt, len(tokens) - rules.num_before) :]


def cut(request: Request, accepted: list[int]) -> tuple[list[int], FinishReason | None]:
    """Return the accepted tokens up to the first that ends the request, and why it ends."""
    num_left, ends = request.num_left, request.end_ids
    tokens = accepted[:num_left]
    if not ends.isdisjoint(tokens):
        num_before = len(list(takewhile(lambda token: token not in ends, tokens)))
        return tokens[: num_before + 1], FinishReason.STOP
    return tokens, FinishReason.LENGTH if len(tokens) == num_left else None


def commit(request: Request, tokens: list[int]) -> int:
    """Move a request's history and grammar past newly accepted tokens, as far as they are allowed.

    A token that is not allowed was chosen because none is. What stands before it counts, as if each
    token had come in a step of its own.

    Returns:
        The number of leading tokens that are allowed, at least 1.

    Raises:
        GrammarError: the grammar has reached a limit, or allows no token that may be emitted.
        PutOff: the grammar has no parser yet; nothing has changed.
        NoTokenLeft: rules allow no token.
    """
    rules, count, num_before = request.rules, len(tokens), 0
    if rules is not None:
        count = rules.num_allowed(_end_of_output(request, rules), tokens)
    if request.thinking is not None:
        count, num_before = request.thinking.num_allowed(tokens[:count])
    if count == 0 and tokens:
        raise NoTokenLeft
    if request.matcher is not None and num_before < count:
        count = num_before + request.matcher.advance(tokens[num_before:count])
        if count == 0:  # rules may forbid all that the grammar allows
            raise GrammarError("it allows no token of this model") if rules is None else NoTokenLeft
    if request.thinking is not None:
        request.thinking.extend(tokens[:count])
    if request.history is not None:
        request.history.extend(tokens[:count])
    return count


def refusal_of(request: Request, error: Exception) -> str:
    """Return the message, with the field at fault, for one of `REFUSALS`."""
    if isinstance(error, GrammarError):
        return f"grammar: it failed while the output was written ({error}); make it simpler"
    thinking = request.options.thinking
    if thinking is not None and thinking.budget is not None:
        reason = "allowed_token_ids or bad_words forbid the token that ends thinking, or all that"
        return f"thinking_token_budget: {reason} may follow; leave that field or this one out"
    if request.options.sampling.allowed_ids is not None:
        return "allowed_token_ids: none of them may follow the output so far; allow more tokens"
    return "bad_words: they forbid all that may follow the output so far; leave some out"


@dataclass(frozen=True)
class Reports:
    """Log-probabilities of a step's tokens for the requests that want them reported."""

    by_request: dict[str, HostCopy]
    """float64 [proposals, 1 + 2 * tokens] by request id: the log-probability of the proposed token,
    the likeliest tokens, and their log-probabilities."""

    @classmethod
    def of(
        cls,
        log_probs: dict[int, Tensor],
        proposals: Tensor,
        rows: Sequence[ScheduledRow],
    ) -> Reports:
        """Pick the numbers to report, from what `reported` returned, and start to copy them to the
        host.

        ``proposals`` are int32 [reads, 2], tokens and bits of their confidences.
        """
        found = {}
        for index, start in enumerate(first_reads(rows)[:-1] if log_probs else ()):
            if index in log_probs:
                request, table = rows[index].request, log_probs[index]
                tokens = proposals[start : start + len(table), 0].long()
                numbers = log_probs_of(table, tokens, request.options.num_logprobs or 0)
                own, top, values = (each.double() for each in numbers)
                found[request.id] = HostCopy(torch.cat([own[:, None], top, values], dim=1))
        return cls(found)

    def report(self, request: Request, count: int) -> list[TokenLogprob]:
        """Return the log-probabilities of a request's first tokens; none if it wants none."""
        found = self.by_request.get(request.id)
        if found is None:
            return []
        num_top = request.options.num_logprobs or 0
        from_masks = not request.plan.checks_drafts
        return [
            TokenLogprob(
                own,
                list(zip(map(int, others[:num_top]), others[num_top:], strict=True)),
                from_masks and depth > 0,
            )
            for depth, (own, *others) in enumerate(found.wait()[:count].tolist())
        ]


def reported(logits: Tensor, rows: Sequence[ScheduledRow]) -> dict[int, Tensor]:
    """Return the log-probabilities of rows that report some: float32 [proposals, vocabulary].

    ``logits`` are raw, float [reads, vocabulary]; ``rows`` are those that read them, in order.
    """
    if all(row.request.options.num_logprobs is None for row in rows):
        return {}
    return {
        index: log_probabilities(logits[start : start + row.num_proposed])
        for index, (row, start) in enumerate(zip(rows, first_reads(rows), strict=False))
        if row.request.options.num_logprobs is not None
    }
