"""Tokenizes a request's prompts and checks their lengths against the model and the limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mars_platform.data.client_text import strings_in
from mars_platform.data.prompt_encoding import Encoded, PromptEncoder
from mars_platform.errors import UserError
from mars_serve.api.errors import ApiError, check_token_ids, invalid_value
from mars_serve.api.keys import Caller
from mars_serve.api.messages import ChatMessage, messages_for_template
from mars_serve.api.protocol import CompletionRequest, GenerationRequest
from mars_serve.api.text import EchoedPrompt, echo_text, echo_tokens
from mars_serve.api.tools import RequestTools
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import LimitSettings

_Found = TypeVar("_Found")
_LONG_PROMPT = 4096
"""Prompts with more characters are tokenized in a thread, so that other requests go on."""


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
    body: CompletionRequest, model: ServedModel, limits: LimitSettings, caller: Caller
) -> list[Prompt]:
    """Tokenize the prompts of a completion.

    Raises:
        ApiError: status 400: too many outputs are requested, or a token id may not stand in a
            prompt; 403: the caller may not send control tokens.
    """
    given = body.prompt
    is_one = isinstance(given, str) or isinstance(given[0], int)
    several: list[str | list[int]] = [given] if is_one else given  # type: ignore[list-item,assignment]
    check_num_choices(body, len(several), limits)
    parses = bool(body.parse_special_tokens)
    prompts = []
    for index, each in enumerate(several):
        where = "prompt" if is_one else f"prompt[{index}]"
        if isinstance(each, str):
            found = await encode_text(model, each, caller, parses_special=parses, where=where)
            tokens, echo = found.ids, echo_text(each, found.spans) if body.echo else None
        else:
            check_prompt_ids(where, each, model, caller)
            echo = echo_tokens(model.checkpoint.tokenizer, each) if body.echo else None
            tokens = each
        prompts.append(Prompt(tokens, where, echo))
    return prompts


def check_prompt_ids(where: str, ids: Sequence[int], model: ServedModel, caller: Caller) -> None:
    """Refuse token ids that may not stand in a prompt.

    These are ids without a token, the mask, and control tokens if the caller may not send them,
    except for those that the tokenizer itself adds before and behind a text.

    Raises:
        ApiError: status 400.
    """
    tokenizer, encoder = model.checkpoint.tokenizer, model.prompts
    check_token_ids(where, ids, len(tokenizer))
    num_before, num_behind = len(encoder.prefix), len(encoder.suffix)
    begin = num_before if list(ids[:num_before]) == encoder.prefix else 0
    end = len(ids) - (num_behind if list(ids[len(ids) - num_behind :]) == encoder.suffix else 0)
    metadata = model.checkpoint.metadata
    for token in set(ids):
        if metadata is not None and token == metadata.mask_token_id:
            reason = f"token id {token} is the mask, which no prompt may contain; leave it out"
            raise invalid_value(where, reason)
        if tokenizer.backend_tokenizer.id_to_token(token) is None:
            reason = f"token id {token} has no token; use ids of the model's tokens"
            raise invalid_value(where, reason)
    control = encoder.control.keys() & set(ids[begin:end])
    if control and not caller.may_control:
        first = min(control)
        reason = (
            f"token id {first} is the control token {encoder.control[first].content!r}; send "
            "/v1/chat/completions messages instead, or use a key with control_tokens: true"
        )
        raise invalid_value(where, reason)


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


async def encode_chat(
    model: ServedModel,
    messages: Sequence[ChatMessage],
    tools: RequestTools | None,
    template_kwargs: Mapping[str, Any] | None,
    *,
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
) -> list[int]:
    """Return the token ids of a conversation in the model's chat template.

    Raises:
        ApiError: status 400: the template refuses the messages, tools or variables.
    """
    turns, known = messages_for_template(messages), tools.template_tools if tools else None

    def encode(encoder: PromptEncoder) -> list[int]:
        return encoder.chat(
            turns,
            known,
            template_kwargs=template_kwargs,
            add_generation_prompt=add_generation_prompt,
            add_special_tokens=add_special_tokens,
        )

    try:
        return await _beside(model, encode, [turns, known, template_kwargs])
    except UserError as error:  # its message begins with the field's name
        param, _, reason = str(error).partition(": ")
        raise invalid_value(param, reason) from error


async def encode_text(
    model: ServedModel,
    text: str,
    caller: Caller,
    *,
    add_special_tokens: bool = True,
    parses_special: bool = False,
    where: str = "prompt",
) -> Encoded:
    """Return the token ids of a prompt given as text.

    Args:
        model: the model.
        text: the prompt.
        caller: the sender of the request.
        add_special_tokens: whether the tokenizer adds its special tokens.
        parses_special: whether control tokens in the text act, which the caller must be allowed.
        where: the body's field that holds the prompt.

    Raises:
        ApiError: status 400: the text spells the mask and that is to act, or it cannot be told from
            a control token; 403: the caller may not send control tokens.
    """
    if not parses_special:
        try:
            return await _beside(
                model, lambda each: each.text(text, add_special_tokens=add_special_tokens), text
            )
        except UserError as error:
            raise invalid_value(where, str(error)) from error
    if not caller.may_control:
        reason = "this caller may not send control tokens; leave it out, or use a key with "
        raise ApiError(
            403,
            f"parse_special_tokens: {reason}control_tokens: true",
            param="parse_special_tokens",
            code="not_allowed",
        )
    found = await _beside(
        model, lambda each: each.plain(text, add_special_tokens=add_special_tokens), text
    )
    check_prompt_ids(where, found.ids, model, caller)
    return found


async def _beside(
    model: ServedModel, encode: Callable[[PromptEncoder], _Found], values: object
) -> _Found:
    """Encode a prompt, if it is long in a thread."""
    num_characters = 0
    for text in strings_in(values):
        num_characters += len(text) + 1
        if num_characters > _LONG_PROMPT:
            return await asyncio.to_thread(encode, model.prompts)
    return encode(model.prompts)


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
