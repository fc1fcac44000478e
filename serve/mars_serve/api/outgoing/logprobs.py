"""Log-probabilities in OpenAI's two response shapes, and those of prompts in vLLM's.

Source: OpenAI API reference, ``logprobs`` of "Completions" and of "Chat"; vLLM,
``prompt_logprobs``.
"""

from collections.abc import Sequence
from typing import Any

from mars_serve.api.outgoing.choices import ReportedToken
from mars_serve.api.text import TokenBytes
from mars_serve.engine.outputs import TokenLogprob

_LEAST_LOGPROB = -9999.0
"""Log-probability that OpenAI reports for impossible tokens, since JSON has no infinity."""


def chat_logprobs(reported: Sequence[ReportedToken], names: TokenBytes) -> dict[str, Any]:
    """Return the log-probabilities of a chat, one object per token.

    The key ``from_mask`` is an extension of OpenAI's shape.
    """
    content = []
    for each in reported:
        assert each.logprob is not None, "a chat does not echo its prompt"
        top = [_chat_token(token, value, names) for token, value in each.logprob.top]
        entry = _chat_token(each.token, each.logprob.logprob, names)
        content.append({**entry, "top_logprobs": top, "from_mask": each.logprob.from_mask})
    return {"content": content, "refusal": None}


def completion_logprobs(reported: Sequence[ReportedToken], names: TokenBytes) -> dict[str, Any]:
    """Return the log-probabilities of a completion, as parallel lists with an item per token.

    The key ``from_mask`` is an extension of OpenAI's shape.
    """
    values = [each.logprob for each in reported]
    return {
        "tokens": [names.name_of(each.token) for each in reported],
        "token_logprobs": [value and max(value.logprob, _LEAST_LOGPROB) for value in values],
        "top_logprobs": [_top_by_name(each.token, each.logprob, names) for each in reported],
        "text_offset": [each.offset for each in reported],
        "from_mask": [value is not None and value.from_mask for value in values],
    }


def prompt_logprobs(
    tokens: Sequence[int], scored: Sequence[TokenLogprob], num_top: int, names: TokenBytes
) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt's tokens, null for the first one.

    Each is an object by token id, of the token itself and of the ``num_top`` likeliest ones.
    """
    rows: list[dict[str, Any] | None] = [None]
    for token, value in zip(tokens[1:], scored, strict=True):
        found = {token: (value.logprob, value.rank)}
        for rank, (each, logprob) in enumerate(value.top[:num_top], start=1):
            found.setdefault(each, (logprob, rank))
        rows.append(
            {
                str(each): {
                    "logprob": max(logprob, _LEAST_LOGPROB),
                    "rank": rank,
                    "decoded_token": names.text_of(each),
                }
                for each, (logprob, rank) in found.items()
            }
        )
    return rows


def _chat_token(token: int, logprob: float, names: TokenBytes) -> dict[str, Any]:
    return {
        "token": names.name_of(token),
        "logprob": max(logprob, _LEAST_LOGPROB),
        "bytes": list(names.bytes_of(token)),
    }


def _top_by_name(
    token: int, value: TokenLogprob | None, names: TokenBytes
) -> dict[str, float] | None:
    """Return log-probabilities by token text; of tokens with equal text the likeliest is kept."""
    if value is None:
        return None
    top: dict[str, float] = {}
    for each, logprob in [*value.top, (token, value.logprob)]:
        top.setdefault(names.name_of(each), max(logprob, _LEAST_LOGPROB))
    return top
