"""A tokenizer and a compiler of grammars for it."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from decoding.grammar_specs import VOCABULARY
from mars_serve.engine.sampling.grammar import GrammarCompiler
from mars_train.run.scratch import train_tokenizer

TEXTS = [
    f'What is {a} plus {b}? {{"name": "beta", "sum": {a + b}, "parts": [{a}, {b}]}}\n'
    for a in range(12)
    for b in range(12)
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = train_tokenizer(TEXTS, 384)
    assert len(tokenizer) < VOCABULARY
    return tokenizer


@pytest.fixture(scope="module")
def ends(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    return {tokenizer.eos_token_id, tokenizer.pad_token_id}


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerBase, ends: set[int]) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCABULARY, ends)
