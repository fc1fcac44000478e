"""Conversion between text and tokens: encodes prompts and decodes outputs incrementally."""

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, repeat

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mars_serve.engine.decoding_options import Span

_REPLACEMENT = "\ufffd"  # decoded from bytes that form no character
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_OF: dict[str, int] = {character: byte for byte, character in bytes_to_unicode().items()}
"""Byte of each character of a byte-level token (GPT-2's tokenizer)."""
_EACH_BYTE = "marsray.replace_each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class TextStream:
    """Decodes accepted tokens incrementally without splitting a UTF-8 character.

    It decodes the tokens' bytes, so the joined parts are the same however the tokens are divided
    into passes: they are the decoded whole, except that broken bytes leave whole characters beside
    them alone. Tokens in ``hidden`` add no text; by default these are the special tokens. The text
    follows on that of ``prompt``: only at the beginning of a text does a tokenizer leave out a
    space.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        hidden: frozenset[int] | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        self._hidden = frozenset() if hidden is None else hidden
        self._bytes = TokenBytes(tokenizer, skips_special=hidden is None)
        errors = _EACH_BYTE if self._bytes.falls_back else "replace"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        self._begins = not any(map(self._visible, reversed(prompt)))
        """Whether there is no text before the next token."""

    def _visible(self, token: int) -> bytes:
        return b"" if token in self._hidden else self._bytes.bytes_of(token)

    def push(self, tokens: Sequence[int], *, last: bool) -> str:
        """Return the text that these tokens complete; if ``last``, also all remaining text."""
        parts = [self._visible(token) for token in tokens]
        if self._begins and any(parts):
            index = next(index for index, part in enumerate(parts) if part)
            parts[index] = self._bytes.first_bytes_of(tokens[index])
            self._begins = False
        return self._decoder.decode(b"".join(parts), last)


@dataclass(frozen=True)
class StopRules:
    """Conditions that end an output beside the model's end tokens."""

    strings: tuple[str, ...] = ()
    """Stop strings, none of them empty."""
    tokens: frozenset[int] = frozenset()
    in_output: bool = False
    """Whether the text includes the string or token that ended it."""
    min_tokens: int = 0
    """Number of leading tokens in which a stop string does not end the output."""

    @cached_property
    def beginnings(self) -> frozenset[str]:
        """All texts that begin a stop string and are shorter."""
        return frozenset(each[:end] for each in self.strings for end in range(1, len(each)))


@dataclass(frozen=True)
class OutputPart:
    """The text and tokens that one forward pass adds to an output."""

    text: str
    num_tokens: int
    """Number of the pass's tokens up to the one that completed a stop string."""
    offsets: list[int]
    """For each of those tokens, the number of characters of the text before it, held ones included.
    Bytes count as soon as it is known which character they form, or that they form none."""
    reasoning: str = ""
    """Text of the model's thinking, if it is taken out of the output's text."""
    stop: str | None = None
    """The stop string that ended the output."""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found, which ends the output."""
        return self.stop is not None


class OutputText:
    """The text of an output up to a stop string, which may span tokens and passes.

    Text that may begin a stop string is held back until it is known whether it does. Thinking may
    be taken out, and stop strings are then looked for in what is left. The tokens that begin and
    end the thinking decide, not their text: a model may write about ``</think>``. The text of a
    marker, with what is left of a character that it cuts short, is dropped.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        rules: StopRules,
        hidden: frozenset[int] | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        self._stream = TextStream(tokenizer, hidden, prompt)
        self._rules = rules
        self._held = ""
        self._length = 0
        self._num_tokens = 0

    def push(
        self, tokens: Sequence[int], *, last: bool, spans: Sequence[Span] | None = None
    ) -> OutputPart:
        """Return the text that one pass's tokens release; if ``last``, also all held text.

        Tokens are examined one by one, so the end does not depend on how tokens are divided into
        passes. If one token completes several strings, the one that ends first counts. ``spans``
        has the span of each token and of the next one; None leaves the thinking in the text.
        """
        parts, reasoning, offsets = "", "", list[int]()
        pairs = pairwise(spans) if spans else repeat((Span.ANSWER, Span.ANSWER))
        for token, (span, following) in zip(tokens, pairs, strict=False):
            offsets.append(self._length + len(self._held))
            is_marker = Span.THINKING in (span, following) and span is not following
            is_end = last and len(offsets) == len(tokens)
            new = self._decoded(token, last=is_marker or is_end)
            if is_marker:
                continue
            if span is Span.THINKING:
                reasoning += new
                continue
            released, stop = self._released(new)
            parts += released
            if stop is not None:
                return OutputPart(parts, len(offsets), offsets, reasoning, stop)
        if last:
            parts += self._held
        return OutputPart(parts, len(tokens), offsets, reasoning)

    def _decoded(self, token: int, *, last: bool) -> str:
        self._num_tokens += 1
        is_hidden = token in self._rules.tokens and not self._rules.in_output
        return self._stream.push([] if is_hidden else [token], last=last)

    def _released(self, new: str) -> tuple[str, str | None]:
        """Return the text that further text releases, and the stop string that it completes."""
        if not self._rules.strings:  # nothing is ever held
            self._length += len(new)
            return new, None
        text = self._held + new
        if self._num_tokens > self._rules.min_tokens:
            found = _first_stop(text, len(self._held), self._rules.strings)
            if found is not None:
                start, stop = found
                return text[: start + len(stop) if self._rules.in_output else start], stop
        keep = _num_held(text, self._rules)
        self._held = text[len(text) - keep :]
        self._length += len(text) - keep
        return text[: len(text) - keep], None


def _first_stop(text: str, num_old: int, strings: Sequence[str]) -> tuple[int, str] | None:
    """Return start and text of the stop string that ends first after ``num_old`` characters.

    If several end at the same place, it is the longest.
    """
    found = []
    for string in strings:
        start = text.find(string, max(0, num_old - len(string) + 1))
        if start >= 0:
            found.append((start + len(string), start, string))
    return min(found)[1:] if found else None


def _num_held(text: str, rules: StopRules) -> int:
    """Return the length of the longest suffix of ``text`` that may begin a stop string."""
    longest = max(map(len, rules.strings), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((length for length in lengths if text[-length:] in rules.beginnings), 0)


@dataclass
class TokenBytes:
    """The bytes of single tokens; special tokens are spelled by name."""

    tokenizer: PreTrainedTokenizerBase
    names_ids: bool = False
    """Whether `name_of` gives a token's id and not its text."""
    skips_special: bool = False
    """Whether special tokens have no bytes."""
    _known: dict[int, bytes] = field(default_factory=dict)

    @property
    def falls_back(self) -> bool:
        """Whether bytes without a piece of their own are tokens, such as ``<0xE6>``."""
        return self.tokenizer.backend_tokenizer.token_to_id("<0xE6>") is not None

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text that has begun."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def first_bytes_of(self, token: int) -> bytes:
        """Return the bytes of a text's first token, which may lose its leading space."""
        text = self._decode([token])
        return self.bytes_of(token) if _REPLACEMENT in text else text.encode()

    def name_of(self, token: int) -> str:
        """Return a token as log-probabilities name it: by its text or, as vLLM does, by its id."""
        return f"token_id:{token}" if self.names_ids else self.text_of(token)

    def text_of(self, token: int) -> str:
        r"""Return a token's text, or OpenAI's notation ``bytes:\xf0\x9f`` if it is not valid
        UTF-8.
        """
        found = self.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def _find(self, token: int) -> bytes:
        once, twice = self._decode([token]), self._decode([token, token])
        if _REPLACEMENT in once:
            name = self.tokenizer.backend_tokenizer.id_to_token(token)
            fallback = _BYTE_FALLBACK.fullmatch(name)
            if fallback:
                return bytes([int(fallback[1], 16)])
            if all(character in _BYTE_OF for character in name):
                return bytes(_BYTE_OF[character] for character in name)
        return twice[len(once) :].encode()

    def _decode(self, tokens: list[int]) -> str:
        backend = self.tokenizer.backend_tokenizer  # which takes a tenth of the wrapper's time
        text: str = backend.decode(tokens, skip_special_tokens=self.skips_special)
        return text


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of the special tokens, which have no text."""
    known = tokenizer.added_tokens_decoder
    return frozenset(token for token, entry in known.items() if entry.special)


def decode(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], *, skip_special_tokens: bool = True
) -> str:
    """Decode output tokens, by default without special tokens."""
    text = tokenizer.decode(
        tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> list[int]:
    """Tokenize a trusted text, in which special tokens act; see `PromptEncoder` for all others."""
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    return ids


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt as the response repeats it."""

    text: str
    offsets: list[int] = field(default_factory=list)
    """For each token, the number of characters of the text before it; none if the response does not
    report the prompt's tokens."""


def echo_text(text: str, spans: Sequence[tuple[int, int]]) -> EchoedPrompt:
    """Return the echo of a prompt given as text, with the range of each token's characters.

    The range of a special token that the tokenizer has added is empty.
    """
    ends = list(accumulate((end for _, end in spans), max, initial=0))
    pairs = zip(spans, ends, strict=False)
    starts = [start if end > 0 else before for (start, end), before in pairs]
    return EchoedPrompt(text, starts)


def echo_tokens(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> EchoedPrompt:
    """Return the echo of a prompt given as token ids; special tokens are spelled by name."""
    stream = TextStream(tokenizer, hidden=frozenset())
    parts, offsets = list[str](), list[int]()
    length = 0
    for token in tokens:
        offsets.append(length)
        parts.append(stream.push([token], last=False))
        length += len(parts[-1])
    parts.append(stream.push([], last=True))
    return EchoedPrompt("".join(parts), offsets)
