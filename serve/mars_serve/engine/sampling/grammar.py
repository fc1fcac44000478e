"""Grammars: the tokens that may come next for an output to match a JSON schema, regex or CFG.

llguidance compiles the grammars and parses the tokens; this module adds limits, a cache and the
rule for end tokens.
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
# With unbounded white space, an unsure model may emit nothing else up to max_tokens.
_JSON_WHITESPACE = r"[ \t\n\r]{1,20}"
_NOTHING_FITS = "there is no token that may come next"
_MAX_REASON = 300
"""Most characters of llguidance's message that an error repeats."""
# Compiling recurses along chains of rules or references. It took up to 512 bytes of stack for each
# character (measured), and a stack that is too small ends the process.
_STACK_PER_CHARACTER = 2048
_SMALLEST_STACK = 16 * 2**20
_stack_size_lock = threading.Lock()


@dataclass(frozen=True)
class GrammarLimits:
    """Most that one grammar may cost, in llguidance's units; see its ``LLParserLimits``."""

    max_length: int = 65_536
    """Characters of the grammar's text."""
    num_cached: int = 64
    """Compiled grammars in the cache."""
    compile_fuel: int = 1_000_000
    """Fuel for the grammar's regular expressions: usually 20 ms, less than a second at worst."""
    step_fuel: int = 200_000
    """Lexer fuel for one set of allowed tokens, about 14 ms."""
    step_items: int = 50_000
    """Parser items for one set of allowed tokens, about 3 ms."""
    num_states: int = 50_000
    """Lexer states of 1 to 2 kB each, which all requests with the grammar share."""
    num_symbols: int = 500_000
    """Symbols of the grammar's rules, once repetitions are expanded."""

    def for_parser(self) -> LLParserLimits:
        """Return llguidance's limits; its errors then omit its state, which holds outputs."""
        return LLParserLimits(
            initial_lexer_fuel=self.compile_fuel,
            step_lexer_fuel=self.step_fuel,
            step_max_items=self.step_items,
            max_lexer_states=self.num_states,
            max_grammar_size=self.num_symbols,
            verbose_errors=False,
        )


_Bits = NDArray[np.uint8]
"""A set of tokens, [ceil(vocabulary / 8)]: one bit for each token, the lowest bit first."""


@dataclass(frozen=True)
class _Vocabulary:
    """The tokenizer in llguidance's form, and its tokens by kind."""

    tokenizer: LLTokenizer
    size: int
    """Number of logits."""
    end_ids: frozenset[int]
    ends: _Bits
    words: _Bits
    """Tokens of the tokenizer, except end tokens."""


class GrammarError(ValueError):
    """An error of llguidance: a limit is reached, or no token may follow."""


class GrammarCompiler:
    """Compiles grammars for one model and caches those used last; any thread may call it.

    The first grammar also takes the time to read the tokenizer: about a second for 150 000 tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary: int,
        end_tokens: Collection[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        """Start with an empty cache.

        Args:
            tokenizer: the model's tokenizer.
            vocabulary: number of logits; ids beyond the tokenizer's are never allowed.
            end_tokens: the model's end tokens.
            limits: limits of each grammar; by default `GrammarLimits()`.
        """
        self._tokenizer = tokenizer
        self._size = vocabulary
        self._end_ids = frozenset(end_tokens)
        self._limits = limits or GrammarLimits()
        self._cache: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._compile_lock = threading.Lock()  # held only to compile: cached grammars do not wait

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Return a grammar ready for use, from the cache if it is there.

        Raises:
            UserError: the grammar is too long, does not parse, uses an unsupported feature, exceeds
                a limit or matches nothing; or the model has no end token, or a tokenizer with which
                grammars do not work.
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
            compiled = self._find(spec)  # another thread may have compiled it meanwhile
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
    """A grammar that has been found usable; any thread may call it."""

    parser: LLMatcher
    """Parser at the start of an output; never advanced."""
    vocabulary: _Vocabulary
    is_spent: bool = field(default=False, init=False)
    """Whether a matcher has reached a limit. All matchers share the lexer's states and would soon
    reach it, too, so the grammar has to be compiled anew."""

    def matcher(self) -> Matcher:
        """Return a matcher at the start of an output; takes some microseconds."""
        return Matcher(self)


class Matcher:
    """Position of one output in a grammar; not to be used after a method has raised GrammarError.

    The allowed tokens depend only on the tokens taken, not on queries or rollbacks in between.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._parser = grammar.parser.deep_copy()
        self._num_ends = 0  # end tokens taken, of which the parser does not know
        self._ahead: list[int] = []  # tokens taken only to look ahead

    @property
    def is_finished(self) -> bool:
        """Whether only end tokens may follow."""
        self._return()
        return self._num_ends > 0 or self._parser.is_stopped()

    def allowed(self) -> Tensor:
        """Return the tokens that may come next: a new bool [vocabulary] on the CPU.

        If the grammar leaves only one text, only its usual tokenization is allowed. End tokens are
        allowed wherever the output may end; after an end token only end tokens are allowed.

        Raises:
            GrammarError: a limit is reached, or no token may come next.
        """
        self._return()
        allowed = self._allowed()
        if allowed is None:
            raise GrammarError(_NOTHING_FITS)
        return allowed

    def advance(self, tokens: Sequence[int]) -> int:
        """Take the leading tokens that the grammar allows, and return their number.

        Raises:
            GrammarError: a limit is reached.
        """
        self._return()
        return self._take(tokens)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` tokens taken."""
        self._return()
        self._give_back(num_tokens)

    def allowed_after(self, tokens: Sequence[int]) -> Tensor | None:
        """Return what ``allowed`` would return after some more tokens.

        The result is None if the grammar does not allow these tokens, or no token after them. The
        parser keeps them until the next query, so each token of a growing run is parsed once.

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
        """Undo the tokens taken to look ahead, except the first ``num_kept``."""
        self._give_back(len(self._ahead) - num_kept)
        del self._ahead[num_kept:]

    def _allowed(self) -> Tensor | None:
        bits = self._allowed_words()
        if self._may_end:
            bits |= self._vocabulary.ends
        if not bits.any():  # a grammar can name end tokens and unused ids as its tokens
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


def _source(spec: GrammarSpec) -> str:
    """Return a grammar in llguidance's form.

    Raises:
        GrammarError: the grammar is a schema but not a JSON object.
    """
    if spec.kind is GrammarKind.JSON_SCHEMA:
        try:
            return LLMatcher.grammar_from_json_schema(
                spec.text, defaults={"whitespace_pattern": _JSON_WHITESPACE}
            )
        except ValueError as error:
            raise GrammarError(_shorten(str(error))) from error
    if spec.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(spec.text)
    return json.dumps({"grammars": [{"lark_grammar": spec.text}]})


def _try_out(compiled: CompiledGrammar) -> None:
    """Use a grammar once, because some fail only in use: they match nothing, or cannot roll back.

    Raises:
        GrammarError: the grammar fails.
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
    """Return the reason in a message, on one line, without the grammar's text and parser state."""
    reason = re.split(r"\n *\d+ \| |\n<", message)[0].split("\nerror: ")[-1]
    return " ".join(reason.split())[:_MAX_REASON]


def _run_with_stack(function: Callable[[], CompiledGrammar], num_bytes: int) -> CompiledGrammar:
    """Run a function in a thread with a stack of a given size; only its used part takes memory."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        with _stack_size_lock:  # the size holds for all threads that the process starts next
            before = threading.stack_size(num_bytes)
            try:
                future = pool.submit(function)
            finally:
                threading.stack_size(before)
        return future.result()
