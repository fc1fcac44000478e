from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from decoding.grammar_specs import VOCABULARY, lark, regex, schema
from mars_platform.data.prompt_encoding import control_tokens
from mars_platform.errors import UserError
from mars_serve.api.incoming.structure import structure_of
from mars_serve.api.protocol import CompletionRequest
from mars_serve.engine.decoding_options import GrammarKind, GrammarSpec
from mars_serve.engine.sampling.grammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarError,
    GrammarLimits,
    Matcher,
    PutOff,
)

SCHEMAS = {
    "enum": {"enum": ["beta", 'a "quoted" one', 12, None, True, {"sum": [1, 2]}]},
    "numbers": {
        "type": "array",
        "items": {"anyOf": [{"type": "integer", "minimum": -7, "maximum": 120}, {"type": "null"}]},
        "minItems": 2,
        "maxItems": 5,
    },
    "number": {"type": "number", "minimum": 0.5, "exclusiveMaximum": 12.25},
    "string": {"type": "string", "minLength": 3, "maxLength": 9},
    "pattern": {"type": "string", "pattern": "^[A-C]{2}-[0-9]+(é|\\\\)$"},
    "nested": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "sum": {"type": "integer"},
            "parts": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"kind": {"enum": ["alpha", "beta"]}, "on": {"type": "boolean"}},
                    "required": ["kind"],
                    "additionalProperties": False,
                },
                "maxItems": 3,
            },
        },
        "required": ["name", "parts"],
        "additionalProperties": False,
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                    "value": {"type": "integer"},
                },
                "required": ["left", "value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "any object": {"type": "object"},
}
REGEXES = [
    "What is (one|two) plus [0-9]{1,3}\\?",
    "a?b*c{2,4}",
    "(ab|cd)+/[^a-z]\\n",
    "[é-ü]{2,5}(日本|本)",
    "^x|y$",
    'a\n+"/b',
]
ARITHMETIC = """
start: sum
sum: product (("+" | "-") product)*
product: atom ("*" atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /0|[1-9][0-9]*/
%ignore / {1,2}/
"""
GRAMMARS = {
    **{name: (GrammarKind.JSON_SCHEMA, json.dumps(schema)) for name, schema in SCHEMAS.items()},
    **{pattern: (GrammarKind.REGEX, pattern) for pattern in REGEXES},
    "arithmetic": (GrammarKind.LARK, ARITHMETIC),
    "lazy": (GrammarKind.LARK, 'start: head "end"\nhead[lazy]: /[a-d]*d/'),
}
DOUBLING = "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(25)) + 'A25: "a"'
CLOSING = ['"', "}", "]", ")", ":", "0"]


def allowed(matcher: Matcher) -> list[int]:
    mask = matcher.allowed()
    assert mask.shape == (VOCABULARY,)
    assert mask.dtype == torch.bool
    return mask.nonzero().flatten().tolist()


def soon_ready(method: Callable[[], Any]) -> Any:
    """Return what a matcher's method returns once the matcher has a parser of its own."""
    while True:
        with suppress(PutOff):
            return method()


def test_an_object_of_any_shape_has_short_runs_of_white_space(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    body = CompletionRequest(model="m", prompt="x", response_format={"type": "json_object"})
    grammar = compiler.compile(structure_of(body).grammar)
    value = {
        "a b": [1, -2.5e3, None, True, {"": 'x\n\ty  "q" \\ é\U0001f600\x01'}],
        "c": {},
        "d": ["\n" + 80 * " " + "x"],
    }
    for text in (json.dumps(value, indent=2), json.dumps(value, ensure_ascii=False), "{}"):
        tokens = [*encode(tokenizer, text), tokenizer.eos_token_id]
        assert grammar.matcher().advance(tokens) == len(tokens)
    spaces = {token for token in range(len(tokenizer)) if not tokenizer.decode([token]).strip()}
    for start in ("{", '{"', '{"a": "b', '{"a":'):
        matcher, output = grammar.matcher(), encode(tokenizer, start)
        matcher.advance(output)
        while len(output) < 400:
            fitting = allowed(matcher)
            output.append(next((token for token in fitting if token in spaces), fitting[0]))
            matcher.advance(output[-1:])
        text = tokenizer.decode(output)
        assert len(re.match(r"\s*", text[1:])[0]) <= 20
        runs = re.findall(r"(?:\s|\\[bfnrt])+", text)
        assert 1 < max(map(len, runs)) <= 256


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


class Writer:
    """Writes random outputs of a grammar, and after some tokens those that end soon."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: set[int], seed: int) -> None:
        self.tokenizer, self.ends, self.random = tokenizer, ends, random.Random(seed)
        self.closing = [tokenizer.convert_tokens_to_ids(token) for token in CLOSING]

    def choose(self, choices: list[int], num_before: int) -> int:
        if num_before > 60:
            preferred = [*sorted(self.ends), *self.closing]
            return next((token for token in preferred if token in choices), choices[0])
        return self.random.choice(choices)

    def write(self, grammar: CompiledGrammar) -> str:
        """Write up to an end token, and check in each step what must always hold."""
        matcher, tokens = grammar.matcher(), []
        for _ in range(1000):
            choices = allowed(matcher)
            may_end = self.ends & set(choices)
            assert may_end in (set(), self.ends)
            assert matcher.is_finished == (set(choices) == self.ends)
            token = self.choose(choices, len(tokens))
            assert soon_ready(partial(matcher.advance, [token])) == 1
            if token in self.ends:
                return self.tokenizer.decode(tokens)
            tokens.append(token)
        raise AssertionError("no end")


@pytest.mark.parametrize("name", SCHEMAS)
def test_outputs_of_a_schema_are_valid(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, ends: set[int], name: str
) -> None:
    grammar = compiler.compile(schema(SCHEMAS[name]))
    texts = {Writer(tokenizer, ends, seed).write(grammar) for seed in range(30)}
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMAS[name])
    assert len(texts) > 3


@pytest.mark.parametrize("pattern", REGEXES)
def test_outputs_of_a_regex_match(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, ends: set[int], pattern: str
) -> None:
    grammar = compiler.compile(regex(pattern))
    texts = {Writer(tokenizer, ends, seed).write(grammar) for seed in range(30)}
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert len(texts) > 1


def test_outputs_of_a_lark_grammar_parse(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, ends: set[int]
) -> None:
    grammar = compiler.compile(lark(ARITHMETIC))
    texts = {Writer(tokenizer, ends, seed).write(grammar) for seed in range(30)}
    for text in texts:
        assert not set(text) - set("0123456789+-*() ")
        compile(text.strip(), "text", "eval")
    assert len(texts) > 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nested", '{"name": "a\\"\\\\é日", "sum": 12,\n    "parts": [{"kind":"beta"} ]}'),
        ("nested", '{"name":"","parts":[]}'),
        ("enum", '{"sum": [1, 2]}'),
        ("tree", '{"left": {"left": null, "value": -1}, "value": 2}'),
        ("any object", '{"a": {"b": [1.5e-3, "\\n", {}, false]}}'),
        ("arithmetic", "12 + (3 - 4)*5"),
    ],
)
def test_valid_text_is_taken_and_allowed(
    compiler: GrammarCompiler,
    tokenizer: PreTrainedTokenizerBase,
    ends: set[int],
    name: str,
    text: str,
) -> None:
    matcher = compiler.compile(GrammarSpec(*GRAMMARS[name])).matcher()
    for token in encode(tokenizer, text):
        assert matcher.advance([token]) == 1
    assert ends <= set(allowed(matcher))


@pytest.mark.parametrize("name", GRAMMARS)
def test_allowed_tokens_depend_only_on_the_tokens_taken(
    compiler: GrammarCompiler, ends: set[int], name: str
) -> None:
    grammar = compiler.compile(GrammarSpec(*GRAMMARS[name]))
    source, others = random.Random(name), set()

    def check(matcher: Matcher, tokens: list[int]) -> list[int]:
        fresh = grammar.matcher()
        assert fresh.advance(tokens) == len(tokens)
        assert fresh.is_finished == matcher.is_finished
        assert allowed(fresh) == allowed(matcher)
        return allowed(fresh)

    for _ in range(5):
        matcher, tokens = grammar.matcher(), []
        for _ in range(30):
            choices = check(matcher, tokens)
            action = source.choice(["advance", "advance", "rollback", "reject", "look"])
            if action == "advance" and not ends & set(tokens):
                token = source.choice(choices)
                assert matcher.advance([token]) == 1
                tokens.append(token)
            elif action == "rollback":
                count = source.randint(0, min(len(tokens), 3))
                matcher.rollback(count)
                del tokens[len(tokens) - count :]
            elif action == "reject":
                tried = [source.randrange(VOCABULARY) for _ in range(4)]
                count = matcher.advance(tried)
                others.add(count)
                matcher.rollback(count)
            else:
                look = matcher.allowed_after
                for _ in range(3):
                    ahead = look_some_way(look, source)
                    mask = look(ahead)
                    assert mask is not None
                    check_mask = grammar.matcher()
                    assert check_mask.advance([*tokens, *ahead]) == len(tokens) + len(ahead)
                    assert torch.equal(mask, check_mask.allowed())
    assert 0 in others


def look_some_way(look: object, source: random.Random) -> list[int]:
    """Look ahead with random tokens, some of which the grammar refuses; return those taken."""
    assert callable(look)
    ahead: list[int] = []
    for _ in range(source.randint(0, 5)):
        mask = look(ahead)
        assert isinstance(mask, torch.Tensor)
        wrong = [*ahead, VOCABULARY - 1]
        assert look(wrong) is None
        assert look([*wrong, 5]) is None
        ahead.append(source.choice(mask.nonzero().flatten().tolist()))
    return ahead


def test_advance_stops_at_the_first_token_that_does_not_fit(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, ends: set[int]
) -> None:
    matcher = compiler.compile(regex("abc?")).matcher()
    a, b, c = (encode(tokenizer, text)[0] for text in "abc")
    end = max(ends)
    assert matcher.advance([a, c, b]) == 1
    assert matcher.advance([end]) == 0
    assert matcher.advance([VOCABULARY - 1]) == 0
    assert matcher.advance([b, a]) == 1
    assert allowed(matcher) == sorted({c, *ends})
    assert matcher.advance([c, c]) == 1
    assert matcher.is_finished


def test_every_end_token_ends_the_output(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, ends: set[int]
) -> None:
    a, b = (encode(tokenizer, text)[0] for text in "ab")
    for end in ends:
        matcher = compiler.compile(regex("ab?")).matcher()
        assert not ends & set(allowed(matcher))
        assert matcher.advance([a, end, b]) == 2
        assert matcher.is_finished
        assert allowed(matcher) == sorted(ends)
        assert matcher.advance([b]) == 0
        assert matcher.advance([end, max(ends)]) == 2
        matcher.rollback(3)
        assert not matcher.is_finished
        assert allowed(matcher) == sorted({b, *ends})
        matcher.rollback(1)
        assert allowed(matcher) == [a]


def test_tokens_that_the_tokenizer_lacks_are_never_allowed(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, ends: set[int]
) -> None:
    matcher = compiler.compile(lark("start: <[*]>{2}")).matcher()
    words = set(tokenizer.get_vocab().values()) - ends - control_tokens(tokenizer).keys()
    assert set(allowed(matcher)) == words
    assert max(words) < VOCABULARY - 1


def test_a_grammar_that_names_a_missing_token_raises_an_error(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    matcher = compiler.compile(lark(f'start: "a" <[{VOCABULARY - 1}]>')).matcher()
    assert matcher.allowed_after(encode(tokenizer, "a")) is None
    assert matcher.advance(encode(tokenizer, "a")) == 1
    with pytest.raises(GrammarError, match="no token that may come next"):
        matcher.allowed()


def test_special_tokens_come_only_where_a_grammar_of_the_server_names_them(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert start not in allowed(compiler.compile(regex("(?s:.)+")).matcher())
    named = GrammarSpec(GrammarKind.LARK, f'start: <[{start}]> "a"', frozenset({start}))
    assert allowed(compiler.compile(named).matcher()) == [start]


def test_white_space_in_json_is_bounded(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    matcher = compiler.compile(schema({"type": "object"})).matcher()
    space = encode(tokenizer, " ")
    assert matcher.advance(encode(tokenizer, "{")) == 1
    assert matcher.advance(space * 1000) == 20
    assert matcher.advance(encode(tokenizer, "}")) == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GrammarSpec(GrammarKind.JSON_SCHEMA, "{"), "JSON schema cannot be used.*EOF"),
        (schema(True), "object"),
        (schema({"type": "objekt"}), "Invalid type: objekt"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"$ref": "#/nowhere"}), "nowhere"),
        (schema({"$ref": "http://localhost/schema"}), "retrieving it failed"),
        (schema({"type": "integer", "minimum": 2, "maximum": 1}), "minimum"),
        (schema({"$ref": "#"}), "no token that may come next"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "look-ahead"),
        (GrammarSpec(GrammarKind.JSON_SCHEMA, '{"items":' * 400 + "{}" + "}" * 400), "recursion"),
        (regex("(a"), "regular expression cannot be used.*unclosed group"),
        (regex("(" * 5000 + "a" + ")" * 5000), "nest"),
        (regex(r"(a)\1"), "backreferences"),
        (regex(""), "empty output"),
        (lark("start: missing"), 'Lark grammar cannot be used.*unknown name: "missing"'),
        (lark(""), "no start rule"),
        (lark('start: a "b"\na[max_tokens=3]: /[a-z]*/'), "max_tokens"),
        (lark('start: "b" a "b"\na[stop="b"]: /[a-z]*/'), "stop"),
        (lark("start: <|im_end|>"), "unknown special token"),
        (lark(DOUBLING), "too big"),
        (regex("a" * 65_537), "65537 characters; use at most 65536"),
    ],
)  # fmt: skip
def test_an_unusable_grammar_is_refused(
    compiler: GrammarCompiler, spec: GrammarSpec, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        compiler.compile(spec)
    text = str(caught.value)
    assert text.startswith("grammar: ")
    assert len(text) < 450
    assert "\n" not in text


@pytest.mark.parametrize(
    "limits",
    [
        GrammarLimits(compile_fuel=100),
        GrammarLimits(num_symbols=20),
        GrammarLimits(step_items=5),
        GrammarLimits(row_items=5),
        GrammarLimits(step_fuel=5),
        GrammarLimits(num_states=5),
        GrammarLimits(max_length=30),
    ],
)
def test_each_limit_holds(
    tokenizer: PreTrainedTokenizerBase, ends: set[int], limits: GrammarLimits
) -> None:
    spec = schema(SCHEMAS["nested"])
    compiler = GrammarCompiler(tokenizer, VOCABULARY, ends, limits)
    with pytest.raises((UserError, GrammarError)):
        Writer(tokenizer, ends, 0).write(compiler.compile(spec))


@pytest.mark.parametrize("kind", ["rules", "terminals", "references"])
def test_long_chains_do_not_overflow_the_stack(compiler: GrammarCompiler, kind: str) -> None:
    """A stack overflow would end the process."""
    if kind == "references":
        links = {str(i): {"items": {"$ref": f"#/{i + 1}"}} for i in range(1700)}
        spec = schema({"$ref": "#/0", **links, "1700": {}})
    else:
        name = "r" if kind == "rules" else "R"
        links = "".join(f"{name}{i}:{name}{i + 1}\n" for i in range(5400))
        spec = lark(f'start:{name}0\n{links}{name}5400:"a"')
    assert len(spec.text) > 59_000
    assert allowed(compiler.compile(spec).matcher())


def test_a_cached_grammar_is_the_same_object(
    tokenizer: PreTrainedTokenizerBase, ends: set[int]
) -> None:
    compiler = GrammarCompiler(tokenizer, VOCABULARY, ends, GrammarLimits(num_cached=2))
    one, two = compiler.compile(regex("a")), compiler.compile(lark('start: "a"'))
    assert one is not two
    assert compiler.compile(regex("a")) is one
    compiler.compile(regex("b"))  # the one that was used longest ago goes
    assert compiler.compile(regex("a")) is one
    assert compiler.compile(lark('start: "a"')) is not two


def test_after_a_limit_the_grammar_is_compiled_anew(
    tokenizer: PreTrainedTokenizerBase, ends: set[int]
) -> None:
    limits = GrammarLimits(num_states=300)
    compiler = GrammarCompiler(tokenizer, VOCABULARY, ends, limits)
    spec = regex("(a|b)*a(a|b){9}c")  # as many lexer states as there are runs of a and b
    grammar, source = compiler.compile(spec), random.Random(0)
    assert compiler.compile(spec) is grammar

    def write(num_tokens: int) -> None:
        matcher = grammar.matcher()
        for _ in range(num_tokens):
            token = encode(tokenizer, source.choice("ab"))
            assert soon_ready(partial(matcher.advance, token)) == 1
            soon_ready(matcher.allowed)

    write(20)
    others = [grammar.matcher(), grammar.matcher()]
    assert others[1].advance(encode(tokenizer, "ab")) == 2
    with pytest.raises(GrammarError, match="too many states") as caught:
        write(2000)
    assert "\n" not in str(caught.value)
    with pytest.raises(PutOff):  # the states are shared
        others[0].allowed()
    again = compiler.compile(spec)
    assert again is not grammar
    assert allowed(again.matcher())
    for other, tokens in zip(others, ([], encode(tokenizer, "ab")), strict=True):
        fresh = again.matcher()
        fresh.advance(tokens)
        assert torch.equal(soon_ready(other.allowed), fresh.allowed())


def test_several_threads_compile_and_write(
    tokenizer: PreTrainedTokenizerBase, ends: set[int]
) -> None:
    compiler = GrammarCompiler(tokenizer, VOCABULARY, ends)
    specs = [schema(SCHEMAS["nested"]), regex(REGEXES[0]), lark(ARITHMETIC)]

    def work(index: int) -> tuple[CompiledGrammar, str]:
        grammar = compiler.compile(specs[index % 3])
        return grammar, Writer(tokenizer, ends, index // 6).write(grammar)

    with ThreadPoolExecutor(max_workers=6) as pool:
        results = list(pool.map(work, range(60)))
    for first, second in zip(results[:57], results[3:], strict=True):
        assert first[0] is second[0]
    for index, (_, text) in enumerate(results):
        assert text == work(index)[1]


def test_a_model_without_end_token_or_with_another_tokenizer_is_refused(
    tokenizer: PreTrainedTokenizerBase, ends: set[int]
) -> None:
    with pytest.raises(UserError, match="no end token"):
        GrammarCompiler(tokenizer, VOCABULARY, []).compile(regex("a"))
    words = Tokenizer(models.WordLevel({"a": 0, "<end>": 1}, unk_token="a"))  # noqa: S106
    other = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")  # noqa: S106
    with pytest.raises(UserError, match="tokenizer does not work with grammars"):
        GrammarCompiler(other, 64, {1}).compile(regex("a"))
