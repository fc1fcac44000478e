"""Tokenizes a request's prompts and checks their lengths against the model and the limits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.data.conversations import render_prompt
from mars_platform.errors import UserError
from mars_serve.api.errors import ApiError, check_token_ids, invalid_value
from mars_serve.api.messages import ChatMessage, messages_for_template
from mars_serve.api.protocol import CompletionRequest, GenerationRequest
from mars_serve.api.text import EchoedPrompt, echo_text, echo_tokens, encode
from mars_serve.api.tools import RequestTools
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import LimitSettings

_LONG_PROMPT = 4096
"""Prompts with this many characters are tokenized in a thread, so that other requests go on."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request."""

    tokens: list[int]
    where: str
    """The body's field that holds the prompt, with its index if there are several: ``prompt[1]``.
    """
    echo: EchoedPrompt | None = None
    """The prompt's text as the response repeats it; None unless the request sets ``echo``."""


async def completion_prompts(
    body: CompletionRequest, model: ServedModel, limits: LimitSettings
) -> list[Prompt]:
    """Tokenize the prompts of a completion.

    Raises:
        ApiError: status 400: too many outputs are requested, or the model does not know a token id.
    """
    given = body.prompt
    is_one = isinstance(given, str) or isinstance(given[0], int)
    several: list[str | list[int]] = [given] if is_one else given  # type: ignore[list-item,assignment]
    check_num_choices(body, len(several), limits)
    tokenizer, prompts = model.checkpoint.tokenizer, []
    for index, each in enumerate(several):
        where = "prompt" if is_one else f"prompt[{index}]"
        if isinstance(each, str):
            tokens = await encode_prompt(tokenizer, each, add_special_tokens=True)
            echo = echo_text(tokenizer, each) if body.echo else None
        else:
            check_token_ids(where, each, len(tokenizer))
            tokens, echo = each, echo_tokens(tokenizer, each) if body.echo else None
        prompts.append(Prompt(tokens, where, echo))
    return prompts


def check_num_choices(body: GenerationRequest, num_prompts: int, limits: LimitSettings) -> None:
    """Refuse a request for more outputs than the server's limits allow.

    Raises:
        ApiError: status 400.
    """
    wanted = num_prompts * (body.n or 1)
    if wanted > limits.choices:
        field = "n" if (body.n or 1) > 1 else "prompt"
        reason = f"{wanted} outputs exceed the limit of {limits.choices} per request"
        raise invalid_value(field, f"{reason}; lower n or send several requests")


def render_chat(
    checkpoint: Checkpoint,
    messages: Sequence[ChatMessage],
    tools: RequestTools | None,
    template_kwargs: Mapping[str, Any] | None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Render a conversation with the model's chat template.

    Raises:
        ApiError: status 400: the template refuses the messages, tools or variables.
    """
    try:
        return render_prompt(
            checkpoint.tokenizer,
            messages_for_template(messages),
            tools.template_tools if tools else None,
            template_kwargs=template_kwargs,
            add_generation_prompt=add_generation_prompt,
        )
    except UserError as error:  # its message begins with the field's name
        param, _, reason = str(error).partition(": ")
        raise invalid_value(param, reason) from error


async def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool
) -> list[int]:
    """Return a prompt's token ids; a long text is tokenized in a thread."""
    if len(text) < _LONG_PROMPT:
        return encode(tokenizer, text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(encode, tokenizer, text, add_special_tokens=add_special_tokens)


def checked_max_tokens(
    model: ServedModel,
    limits: LimitSettings,
    prompt: Prompt,
    limit: tuple[str, int | None],
    default: int,
) -> int:
    """Return the most output tokens that a choice may have, checked against all limits.

    Args:
        model: The model that generates.
        limits: The server's limits.
        prompt: The tokenized prompt.
        limit: Name and value of the request's field that limits the output.
        default: The limit if that field is absent.

    Raises:
        ApiError: status 400: prompt and output are too long for the model or this server.
    """
    field, given = limit
    num_prompt, where = len(prompt.tokens), prompt.where
    if not num_prompt:
        raise invalid_value(where.partition("[")[0], f"{where} has no tokens; give at least one")
    if limits.prompt_tokens is not None and num_prompt > limits.prompt_tokens:
        raise _too_long(
            where, f"{num_prompt} tokens exceed this server's limit of {limits.prompt_tokens}"
        )
    max_tokens = min(default, limits.output_tokens or default) if given is None else given
    if limits.output_tokens is not None and max_tokens > limits.output_tokens:
        reason = f"{max_tokens} exceeds this server's limit of {limits.output_tokens}; lower it"
        raise invalid_value(field, reason)
    if num_prompt + max_tokens > model.max_length:
        place = f" of {where}" if where.endswith("]") else ""
        raise _too_long(
            field,
            f"{num_prompt} prompt tokens{place} and {max_tokens} output tokens make "
            f"{num_prompt + max_tokens}, more than this model's limit of {model.max_length}; "
            f"shorten the prompt or lower {field}",
        )
    return max_tokens


def _too_long(where: str, reason: str) -> ApiError:
    return invalid_value(where, reason, code="context_length_exceeded")
