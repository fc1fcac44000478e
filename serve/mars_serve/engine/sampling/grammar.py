"""Grammars: which tokens may come next, so that an output matches a JSON schema, regex or CFG.

llguidance compiles the grammar and parses the tokens; here are its limits, a cache, and the rule
for end tokens. Knows token ids and the tokenizer's vocabulary; no logits, requests or sampling.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from mars_platform.errors import UserError
from mars_serve.engine.decoding_options import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAMES = {
    GrammarKind.JSON_SCHEMA: "JSON schema",
    GrammarKind.REGEX: "regular expression",
    GrammarKind.LARK: "Lark grammar",
}
# Unbounded white space lets a model that is unsure go on with it up to max_tokens.
_JSON_WHITESPACE = r"[ \t\n\r]{1,20}"
_NOTHING_FITS = "there is no token that may come next"
_MAX_REASON = 300  # characters of llguidance's own message
# Compiling recurses along chains of rules or references: up to 512 bytes of stack for each
# character were measured, and a stack that is too small ends the process.
_STACK_PER_CHARACTER = 2048
_SMALLEST_STACK = 16 * 2**20
_stack_size_lock = threading.Lock()


@dataclass(frozen=True)
class GrammarLimits:
    """What one grammar may cost; llguidance's own units, see its ``LLParserLimits``."""

    max_length: int = 65_536
    """Characters of its text."""
    num_cached: int = 64
    """Compiled grammars that are kept."""
    compile_fuel: int = 1_000_000
    """For the regular expressions in it: 20 ms as a rule, below a second at worst."""
    step_fuel: int = 200_000
    """Lexer work of one set of allowed tokens, about 14 ms."""
    step_items: int = 50_000
    """Parser items of one set of allowed tokens, about 3 ms."""
    num_states: int = 50_000
    """Lexer states, of 1 to 2 kB each; all requests with the grammar share them."""
    num_symbols: int = 500_000
    """Symbols of its rules, once repetitions are written out."""

    def for_parser(self) -> LLParserLimits:
        """The same for llguidance; errors without the parser's state, which holds outputs."""
        return LLParserLimits(
            initial_lexer_fuel=self.compile_fuel,
            step_lexer_fuel=self.step_fuel,
            step_max_items=self.step_items,
            max_lexer_states=self.num_states,
            max_grammar_size=self.num_symbols,
            verbose_errors=False,
        )


_Bits = NDArray[np.uint8]  # [ceil(vocabulary / 8)]: a bit a token, the lowest first


@dataclass(frozen=True)
class _Vocabulary:
    """The tokenizer as llguidance reads it, and its tokens by kind."""

    tokenizer: LLTokenizer
    size: int
    """Of the logits."""
    end_ids: frozenset[int]
    ends: _Bits
    words: _Bits
    """Tokens that the tokenizer has, without the end tokens."""


class GrammarError(ValueError):
    """llguidance gave up: a limit is reached, or nothing may follow."""


class GrammarCompiler:
    """Compiles grammars for one model and keeps the latest used; any thread may call it.

    The tokenizer is read at the first grammar: about a second for 150 000 tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary: int,
        end_tokens: Collection[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        """``vocabulary`` is the size of the logits; ids past the tokenizer's are never allowed."""
        self._tokenizer = tokenizer
        self._size = vocabulary
        self._end_ids = frozenset(end_tokens)
        self._limits = limits or GrammarLimits()
        self._cache: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._compile_lock = threading.Lock()  # one at a time; what is cached does not wait

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """The grammar ready for use; the same object each time while it is cached.

        Raises:
            UserError: the text is too long, does not parse, uses something that is not
                supported, costs more than the limits, or matches nothing; or the model's tokenizer
                is of a kind that grammars do not work with, or the model has no end token.
        """
        compiled = self._find(spec)
        if compiled is not None:
            return compiled
        if len(spec.text) > self._limits.max_length:
            raise UserError(
                f"grammar: the {_NAMES[spec.kind]} has {len(spec.text)} characters; "
                f"use at most {self._limits.max_length}"
            )
        with self._compile_lock:
            compiled = self._find(spec)  # another thread may have been faster
            if compiled is None:
                compiled = self._compile(spec)
                self._keep(spec, compiled)
        return compiled

    def _find(self, spec: GrammarSpec) -> CompiledGrammar | None:
        with self._cache_lock:
            compiled = self._cache.get(spec)
            if compiled is None or compiled.is_spent:
                return None
            self._cache.move_to_end(spec)
            return compiled

    def _keep(self, spec: GrammarSpec, compiled: CompiledGrammar) -> None:
        with self._cache_lock:
            self._cache[spec] = compiled
            self._cache.move_to_end(spec)
            if len(self._cache) > self._limits.num_cached:
                self._cache.popitem(last=False)

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        vocabulary, limits = self._vocabulary, self._limits.for_parser()

        def build() -> CompiledGrammar:
            parser = LLMatcher(vocabulary.tokenizer, _source(spec), log_level=0, limits=limits)
            _check(parser)
            compiled = CompiledGrammar(parser, vocabulary)
            _try_out(compiled)
            return compiled

        stack = max(_SMALLEST_STACK, _STACK_PER_CHARACTER * len(spec.text))
        try:
            return _run_with_stack(build, stack)
        except GrammarError as error:
            raise UserError(
                f"grammar: the {_NAMES[spec.kind]} cannot be used ({error}); change it accordingly"
            ) from error

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        if not self._end_ids:
            raise UserError(
                "grammar: the model has no end token, so no output could end; "
                "set eos_token_id in its configuration"
            )
        try:
            tokenizer = llguidance.hf.from_tokenizer(
                self._tokenizer, n_vocab=self._size, eos_token=sorted(self._end_ids)
            )
        except ValueError as error:
            raise UserError(
                "grammar: the model's tokenizer does not work with grammars "
                f"({_shorten(str(error))}); use a model with a fast byte-level tokenizer"
            ) from error
        words = set(self._tokenizer.get_vocab().values()) - self._end_ids
        return _Vocabulary(
            tokenizer,
            self._size,
            self._end_ids,
            ends=_pack(self._end_ids, self._size),
            words=_pack(words, self._size),
        )


@dataclass(eq=False)
class CompiledGrammar:
    """A grammar that was found to be usable; any thread may call it."""

    parser: LLMatcher
    """At its start; never advanced."""
    vocabulary: _Vocabulary
    is_spent: bool = field(default=False, init=False)
    """A matcher of it reached a limit. They share the lexer's states, so that all others would
    soon, too: the compiler starts afresh."""

    def matcher(self) -> Matcher:
        """One at the start of an output; takes some microseconds."""
        return Matcher(self)


class Matcher:
    """Where in a grammar one output is; of no use any more once a method raised GrammarError.

    What is allowed depends on the tokens taken, not on what was asked or taken back in between.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._parser = grammar.parser.deep_copy()
        self._num_ends = 0  # end tokens taken; the parser does not see them
        self._ahead: list[int] = []  # taken for a look ahead only

    @property
    def is_finished(self) -> bool:
        """Whether only end tokens may follow."""
        self._return()
        return self._num_ends > 0 or self._parser.is_stopped()

    def allowed(self) -> Tensor:
        """Tokens that may come next: bool [vocabulary], on the CPU, the caller's own.

        Where bytes are forced, only their usual tokenization is allowed. End tokens are allowed
        where the output may end; after one, nothing else is.

        Raises:
            GrammarError: a limit is reached, or no token may come next.
        """
        self._return()
        allowed = self._allowed()
        if allowed is None:
            raise GrammarError(_NOTHING_FITS)
        return allowed

    def advance(self, tokens: Sequence[int]) -> int:
        """How many of the tokens, from the first on, the grammar took; moves by those.

        Raises:
            GrammarError: a limit is reached.
        """
        self._return()
        return self._take(tokens)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that it took."""
        self._return()
        self._give_back(num_tokens)

    def allowed_after(self, tokens: Sequence[int]) -> Tensor | None:
        """What ``allowed`` would be after some more tokens, or None where they do not fit.

        Nor do they where no token may follow them. They are kept until something else is asked, so
        that growing runs cost one token each.

        Raises:
            GrammarError: a limit is reached.
        """
        pairs = zip(self._ahead, tokens, strict=False)
        num_common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        self._return(num_common)
        rest = tokens[num_common:]
        num_taken = self._take(rest)
        self._ahead += rest[:num_taken]
        return self._allowed() if num_taken == len(rest) else None

    def _return(self, num_kept: int = 0) -> None:
        """Take back what was taken ahead, but for so many tokens."""
        self._give_back(len(self._ahead) - num_kept)
        del self._ahead[num_kept:]

    def _allowed(self) -> Tensor | None:
        bits = self._allowed_words()
        if self._may_end:
            bits |= self._vocabulary.ends
        if not bits.any():  # a grammar can name end tokens and spare rows as its tokens
            return None
        unpacked = np.unpackbits(bits, count=self._vocabulary.size, bitorder="little")
        return torch.from_numpy(unpacked.view(np.bool_))  # [vocabulary]

    def _allowed_words(self) -> _Bits:
        if self._num_ends:
            return np.zeros_like(self._vocabulary.words)
        words = self._vocabulary.words
        bits = np.frombuffer(self._parser.compute_bitmask(), np.uint8, count=len(words))
        self._check()
        return bits & words

    def _take(self, tokens: Sequence[int]) -> int:
        ends = self._vocabulary.end_ids
        words = [] if self._num_ends else list(takewhile(lambda token: token not in ends, tokens))
        num_taken = self._parser.try_consume_tokens(words)
        self._check()
        if num_taken < len(words) or not self._may_end:
            return num_taken
        num_ends = len(list(takewhile(ends.__contains__, tokens[num_taken:])))
        self._num_ends += num_ends
        return num_taken + num_ends

    @property
    def _may_end(self) -> bool:
        return self._num_ends > 0 or self._parser.is_accepting()

    def _give_back(self, num_tokens: int) -> None:
        num_ends = min(num_tokens, self._num_ends)
        self._num_ends -= num_ends
        if num_tokens > num_ends:
            self._parser.rollback(num_tokens - num_ends)
            self._check()

    def _check(self) -> None:
        try:
            _check(self._parser)
        except GrammarError:
            self._grammar.is_spent = True
            raise


def lookahead(matcher: Matcher) -> Callable[[list[int]], Tensor | None]:
    """For the choice of several tokens: what may come after tokens chosen beyond the committed.

    The function gives bool [vocabulary], or None where its tokens do not fit the grammar; the
    matcher stays where it is, as far as its other methods show.
    """
    return matcher.allowed_after


def _source(spec: GrammarSpec) -> str:
    """The grammar as llguidance wants it.

    Raises:
        GrammarError: it is a schema that is not a JSON object.
    """
    if spec.kind is GrammarKind.JSON_SCHEMA:
        return _schema_source(spec.text)
    if spec.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(spec.text)
    return json.dumps({"grammars": [{"lark_grammar": spec.text}]})


def _schema_source(text: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(
            text, defaults={"whitespace_pattern": _JSON_WHITESPACE}
        )
    except ValueError as error:
        raise GrammarError(_shorten(str(error))) from error


def _try_out(compiled: CompiledGrammar) -> None:
    """Some grammars fail only in use: match nothing, or cannot take tokens back.

    Raises:
        GrammarError: this is one of them.
    """
    matcher = compiled.matcher()
    ends = compiled.vocabulary.end_ids
    words = (token for token in matcher.allowed().nonzero().flatten().tolist() if token not in ends)
    first = next(words, None)
    if first is None:
        raise GrammarError("it matches nothing but the empty output")
    matcher.advance([first])
    matcher.rollback(1)


def _pack(tokens: Collection[int], size: int) -> _Bits:
    flags = np.zeros(size, np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little")


def _check(parser: LLMatcher) -> None:
    if parser.is_error():
        reason = _shorten(parser.get_error())
        raise GrammarError(_NOTHING_FITS if reason == "NoExtensionBias" else reason)


def _shorten(message: str) -> str:
    """One line, without the grammar's text and the parser's state that stand around it."""
    reason = re.split(r"\n *\d+ \| |\n<", message)[0].split("\nerror: ")[-1]
    return " ".join(reason.split())[:_MAX_REASON]


def _run_with_stack(function: Callable[[], CompiledGrammar], num_bytes: int) -> CompiledGrammar:
    """Run a function in a thread with a stack of a given size; only what it uses takes memory."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        with _stack_size_lock:  # the size is the process's, for the threads it starts next
            before = threading.stack_size(num_bytes)
            try:
                future = pool.submit(function)
            finally:
                threading.stack_size(before)
        return future.result()
