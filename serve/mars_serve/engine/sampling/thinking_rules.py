"""Keeps a request's thinking within its budget, and lets its grammar begin where thinking ends."""

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mars_serve.engine.decoding_options import Thinking


class ThinkingRules:
    """The tokens that may be chosen while an output thinks, and where its grammar begins.

    Under a grammar, thinking may stand only before everything else, and no end token may be chosen
    in it: the output would end without what the grammar asks for.
    """

    def __init__(
        self, thinking: Thinking, vocabulary: int, ends: Collection[int], *, has_grammar: bool
    ) -> None:
        self._thinking, self._has_grammar = thinking, has_grammar
        self._count = 0 if thinking.has_begun else None
        """Tokens of the thinking that the output is in; None outside of thinking."""
        self._may_begin = thinking.may_begin or not has_grammar
        """Whether the next token may begin thinking."""
        self._thoughts: Tensor | None = None
        """Tokens that may be thought; None for all."""
        if has_grammar:
            self._thoughts = torch.ones(vocabulary, dtype=torch.bool)
            self._thoughts[list(ends)] = False
        self._end = torch.zeros(vocabulary, dtype=torch.bool)
        self._end[thinking.end] = True

    @property
    def delays_grammar(self) -> bool:
        """Whether a grammar begins behind the next step at the earliest; see `num_allowed`."""
        return self._has_grammar and self._count is not None

    def may_run_out(self, num_tokens: int) -> bool:
        """Whether the budget may run out within some tokens."""
        budget = self._thinking.budget
        return budget is not None and (self._count or 0) + num_tokens > budget

    def allowed_after(
        self, tokens: list[int], by_grammar: Callable[[list[int]], Tensor | None] | None
    ) -> Tensor | None:
        """Return the tokens that may follow some further tokens; None for all.

        ``by_grammar`` returns what may follow the tokens that the grammar has to match.
        """
        counts = self._counts(tokens)
        if counts[-1] is not None:
            return self._allowed(counts[-1])
        if by_grammar is None:
            return None
        allowed = by_grammar(tokens[_num_before(counts) :])
        if allowed is not None and not tokens and self._may_begin:
            allowed = allowed.clone()
            allowed[self._thinking.begin] = True
        return allowed

    def num_allowed(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Count the leading tokens that are allowed, and those of them before the grammar.

        Thinking before a grammar ends the run: what a step has chosen behind it follows no grammar.
        """
        counts, count = self._counts(tokens), 0
        for token, (before, behind) in zip(tokens, pairwise(counts), strict=True):
            allowed = None if before is None else self._allowed(before)
            if allowed is not None and not allowed[token]:
                break
            count += 1
            if self._has_grammar and before is not None and behind is None:
                break
        return count, _num_before(counts[: count + 1])

    def extend(self, tokens: Sequence[int]) -> None:
        """Note further tokens of the output."""
        self._count = self._counts(tokens)[-1]
        self._may_begin = self._may_begin and not (self._has_grammar and tokens)

    def _allowed(self, count: int) -> Tensor | None:
        budget = self._thinking.budget
        return self._thoughts if budget is None or count < budget else self._end

    def _counts(self, tokens: Sequence[int]) -> list[int | None]:
        """Return the tokens of the thinking before each token, and behind the last one."""
        counts = [self._count]
        for index, token in enumerate(tokens):
            count = counts[-1]
            if count is not None:
                count = None if token == self._thinking.end else count + 1
            elif token == self._thinking.begin and self._may_begin:
                count = 0 if index == 0 or not self._has_grammar else None
            counts.append(count)
        return counts


def _num_before(counts: Sequence[int | None]) -> int:
    """Return how many tokens come before the answer, given the counts around each of them."""
    return sum(one is not None or next_ is not None for one, next_ in pairwise(counts))
