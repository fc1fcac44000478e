"""Grammars: the tokens that may come next for an output to match a JSON schema, regex or CFG.

llguidance compiles the grammars and parses the tokens; this module adds limits, a cache and the
rule for end tokens. A grammar that comes from a client is first tried in a process of its own, see
`mars_serve.engine.sampling.grammar_trial`: no call of llguidance can be stopped once it has begun.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from mars_platform.data.prompt_encoding import control_tokens
from mars_platform.errors import UserError
from mars_serve.engine.decoding_options import GrammarKind, GrammarSpec
from mars_serve.engine.sampling.grammar_tokens import with_secret_names
from mars_serve.engine.sampling.grammar_trial import (
    NICENESS,
    GrammarLimits,
    GrammarTrial,
    SerializedTokenizer,
    TrialFailed,
)

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
_NOTHING_ALLOWED = f"{_NOTHING_FITS} but control tokens or unused ids"
_MAX_REASON = 300
"""Most characters of llguidance's message that an error repeats."""
_stack_size_lock = threading.Lock()

_Kept = TypeVar("_Kept", str, "CompiledGrammar")
_Made = TypeVar("_Made")


_Bits = NDArray[np.uint8]
"""A set of tokens, [ceil(vocabulary / 8)]: one bit for each token, the lowest bit first."""


@dataclass(frozen=True)
class _Vocabulary:
    """The tokenizer in llguidance's form, and its tokens by kind."""

    tokenizer: LLTokenizer
    serialized: SerializedTokenizer
    size: int
    """Number of logits or, if that is larger, of the tokenizer's tokens."""
    num_logits: int
    """Number of logits alone."""
    end_ids: frozenset[int]
    ends: _Bits
    words: _Bits
    """Tokens of the tokenizer, except end tokens and control tokens."""


class GrammarError(ValueError):
    """A limit of a grammar is reached, or no token may follow; its own request is to blame."""


class PutOff(Exception):
    """The result of a row whose grammar had no time left in its step, or no parser yet: it runs
    again in the next.
    """


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

        ``vocabulary`` is the number of logits; ids beyond the tokenizer's are never allowed, and an
        adapter's mask may be a token without a logit.
        """
        self._tokenizer = tokenizer
        self._size = vocabulary
        self._end_ids = frozenset(end_tokens)
        self._limits = limits or GrammarLimits()
        self._trial: GrammarTrial | None = None
        self._cache: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._refused: OrderedDict[GrammarSpec, str] = OrderedDict()
        self._compiling: dict[GrammarSpec, Future[CompiledGrammar]] = {}
        self._lock = threading.Lock()  # of the three above; never held while a grammar compiles
        self._vocabulary_lock = threading.Lock()

    def isolate(self) -> None:
        """From now on, try each new grammar in a process of its own before compiling it here."""
        self._trial = GrammarTrial()

    def close(self) -> None:
        """End the process in which grammars are tried, if there is one."""
        if self._trial is not None:
            self._trial.close()

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Return a grammar ready for use, from the cache if it is there.

        Raises:
            UserError: the grammar is too long, does not parse, uses an unsupported feature, exceeds
                a limit or matches nothing; or the model has no end token, or a tokenizer with which
                grammars do not work.
        """
        if len(spec.text) > self._limits.max_length:
            raise UserError(
                f"grammar: the {_NAMES[spec.kind]} has {len(spec.text)} characters; "
                f"use at most {self._limits.max_length}"
            )
        with self._lock:
            for name in [name for name, kept in self._cache.items() if kept.is_spent]:
                del self._cache[name]
            compiled = self._find(spec)
            if compiled is not None:
                return compiled
            begun = self._compiling.get(spec)
            mine = self._compiling[spec] = begun or Future()
        if begun is None:
            self._fulfil(mine, spec)
        return mine.result()

    def _find(self, spec: GrammarSpec) -> CompiledGrammar | None:
        if spec in self._refused:
            self._refused.move_to_end(spec)
            raise UserError(self._refused[spec])
        compiled = self._cache.get(spec)
        if compiled is None:
            return None
        self._cache.move_to_end(spec)
        return compiled

    def _fulfil(self, future: Future[CompiledGrammar], spec: GrammarSpec) -> None:
        """Compile a grammar for all who wait for it, and keep the result or the refusal."""
        try:
            compiled = self._compile(spec)
        except BaseException as error:
            with self._lock:
                del self._compiling[spec]
                if isinstance(error, UserError):
                    self._keep(self._refused, spec, str(error))
            future.set_exception(error)
        else:
            with self._lock:
                del self._compiling[spec]
                self._keep(self._cache, spec, compiled)
            future.set_result(compiled)

    def _keep(self, kept: OrderedDict[GrammarSpec, _Kept], spec: GrammarSpec, value: _Kept) -> None:
        kept[spec] = value
        kept.move_to_end(spec)
        if len(kept) > self._limits.num_cached:
            kept.popitem(last=False)

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        with self._vocabulary_lock:
            vocabulary = self._vocabulary
        limits = self._limits

        def build() -> CompiledGrammar:
            words = vocabulary.words | _pack(spec.control_ids, vocabulary.size)
            compiled = CompiledGrammar(source, limits, vocabulary, words)
            _check(compiled.parser)
            _try_out(compiled)
            return compiled

        try:
            source = _source(spec)
            if self._trial is not None:
                self._trial.run(source, vocabulary.serialized, limits)
            return _start_with_stack(build, limits.stack(source)).result()
        except (GrammarError, TrialFailed) as error:
            raise UserError(
                f"grammar: the {_NAMES[spec.kind]} cannot be used ({_reason(str(error))}); change "
                "it accordingly"
            ) from error

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        if not self._end_ids:
            raise UserError(
                "grammar: the model has no end token, so no output could end; "
                "set eos_token_id in its configuration"
            )
        text = _serialize(self._tokenizer)
        control = control_tokens(self._tokenizer, self._end_ids).keys()
        size = max(self._size, len(self._tokenizer))
        serialized = SerializedTokenizer(
            with_secret_names(text, control), size, sorted(self._end_ids)
        )
        try:
            tokenizer = serialized.load()
        except ValueError as error:
            raise UserError(
                "grammar: the model's tokenizer does not work with grammars "
                f"({_shorten(str(error))}); use a model with a fast byte-level tokenizer"
            ) from error
        words = set(self._tokenizer.get_vocab().values()) - self._end_ids - control
        bits = (_pack(tokens, size) for tokens in (self._end_ids, words))
        return _Vocabulary(tokenizer, serialized, size, self._size, self._end_ids, *bits)


@dataclass(eq=False)
class CompiledGrammar:
    """A grammar that has been found usable; any thread may call it."""

    source: str
    """The grammar in llguidance's form."""
    limits: GrammarLimits
    vocabulary: _Vocabulary
    words: _Bits
    """Tokens that it may ask for, except end tokens."""
    parser: LLMatcher = field(init=False)
    """Parser at the start of an output; never advanced."""
    is_spent: bool = field(default=False, init=False)
    """Whether a matcher has reached a limit. All matchers share the lexer's states and would soon
    reach it, too, so the grammar has to be compiled anew."""

    def __post_init__(self) -> None:
        """Compile the grammar, which a caller has to check."""
        self.parser = self._compiled()

    def parser_behind(self, tokens: Sequence[int]) -> Future[LLMatcher]:
        """Begin to make a parser for one output alone, at the end of its tokens so far."""

        def build() -> LLMatcher:
            parser = self._compiled()
            for token in tokens:  # one by one, since it holds up other threads meanwhile
                parser.try_consume_tokens([token])
            parser.compute_bitmask()
            return parser

        return _start_with_stack(build, self.limits.stack(self.source))

    def _compiled(self) -> LLMatcher:
        limits = self.limits.for_parser()
        return LLMatcher(self.vocabulary.tokenizer, self.source, log_level=0, limits=limits)

    def matcher(self) -> Matcher:
        """Return a matcher at the start of an output; takes some microseconds."""
        return Matcher(self)


class Matcher:
    """Position of one output in a grammar; not to be used after a method has raised GrammarError.

    The allowed tokens depend only on the tokens taken, not on queries or rollbacks in between. Once
    the outputs of a grammar have used up the states that they share, each goes on with a parser of
    its own; until that is ready, all methods raise `PutOff` and change nothing.
    """

    def __init__(self, grammar: CompiledGrammar, *, is_shared: bool = True) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._parser = grammar.parser.deep_copy()
        self._own: Future[LLMatcher] | None = None
        self._is_shared = is_shared  # False once it has a parser of its own, or one is being made
        self._taken: list[int] = []
        self._num_ends = 0  # end tokens taken, of which the parser does not know
        self._ahead: list[int] = []  # tokens taken only to look ahead
        self.total_s = 0.0
        """CPU seconds that the grammar has taken for this output."""
        self.charged_s = 0.0
        """Part of them that `mars_serve.engine.sampling.grammar_budget` has counted."""
        self.last_s: float | None = None
        """CPU seconds that it took in the last step that gave tokens; None before the first."""
        self._begun_s = 0.0  # `total_s` when the current step began
        self._has_overrun = False

    def restarted(self) -> Matcher:
        """Return a matcher of the same grammar at the start of another output."""
        return Matcher(self._grammar)

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
            asks = any(self._parser.compute_bitmask())
            raise GrammarError(_NOTHING_ALLOWED if asks else _NOTHING_FITS)
        return allowed

    def advance(self, tokens: Sequence[int]) -> int:
        """Take the leading tokens that the grammar allows, and return their number."""
        with self._timed():
            self._return()
            num_taken = self._take(tokens)
        self._taken += tokens[:num_taken]
        self.last_s, self._begun_s = self.total_s - self._begun_s, self.total_s
        return num_taken

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` tokens taken."""
        self._return()
        self._give_back(num_tokens)
        del self._taken[len(self._taken) - num_tokens :]

    def allowed_after(self, tokens: Sequence[int]) -> Tensor | None:
        """Return what ``allowed`` would return after some more tokens.

        The result is None if the grammar does not allow these tokens, or no token after them. The
        parser keeps them until the next query, so each token of a growing run is parsed once.
        """
        with self._timed():
            allowed = self._look(tokens)
        if self.total_s - self._begun_s > self._grammar.limits.step_s:
            self._note_overrun()
        return allowed

    def _note_overrun(self) -> None:
        """Let one overrun pass: a virtual machine's CPU time counts the time its host pauses it."""
        if self._has_overrun:
            limit_ms = round(1000 * self._grammar.limits.step_s)
            raise GrammarError(f"steps of it take more than {limit_ms} ms")
        self._has_overrun, self._begun_s = True, self.total_s

    def _look(self, tokens: Sequence[int]) -> Tensor | None:
        pairs = zip(self._ahead, tokens, strict=False)
        num_common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        self._return(num_common)
        rest = tokens[num_common:]
        num_taken = self._take(rest)
        self._ahead += rest[:num_taken]
        return self._allowed() if num_taken == len(rest) else None

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the CPU time of a block, which does not depend on how busy the machine is."""
        begin = time.thread_time()
        try:
            yield
        finally:
            self.total_s += time.thread_time() - begin

    def _return(self, num_kept: int = 0) -> None:
        """Undo the tokens taken to look ahead, except the first ``num_kept``."""
        if self._own is not None:
            if not self._own.done():
                raise PutOff
            self._parser, self._own = self._own.result(), None
            self._check()
        self._give_back(len(self._ahead) - num_kept)
        del self._ahead[num_kept:]

    def _allowed(self) -> Tensor | None:
        bits = self._allowed_words()
        if self._may_end:
            bits |= self._vocabulary.ends
        if not bits.any():  # a grammar can name end tokens and unused ids as its tokens
            return None
        unpacked = np.unpackbits(bits, count=self._vocabulary.num_logits, bitorder="little")
        return torch.from_numpy(unpacked.view(np.bool_))  # [vocabulary]

    def _allowed_words(self) -> _Bits:
        if self._num_ends:
            return np.zeros_like(self._grammar.words)
        words = self._grammar.words
        bits = np.frombuffer(self._parser.compute_bitmask(), np.uint8, count=len(words))
        self._check()
        return bits & words

    def _take(self, tokens: Sequence[int]) -> int:
        ends = self._vocabulary.end_ids
        words = [] if self._num_ends else list(takewhile(lambda token: token not in ends, tokens))
        num_taken = self._parser.try_consume_tokens(words)
        if num_taken < len(words):
            self._parser.compute_bitmask()  # may find an error, which taking tokens alone does not
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
        except GrammarError as error:
            self._grammar.is_spent = True
            if not self._is_shared or "too many states" not in str(error):
                raise
            # perhaps others have used up the states
            self._is_shared = False
            self._ahead.clear()
            words = [token for token in self._taken if token not in self._vocabulary.end_ids]
            self._num_ends = len(self._taken) - len(words)
            self._own = self._grammar.parser_behind(words)
            raise PutOff from error


def _source(spec: GrammarSpec) -> str:
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
    """Use a grammar once, as some fail only in use: they match nothing, or cannot roll back."""
    matcher = Matcher(compiled, is_shared=False)
    ends = compiled.vocabulary.end_ids
    words = (token for token in matcher.allowed().nonzero().flatten().tolist() if token not in ends)
    first = next(words, None)
    if first is None:
        raise GrammarError("it matches nothing but the empty output")
    matcher.advance([first])
    matcher.rollback(1)


def _serialize(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a tokenizer as JSON, without the padding and truncation that grammars must not see."""
    backend = copy(getattr(tokenizer, "backend_tokenizer", None))
    if backend is None:
        raise UserError(
            "grammar: the model's tokenizer does not work with grammars (it is not a fast one); "
            "use a model with a fast byte-level tokenizer"
        )
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())


def _pack(tokens: Collection[int], size: int) -> _Bits:
    flags = np.zeros(size, np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little")


def _check(parser: LLMatcher) -> None:
    if parser.is_error():
        raise GrammarError(_reason(parser.get_error()))


def _reason(message: str) -> str:
    reason = _shorten(message)
    return _NOTHING_FITS if reason == "NoExtensionBias" else reason


def _shorten(message: str) -> str:
    """Return the reason in a message, on one line, without the grammar's text and parser state."""
    reason = re.split(r"\n *\d+ \| |\n<|; following special tokens", message)[0]
    reason = reason.split("\nerror: ")[-1]
    return " ".join(reason.split())[:_MAX_REASON]


def _give_way() -> None:
    """Lower the priority of this thread, which on Linux does not bear on the other threads."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS  # 0 means this thread
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(niceness, 19))


def _start_with_stack(function: Callable[[], _Made], num_bytes: int) -> Future[_Made]:
    """Run a function in a thread with a stack of a given size; only its used part takes memory.

    The thread gives way to those that run steps.
    """
    pool = ThreadPoolExecutor(max_workers=1, initializer=_give_way)
    with _stack_size_lock:  # the size holds for all threads that the process starts next
        before = threading.stack_size(num_bytes)
        try:
            return pool.submit(function)
        finally:
            threading.stack_size(before)
            pool.shutdown(wait=False)
