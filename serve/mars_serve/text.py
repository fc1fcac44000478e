"""Between text and tokens: prompts in, incremental text out. Knows no HTTP."""

from __future__ import annotations

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase


class TextStream:
    """Turns accepted tokens into text as they come; never splits a UTF-8 character.

    The parts joined equal the decoded whole, whatever the split into passes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._length = 0

    def push(self, tokens: list[int], *, last: bool) -> str:
        """Text that these tokens complete; with ``last``, also what is left of the output."""
        self._tokens += tokens
        backend = self._tokenizer.backend_tokenizer
        parts = [self._stream.step(backend, token) for token in tokens]
        text = "".join(part for part in parts if part)
        self._length += len(text)
        if last:
            text += decode(self._tokenizer, self._tokens)[self._length :]
        return text


def decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """Text of some output tokens, without special tokens."""
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a prompt; rendered chat templates bring their own special tokens."""
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    return ids
