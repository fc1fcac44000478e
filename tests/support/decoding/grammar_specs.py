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


def ambiguous(start: str, num_rules: int) -> GrammarSpec:
    """Return a grammar whose parser has several states for each rule behind ``start``.

    In ``start``, ``D`` is a digit and ``x`` is what has many readings.
    """
    rules = []
    for i in range(num_rules):
        one, two = (i + 1) % num_rules, (7 * i + 3) % num_rules
        rules.append(f's{i}: "1" s{i} "2" | s{one} "3" | "4" s{two} "5" | "6"')
    names = " | ".join(f"s{i}" for i in range(num_rules))
    return lark("\n".join([f"start: {start}", "D: /[0-9]/", f"x: {names}", *rules]))
