"""Grammars for tests, and the number of logits that they are compiled for."""

from __future__ import annotations

import json

from mars_serve.engine.decoding_options import GrammarKind, GrammarSpec

VOCABULARY = 448
"""Number of logits; the tests' tokenizer has fewer tokens."""


def schema(value: object) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(value))


def regex(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, text)


def lark(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.LARK, text)
