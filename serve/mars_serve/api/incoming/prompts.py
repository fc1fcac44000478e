"""The prompts of a request's body as token ids, checked against what the model takes.

Knows no HTTP beyond `ApiError`, and no way of decoding.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from mars_serve.api.errors import ApiError, invalid_value
from mars_serve.api.protocol import CompletionRequest, GenerationRequest
from mars_serve.api.text import EchoedPrompt, echo_text, echo_tokens, encode
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import LimitSettings

_LONG = 4096
"""Characters from which on tokenising takes so long that other requests should not wait for it."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request."""

    tokens: list[int]
    where: str
    """What of the body gave it: the field, and the place in it where there are several."""
    echo: EchoedPrompt | None = None
    """Where the response repeats it."""


async def completion_prompts(
    body: CompletionRequest, model: ServedModel, limits: LimitSettings
) -> list[Prompt]:
    """The prompts of a completion.

    Raises:
        ApiError: status 400: more outputs than this server takes, or ids that the model does not
            know.
    """
    given = body.prompt
    is_one = isinstance(given, str) or isinstance(given[0], int)
    several: list[str | list[int]] = [given] if is_one else given  # type: ignore[list-item,assignment]
    check_num_choices(body, len(several), limits)
    prompts = []
    for index, each in enumerate(several):
        where = "prompt" if is_one else f"prompt[{index}]"
        prompts.append(await _completion_prompt(each, where, model, echo=bool(body.echo)))
    return prompts


def check_num_choices(body: GenerationRequest, num_prompts: int, limits: LimitSettings) -> None:
    """Refuse more outputs than one request may ask for.

    Raises:
        ApiError: status 400.
    """
    wanted = num_prompts * (body.n or 1)
    if wanted > limits.choices:
        field = "n" if (body.n or 1) > 1 else "prompt"
        reason = f"{wanted} outputs are more than the {limits.choices} that one request may have"
        raise invalid_value(field, f"{reason}; lower n or send several requests")


async def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool
) -> list[int]:
    """Token ids of a prompt; a long one is no hindrance to other requests."""
    if len(text) < _LONG:
        return encode(tokenizer, text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(encode, tokenizer, text, add_special_tokens=add_special_tokens)


def checked_max_tokens(
    model: ServedModel,
    limits: LimitSettings,
    prompt: Prompt,
    limit: tuple[str, int | None],
    default: int,
) -> int:
    """Output tokens at the most; ``limit`` is the field that says so and its value.

    Raises:
        ApiError: status 400: prompt and output are longer than the model or this server takes.
    """
    field, given = limit
    num_prompt, where = len(prompt.tokens), prompt.where
    if not num_prompt:
        raise invalid_value(where.partition("[")[0], f"{where} has no tokens; give at least one")
    if limits.prompt_tokens is not None and num_prompt > limits.prompt_tokens:
        raise _too_long(
            where, f"{num_prompt} tokens are more than the {limits.prompt_tokens} that are taken"
        )
    max_tokens = min(default, limits.output_tokens or default) if given is None else given
    if limits.output_tokens is not None and max_tokens > limits.output_tokens:
        reason = f"{max_tokens} is more than the {limits.output_tokens} that are given; lower it"
        raise invalid_value(field, reason)
    if num_prompt + max_tokens > model.max_length:
        raise _too_long(
            field,
            f"{num_prompt} prompt tokens{_of(where)} and {max_tokens} output tokens make "
            f"{num_prompt + max_tokens}, more than the {model.max_length} that this model takes; "
            f"shorten the prompt or lower {field}",
        )
    return max_tokens


def _of(where: str) -> str:
    return f" of {where}" if where.endswith("]") else ""


def _too_long(where: str, reason: str) -> ApiError:
    param = where.partition("[")[0]
    return ApiError(400, f"{where}: {reason}", param=param, code="context_length_exceeded")


async def _completion_prompt(
    given: str | list[int], where: str, model: ServedModel, *, echo: bool
) -> Prompt:
    tokenizer = model.checkpoint.tokenizer
    if isinstance(given, str):
        tokens = await encode_prompt(tokenizer, given, add_special_tokens=True)
        return Prompt(tokens, where, echo_text(tokenizer, given) if echo else None)
    limit = len(tokenizer)
    if max(given) >= limit:
        reason = f"token id {max(given)} is not below the {limit} known; use the model's own ids"
        raise ApiError(400, f"{where}: {reason}", param="prompt", code="invalid_value")
    return Prompt(given, where, echo_tokens(tokenizer, given) if echo else None)
