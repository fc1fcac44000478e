"""The tokens between which a model thinks."""

from __future__ import annotations

from copy import deepcopy

import pytest
from tokenizers import AddedToken

from chat_families import TEMPLATES, tokenizer_of
from mars_platform.data.thinking import ThinkingTokens, find_thinking_tokens


def test_tokens_that_the_template_mentions_are_found():
    tokenizer = tokenizer_of("qwen")
    begin, end = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    for mentioned_only in (False, True):
        found = find_thinking_tokens(tokenizer, mentioned_only=mentioned_only)
        assert found == ThinkingTokens(begin, end)


@pytest.mark.parametrize("family", [family for family in TEMPLATES if family != "qwen"])
def test_other_families_have_none(family):
    assert find_thinking_tokens(tokenizer_of(family), mentioned_only=False) is None


@pytest.mark.parametrize(
    ("mention", "is_found"), [("", False), ("<think>", True), ("</think>", True)]
)
def test_tokens_for_another_model_of_the_family_do_not_count(mention, is_found):
    tokenizer = deepcopy(tokenizer_of("llama"))
    tokenizer.add_tokens([AddedToken(tag) for tag in ("<think>", "</think>")])
    tokenizer.chat_template += "{# " + mention + " #}"
    assert (find_thinking_tokens(tokenizer, mentioned_only=True) is not None) == is_found
    assert find_thinking_tokens(tokenizer, mentioned_only=False) is not None


def test_one_token_is_not_enough():
    tokenizer = deepcopy(tokenizer_of("llama"))
    tokenizer.add_tokens([AddedToken("</think>")])
    assert find_thinking_tokens(tokenizer, mentioned_only=False) is None
