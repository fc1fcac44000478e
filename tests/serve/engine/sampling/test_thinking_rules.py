"""Thinking within its budget."""

from __future__ import annotations

from mars_serve.engine.decoding_options import Thinking
from mars_serve.engine.sampling.thinking_rules import ThinkingRules

BEGIN, END, WORD, VOCABULARY = 1, 2, 3, 8


def test_thinking_with_room_in_its_budget_costs_a_step_nothing():
    """A mask of all tokens would be copied to the device for each row of each step."""
    thinking = Thinking(BEGIN, END, has_begun=True, budget=4)
    rules = ThinkingRules(thinking, VOCABULARY, {0}, has_grammar=False)
    assert rules.allowed_after([WORD] * 3, None) is None
    forced = rules.allowed_after([WORD] * 4, None)
    assert forced is not None
    assert forced.nonzero().flatten().tolist() == [END]
    assert rules.num_allowed([WORD] * 5) == (4, 4)
