"""Between text and tokens: prompts in, incremental text out. Knows no HTTP."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"  # what bytes that are no character decode to
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextStream:
    """Turns accepted tokens into text as they come; never splits a UTF-8 character.

    The parts joined equal the decoded whole, whatever the split into passes. ``hidden`` tokens have
    no text; by default those are the special ones.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, hidden: frozenset[int] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._stream = DecodeStream(skip_special_tokens=hidden is None)
        self._tokens: list[int] = []
        self._length = 0

    def push(self, tokens: Sequence[int], *, last: bool) -> str:
        """Text that these tokens complete; with ``last``, also what is left of the output."""
        if self._hidden is not None:
            tokens = [token for token in tokens if token not in self._hidden]
        self._tokens += tokens
        backend = self._tokenizer.backend_tokenizer
        parts = [self._stream.step(backend, token) for token in tokens]
        text = "".join(part for part in parts if part)
        self._length += len(text)
        if last:
            skip = self._hidden is None
            whole = decode(self._tokenizer, self._tokens, skip_special_tokens=skip)
            text += whole[self._length :]
        return text


@dataclass(frozen=True)
class StopRules:
    """What ends an output's text beside the model's own end tokens."""

    strings: tuple[str, ...] = ()
    """None of them empty."""
    tokens: frozenset[int] = frozenset()
    """Tokens at which the engine ends the output."""
    in_output: bool = False
    """Whether the text has what ended it."""
    min_tokens: int = 0
    """A string that these first tokens complete does not end the output."""


@dataclass(frozen=True)
class OutputPart:
    """What one forward pass gave of an output."""

    text: str
    num_tokens: int
    """Of the pass's tokens, those up to the one that completed a stop string."""
    offsets: list[int]
    """Of each of those tokens: characters of the output before it, held ones included. Bytes count
    once it is known which character they make, or that they make none."""
    is_stopped: bool
    """Whether a stop string was found; the output ends here."""


class OutputText:
    """The text of an output up to a stop string, found wherever tokens and passes part it.

    Text that may be the beginning of a stop string is held back until it is known not to be one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        rules: StopRules,
        hidden: frozenset[int] | None = None,
    ) -> None:
        self._stream = TextStream(tokenizer, hidden)
        self._rules = rules
        self._held = ""
        self._length = 0
        """Characters released."""
        self._num_tokens = 0

    def push(self, tokens: Sequence[int], *, last: bool) -> OutputPart:
        """Text that one pass's tokens release; with ``last``, also what was held back.

        The split into passes does not change where the output stops: tokens are looked at one by
        one, and of several strings that one token completes the one that begins first counts.
        """
        parts, offsets, end = list[str](), list[int](), len(tokens) - 1
        for index, token in enumerate(tokens):
            offsets.append(self._length + len(self._held))
            released, is_stopped = self._push_one(token, last=last and index == end)
            parts.append(released)
            if is_stopped:
                return OutputPart("".join(parts), index + 1, offsets, is_stopped=True)
        if last:
            parts.append(self._held)
        return OutputPart("".join(parts), len(tokens), offsets, is_stopped=False)

    def _push_one(self, token: int, *, last: bool) -> tuple[str, bool]:
        """Text that a token releases, and whether it completed a stop string."""
        self._num_tokens += 1
        is_hidden = token in self._rules.tokens and not self._rules.in_output
        new = self._stream.push([] if is_hidden else [token], last=last)
        text = self._held + new
        if self._num_tokens > self._rules.min_tokens:
            end = _stop_end(text, len(self._held), self._rules)
            if end is not None:
                return text[:end], True
        keep = _num_held(text, self._rules.strings)
        self._held = text[len(text) - keep :]
        self._length += len(text) - keep
        return text[: len(text) - keep], False


def _stop_end(text: str, num_old: int, rules: StopRules) -> int | None:
    """Where the output ends if a stop string ends behind the first ``num_old`` characters."""
    found = []
    for string in rules.strings:
        start = text.find(string, max(0, num_old - len(string) + 1))
        if start >= 0:
            found.append((start, start + len(string)))
    if not found:
        return None
    start, end = min(found)
    return end if rules.in_output else start


def _num_held(text: str, strings: Sequence[str]) -> int:
    """Length of the longest end of ``text`` with which a stop string may begin."""
    longest = max((len(string) for string in strings), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(len(string) > length and string.startswith(end) for string in strings):
            return length
    return 0


@dataclass
class TokenBytes:
    """The bytes of single tokens, as log-probabilities report them; special tokens by name."""

    tokenizer: PreTrainedTokenizerBase
    _known: dict[int, bytes] = field(default_factory=dict)

    def bytes_of(self, token: int) -> bytes:
        """Bytes that a token adds to an output."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def name_of(self, token: int) -> str:
        r"""Text of a token; one that is no whole text is ``bytes:\xf0\x9f``, as with OpenAI."""
        found = self.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def _find(self, token: int) -> bytes:
        once, twice = self._decode([token]), self._decode([token, token])
        if _REPLACEMENT not in once:
            return twice[len(once) :].encode()  # the first of an output may lose its space
        name = self.tokenizer.convert_ids_to_tokens(token)
        fallback = _BYTE_FALLBACK.fullmatch(name)
        if fallback:
            return bytes([int(fallback[1], 16)])
        if all(character in _BYTE_OF for character in name):
            return bytes(_BYTE_OF[character] for character in name)
        return once.encode()

    def _decode(self, tokens: list[int]) -> str:
        text = self.tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


def _byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (GPT-2's tokenizer).

    Bytes that are printable in Latin-1 stand for themselves, the others follow from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF = _byte_level_alphabet()


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the tokens that are no text."""
    known = tokenizer.added_tokens_decoder
    return frozenset(token for token, entry in known.items() if entry.special)


def decode(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], *, skip_special_tokens: bool = True
) -> str:
    """Text of some output tokens, without special tokens unless told."""
    text = tokenizer.decode(
        tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a prompt; rendered chat templates bring their own special tokens."""
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    return ids


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt as a response repeats it."""

    text: str
    offsets: list[int]
    """Of each token: characters of the text before it."""


def echo_text(tokenizer: PreTrainedTokenizerBase, text: str) -> EchoedPrompt:
    """A prompt given as text; special tokens that the tokenizer adds take no room in it."""
    spans: list[tuple[int, int]] = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    ends = list(accumulate((end for _, end in spans), max, initial=0))
    pairs = zip(spans, ends, strict=False)
    starts = [start if end > 0 else before for (start, end), before in pairs]
    return EchoedPrompt(text, starts)


def echo_tokens(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> EchoedPrompt:
    """A prompt given as token ids; special tokens are spelled out."""
    stream = TextStream(tokenizer, hidden=frozenset())
    parts, offsets = list[str](), list[int]()
    length = 0
    for token in tokens:
        offsets.append(length)
        parts.append(stream.push([token], last=False))
        length += len(parts[-1])
    parts.append(stream.push([], last=True))
    return EchoedPrompt("".join(parts), offsets)
