"""Cheap grammars never wait; others wait once steps have had their share of time."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from decoding.grammar_specs import VOCABULARY, lark, regex
from mars_serve.engine.sampling.grammar import (
    GrammarCompiler,
    GrammarError,
    GrammarLimits,
    Matcher,
    PutOff,
)
from mars_serve.engine.sampling.grammar_budget import GrammarBudget

AMBIGUOUS = lark('start: s\ns: s s s | s s | "a" | "b" | "c"')


def write(matcher: Matcher, token: int, number: int) -> Matcher:
    """Have a grammar take a token so many times, as an engine does."""
    for _ in range(number):
        matcher.allowed_after([])
        assert matcher.advance([token]) == 1
    return matcher


def test_heavy_grammars_wait_and_take_turns(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    token = tokenizer.convert_tokens_to_ids("a")
    cheap = compiler.compile(regex("a+")).matcher()
    cheap.advance([token])
    heavy = [write(compiler.compile(AMBIGUOUS).matcher(), token, 12) for _ in range(3)]
    cheap.last_s = 0.0
    budget = GrammarBudget(step_s=1e-4, light_s=0.0)
    assert not any(budget.is_light(each) for each in heavy)
    for each in heavy:
        budget.charge(each)
    assert budget.left_s < 0, "their past is more than their share"
    budget.left_s = -1e-3
    grammars = budget.begin([*heavy, cheap])
    assert grammars.allowed(cheap, []) is not None
    assert all(grammars.allowed(each, []) is None for each in heavy)
    assert {type(each) for each in grammars.outcomes.values()} == {PutOff}
    num_steps = 0
    while grammars.outcomes:
        grammars = budget.begin([*heavy, cheap])
        grammars.allowed(heavy[0], [])
        num_steps += 1
        assert num_steps < 100
    assert num_steps > 5


def test_a_grammar_does_not_wait_for_nobody(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    token = tokenizer.convert_tokens_to_ids("a")
    grammar = compiler.compile(AMBIGUOUS)
    most, least = (write(grammar.matcher(), token, number) for number in (14, 4))
    budget = GrammarBudget(step_s=1e-4, light_s=0.0)
    budget.left_s = -1.0
    grammars = budget.begin([most, least])
    assert grammars.allowed(most, []) is None
    assert grammars.allowed(least, []) is not None
    assert list(grammars.outcomes) == [most]
    grammars = budget.begin([most, None])
    assert grammars.allowed(most, []) is None
    assert list(grammars.outcomes) == [most], "the other row needs no grammar"


def test_a_step_of_a_grammar_has_a_budget_of_time(
    tokenizer: PreTrainedTokenizerBase, ends: set[int]
) -> None:
    compiler = GrammarCompiler(tokenizer, VOCABULARY, ends, GrammarLimits(step_s=0.01))
    matcher = compiler.compile(AMBIGUOUS).matcher()
    token = tokenizer.convert_tokens_to_ids("a")
    with pytest.raises(GrammarError, match="steps of it take more than 10 ms"):
        write(matcher, token, 200)
    slow = compiler.compile(regex("(a|b)+")).matcher()
    while slow.total_s <= 0.01:  # cheap steps do not add up
        write(slow, token, 10)


def test_a_grammar_outlives_one_pause_of_the_machine(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    """CPU time includes it where a host pauses a virtual machine's core."""
    token = tokenizer.convert_tokens_to_ids("a")
    matcher = write(compiler.compile(regex("(a|b)+")).matcher(), token, 3)
    matcher.total_s += 1.0
    write(matcher, token, 3)
    matcher.total_s += 1.0
    with pytest.raises(GrammarError, match="steps of it take more than 250 ms"):
        matcher.allowed_after([])
