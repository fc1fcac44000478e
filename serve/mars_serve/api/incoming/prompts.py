"""Tokenizes a request's prompts and checks their lengths against the model and the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mars_platform.data.prompt_encoding import Encoded, TooManyTokens
from mars_platform.errors import UserError
from mars_serve.api.errors import ApiError, check_token_ids, invalid_value
from mars_serve.api.incoming.sizes import (
    check_copies,
    check_length,
    check_num_ids,
    most_tokens,
    num_bytes,
    too_long,
)
from mars_serve.api.incoming.threads import TextThreads
from mars_serve.api.incoming.truncation import Truncation
from mars_serve.api.keys import Caller
from mars_serve.api.messages import ChatMessage, messages_for_template
from mars_serve.api.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from mars_serve.api.text import EchoedPrompt, echo_text, echo_tokens
from mars_serve.api.tools import RequestTools
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import LimitSettings

_BYTES_OF_ID = 8
"""Bytes of text that take as long as checking and decoding a token id."""


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
    body: CompletionRequest,
    model: ServedModel,
    limits: LimitSettings,
    caller: Caller,
    threads: TextThreads,
    truncation: Truncation,
) -> list[Prompt]:
    """Tokenize the prompts of a completion, and cut them.

    Raises:
        ApiError: status 400: too many outputs are requested, a prompt cannot fit, or a token id may
            not stand in a prompt; 403: the caller may not send control tokens; 503: many long
            prompts wait already.
    """
    given = body.prompt
    is_one = isinstance(given, str) or isinstance(given[0], int)
    several: list[str | list[int]] = [given] if is_one else given  # type: ignore[list-item,assignment]
    num_choices = check_num_choices(body, len(several), limits)
    prompts, num_tokens = list[Prompt](), 0
    for index, each in enumerate(several):
        where = "prompt" if is_one else f"prompt[{index}]"
        if isinstance(each, str):
            found = _prompt_of_text(body, each, where, model, limits, caller, threads, truncation)
            prompts.append(await found)
        else:
            ids = truncation.cut(each)
            check_num_ids(where, len(ids), model, limits)
            work = partial(_prompt_of_ids, body, ids, where, model, caller)
            prompts.append(await threads.run(len(ids) * _BYTES_OF_ID, work))
        num_tokens += len(prompts[-1].tokens) * (body.n or 1)
        check_copies(where, num_tokens, num_choices)
    return prompts


async def _prompt_of_text(
    body: CompletionRequest,
    text: str,
    where: str,
    model: ServedModel,
    limits: LimitSettings,
    caller: Caller,
    threads: TextThreads,
    truncation: Truncation,
) -> Prompt:
    echoes = bool(body.echo)
    found = await encode_text(
        model,
        text,
        caller,
        limits,
        threads,
        add_special_tokens=body.add_special_tokens is not False,
        parses_special=bool(body.parse_special_tokens),
        with_spans=echoes,
        is_cut=truncation.num_kept is not None,
        where=where,
    )
    ids = truncation.cut(found.ids)
    if not echoes:
        return Prompt(ids, where)

    def echo() -> EchoedPrompt:
        if len(ids) < len(found.ids):
            return echo_tokens(model.checkpoint.tokenizer, ids)
        return echo_text(text, found.spans)

    return Prompt(ids, where, await threads.run(len(text), echo))


def _prompt_of_ids(
    body: CompletionRequest, ids: list[int], where: str, model: ServedModel, caller: Caller
) -> Prompt:
    check_prompt_ids(where, ids, model, caller)
    return Prompt(ids, where, echo_tokens(model.checkpoint.tokenizer, ids) if body.echo else None)


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


def check_num_choices(body: GenerationRequest, num_prompts: int, limits: LimitSettings) -> int:
    """Return the number of outputs; refuse more than the server's limits allow.

    Raises:
        ApiError: status 400.
    """
    wanted = num_prompts * (body.n or 1)
    if wanted > limits.choices:
        field = "n" if (body.n or 1) > 1 else "prompt"
        reason = f"{wanted} outputs exceed the limit of {limits.choices} per request"
        raise invalid_value(field, f"{reason}; lower n or send several requests")
    return wanted


def echoed_message(body: ChatCompletionRequest) -> EchoedPrompt | None:
    """Return the last message as the answer repeats it; None if it does not."""
    last = messages_for_template(body.messages[-1:])[0]
    if not body.echo or last["role"] != "assistant":
        return None
    return EchoedPrompt(last["content"])


async def encode_chat(
    model: ServedModel,
    messages: Sequence[ChatMessage],
    tools: RequestTools | None,
    template_kwargs: Mapping[str, Any] | None,
    limits: LimitSettings,
    threads: TextThreads,
    *,
    size: int,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    add_special_tokens: bool | None = None,
    is_cut: bool = False,
) -> list[int]:
    """Return the token ids of a conversation in the model's chat template.

    Args:
        model: The model.
        messages: The conversation.
        tools: The tools that it offers.
        template_kwargs: Further variables of the template.
        limits: The server's limits.
        threads: Threads for long conversations.
        size: Bytes of all texts.
        add_generation_prompt: Whether the prompt ends with the header of an assistant turn; by
            default it does unless the last message is continued.
        continue_final_message: Whether the prompt ends where the last message's text does.
        add_special_tokens: Whether the tokenizer adds its special tokens.
        is_cut: Whether the prompt will be cut, so that it may have more tokens than fit.

    Raises:
        ApiError: status 400: the conversation cannot fit, or the template refuses the messages,
            tools or variables; 503: many long prompts wait already.
    """
    if add_generation_prompt and continue_final_message:
        reason = "the last message cannot go on where a new one begins"
        raise invalid_value(
            "continue_final_message", f"{reason}; leave it out, or set add_generation_prompt: false"
        )
    most = None if is_cut else most_tokens(model, limits)

    def encode() -> list[int]:
        return model.prompts.chat(
            messages_for_template(messages),
            tools.template_tools if tools else None,
            template_kwargs=template_kwargs,
            add_generation_prompt=not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
            continue_final_message=bool(continue_final_message),
            add_special_tokens=bool(add_special_tokens),
            max_tokens=most,
        )

    try:
        return await threads.run(size, encode)
    except TooManyTokens as error:
        raise too_long("messages", str(error)) from error
    except UserError as error:  # its message begins with the field's name
        param, _, reason = str(error).partition(": ")
        raise invalid_value(param, reason) from error


async def encode_text(
    model: ServedModel,
    text: str,
    caller: Caller,
    limits: LimitSettings,
    threads: TextThreads,
    *,
    add_special_tokens: bool = True,
    parses_special: bool = False,
    with_spans: bool = False,
    is_cut: bool = False,
    where: str = "prompt",
) -> Encoded:
    """Return the token ids of a prompt given as text.

    Args:
        model: the model.
        text: the prompt.
        caller: the sender of the request.
        limits: the server's limits.
        threads: threads for long texts.
        add_special_tokens: whether the tokenizer adds its special tokens.
        parses_special: whether control tokens in the text act, which the caller must be allowed.
        with_spans: whether the characters of each token are wanted, too, which takes more memory.
        is_cut: whether the prompt will be cut, so that it may have more tokens than fit.
        where: the body's field that holds the prompt.

    Raises:
        ApiError: status 400: the text cannot fit, it spells the mask and that is to act, or it
            cannot be told from a control token; 403: the caller may not send control tokens; 503:
            many long prompts wait already.
    """
    size, encoder = num_bytes(text), model.prompts
    most = None if is_cut else most_tokens(model, limits)
    check_length(where, size, model, limits)
    if parses_special:
        _check_may_control(caller)

    def encode() -> Encoded:
        encoder.check_length(text, most)
        encode_all = encoder.plain if parses_special else encoder.text
        return encode_all(text, add_special_tokens=add_special_tokens, with_spans=with_spans)

    try:
        found = await threads.run(size, encode)
    except TooManyTokens as error:
        raise too_long(where, str(error)) from error
    except UserError as error:
        raise invalid_value(where, str(error)) from error
    if parses_special:
        check_prompt_ids(where, found.ids, model, caller)
    return found


def _check_may_control(caller: Caller) -> None:
    """Refuse control tokens in a text from a caller who may not send them.

    Raises:
        ApiError: status 403.
    """
    if not caller.may_control:
        reason = "this caller may not send control tokens; leave it out, or use a key with "
        raise ApiError(
            403,
            f"parse_special_tokens: {reason}control_tokens: true",
            param="parse_special_tokens",
            code="not_allowed",
        )


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
        raise too_long(
            where, f"{num_prompt} tokens exceed this server's limit of {limits.prompt_tokens}"
        )
    max_tokens = min(default, limits.output_tokens or default) if given is None else given
    if limits.output_tokens is not None and max_tokens > limits.output_tokens:
        reason = f"{max_tokens} exceeds this server's limit of {limits.output_tokens}; lower it"
        raise invalid_value(field, reason)
    if num_prompt + max_tokens > model.max_length:
        place = f" of {where}" if where.endswith("]") else ""
        raise too_long(
            field,
            f"{num_prompt} prompt tokens{place} and {max_tokens} output tokens make "
            f"{num_prompt + max_tokens}, more than this model's limit of {model.max_length}; "
            f"shorten the prompt or lower {field}",
        )
    return max_tokens
