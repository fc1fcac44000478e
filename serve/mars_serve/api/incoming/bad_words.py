"""Finds the tokens of the texts that a request keeps out of its output."""

from __future__ import annotations

from functools import partial

from mars_platform.data.prompt_encoding import PromptEncoder
from mars_platform.errors import UserError
from mars_serve.api.errors import invalid_value, shown
from mars_serve.api.incoming.threads import TextThreads
from mars_serve.api.protocol import GenerationRequest

_FIELD = "bad_words"
_MAX_TOKENS = 1024
"""Most tokens of all bad words of a request, each form of a word counted."""
_BYTES_OF_WORD = 256
"""Bytes of a long text that take as long to tokenize as a word by itself."""

BadWords = tuple[tuple[int, ...], ...]
"""The tokens of each bad word."""


async def bad_words_of(
    body: GenerationRequest, encoder: PromptEncoder, threads: TextThreads
) -> BadWords:
    """Return the tokens of each bad word, as it begins a text and as it follows a space.

    The second form counts only if it has as many tokens and begins with another one. Otherwise the
    space is a token of its own, and the first form covers both.
    Source: vLLM, ``SamplingParams.update_from_tokenizer``.

    Raises:
        ApiError: status 400: a text has no tokens or cannot be told from a control token, or there
            are too many tokens.
    """
    texts = body.bad_words or []
    return await threads.run(len(texts) * _BYTES_OF_WORD, partial(_encoded, texts, encoder))


def _encoded(texts: list[str], encoder: PromptEncoder) -> BadWords:
    words = list[tuple[int, ...]]()
    for text in texts:
        word, spaced = (_tokens_of(before + text.lstrip(), encoder) for before in ("", " "))
        if not word:
            raise invalid_value(_FIELD, f"{shown(text)} has no tokens; leave it out")
        words.append(word)
        if len(spaced) == len(word) and spaced[0] != word[0]:
            words.append(spaced)
    num_tokens = sum(map(len, words))
    if num_tokens > _MAX_TOKENS:
        reason = f"they have {num_tokens} tokens; give fewer, with at most {_MAX_TOKENS} tokens"
        raise invalid_value(_FIELD, reason)
    return tuple(dict.fromkeys(words))


def _tokens_of(text: str, encoder: PromptEncoder) -> tuple[int, ...]:
    try:
        return tuple(encoder.text(text, add_special_tokens=False, with_spans=False).ids)
    except UserError as error:
        raise invalid_value(_FIELD, str(error)) from error
