"""Tokenizes the texts of a request, and checks their lengths against the model and the limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mars_platform.data.prompt_encoding import Encoded, TooManyTokens
from mars_platform.errors import UserError
from mars_serve.api.bounds import (
    check_arguments,
    check_copies,
    check_length,
    check_num_ids,
    most_tokens,
    num_bytes,
    num_bytes_of_chat,
    too_long,
)
from mars_serve.api.errors import ApiError, check_token_ids, invalid_value, shown
from mars_serve.api.keys import Caller
from mars_serve.api.messages import ChatMessage, messages_for_template
from mars_serve.api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    TokenizeRequest,
)
from mars_serve.api.text import EchoedPrompt, echo_text, echo_tokens
from mars_serve.api.tools import RequestTools
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import LimitSettings

_MAX_BAD_TOKENS = 1024
"""Most tokens of all bad words of a request, each form of a word counted."""
_BYTES_OF_WORD = 256
"""Bytes of a long text that take as long to tokenize as a bad word by itself."""
_IDS_BYTES = 4
"""Bytes of text that take as long as a byte of token ids in a body, by their checks and echo."""

BadWords = tuple[tuple[int, ...], ...]
"""The tokens of each bad word."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request."""

    tokens: list[int]
    where: str
    """The body's field that holds the prompt, with its index if there are several: ``prompt[1]``.
    """
    echo: EchoedPrompt | None = None
    """The prompt's text as the response repeats it; None unless the request sets ``echo``."""


@dataclass(frozen=True)
class Truncation:
    """How prompts are cut."""

    num_kept: int | None = None
    """Most tokens that a prompt keeps; None if it is not cut."""
    keeps_last: bool = True
    """Whether a prompt keeps its last tokens and not its first ones."""

    def cut(self, tokens: list[int]) -> list[int]:
        """Return the tokens that a prompt keeps."""
        if self.num_kept is None or len(tokens) <= self.num_kept:
            return tokens
        return tokens[-self.num_kept :] if self.keeps_last else tokens[: self.num_kept]


@dataclass(frozen=True)
class PromptReader:
    """Tokenizes the texts of one request, which may take long: it is made for `TextThreads`.

    Its methods raise `ApiError`: status 400 for what cannot fit or may not stand in a prompt.
    """

    model: ServedModel
    limits: LimitSettings
    caller: Caller

    def completion(self, body: CompletionRequest, truncation: Truncation) -> list[Prompt]:
        """Tokenize the prompts of a completion, and cut them."""
        given = body.prompt
        is_one = body.num_prompts is None
        several: list[str | list[int]] = [given] if is_one else given  # type: ignore[list-item,assignment]
        num_choices = len(several) * (body.n or 1)
        prompts, num_tokens = list[Prompt](), 0
        for index, each in enumerate(several):
            where = "prompt" if is_one else f"prompt[{index}]"
            if isinstance(each, str):
                prompts.append(self._prompt_of_text(body, each, where, truncation))
            else:
                prompts.append(self._prompt_of_ids(body, each, where, truncation))
            num_tokens += len(prompts[-1].tokens) * (body.n or 1)
            check_copies(where, num_tokens, num_choices)
        return prompts

    def _prompt_of_text(
        self, body: CompletionRequest, text: str, where: str, truncation: Truncation
    ) -> Prompt:
        echoes = bool(body.echo)
        found = self.text(
            body, text, where, with_spans=echoes, is_cut=truncation.num_kept is not None
        )
        ids = truncation.cut(found.ids)
        if not echoes:
            return Prompt(ids, where)
        if len(ids) < len(found.ids):
            return Prompt(ids, where, echo_tokens(self.model.checkpoint.tokenizer, ids))
        return Prompt(ids, where, echo_text(text, found.spans))

    def _prompt_of_ids(
        self, body: CompletionRequest, given: list[int], where: str, truncation: Truncation
    ) -> Prompt:
        ids = truncation.cut(given)
        check_num_ids(where, len(ids), self.model, self.limits)
        check_prompt_ids(where, ids, self.model, self.caller)
        tokenizer = self.model.checkpoint.tokenizer
        return Prompt(ids, where, echo_tokens(tokenizer, ids) if body.echo else None)

    def text(
        self,
        body: CompletionRequest | TokenizeRequest,
        text: str,
        where: str = "prompt",
        *,
        with_spans: bool = False,
        is_cut: bool = False,
    ) -> Encoded:
        """Return the token ids of a prompt given as text, by the body's fields on special tokens.

        A prompt that will be cut may have more tokens than fit. To find the characters of each
        token takes more memory.

        Raises:
            ApiError: also 403: the caller may not send control tokens.
        """
        size, encoder = num_bytes(text), self.model.prompts
        most = None if is_cut else most_tokens(self.model, self.limits)
        check_length(where, size, self.model, self.limits)
        if body.parse_special_tokens:
            _check_may_control(self.caller)
        encode = encoder.plain if body.parse_special_tokens else encoder.text
        adds = body.add_special_tokens is not False
        try:
            encoder.check_length(text, most)
            found = encode(text, add_special_tokens=adds, with_spans=with_spans)
        except TooManyTokens as error:
            raise too_long(where, str(error)) from error
        except UserError as error:
            raise invalid_value(where, str(error)) from error
        if body.parse_special_tokens:
            check_prompt_ids(where, found.ids, self.model, self.caller)
        return found

    def check_chat(
        self, body: ChatCompletionRequest | TokenizeRequest, messages: Sequence[ChatMessage]
    ) -> None:
        """Refuse a conversation that cannot fit or be read quickly, before `chat` renders it."""
        kwargs = body.chat_template_kwargs
        check_length(
            "messages", num_bytes_of_chat(messages, body.tools, kwargs), self.model, self.limits
        )
        check_arguments(messages)

    def chat(
        self,
        body: ChatCompletionRequest | TokenizeRequest,
        messages: Sequence[ChatMessage],
        tools: RequestTools | None,
        *,
        is_cut: bool = False,
    ) -> list[int]:
        """Return the token ids of a conversation in the model's chat template.

        One that will be cut may have more tokens than fit.

        Raises:
            ApiError: also where the template refuses the messages, tools or variables.
        """
        begins, continues = body.add_generation_prompt, bool(body.continue_final_message)
        if begins and continues:
            reason = "the last message cannot go on where a new one begins"
            remedy = "leave it out, or set add_generation_prompt: false"
            raise invalid_value("continue_final_message", f"{reason}; {remedy}")
        most = None if is_cut else most_tokens(self.model, self.limits)
        kwargs: Mapping[str, Any] | None = body.chat_template_kwargs
        if isinstance(body, ChatCompletionRequest):
            kwargs = template_kwargs(body, self.model)
        try:
            return self.model.prompts.chat(
                messages_for_template(messages),
                tools.template_tools if tools else None,
                template_kwargs=kwargs,
                add_generation_prompt=not continues if begins is None else begins,
                continue_final_message=continues,
                add_special_tokens=bool(body.add_special_tokens),
                max_tokens=most,
            )
        except TooManyTokens as error:
            raise too_long("messages", str(error)) from error
        except UserError as error:  # its message begins with the field's name
            param, _, reason = str(error).partition(": ")
            raise invalid_value(param, reason) from error

    def bad_words(self, body: GenerationRequest) -> BadWords:
        """Return the tokens of each bad word, as it begins a text and as it follows a space.

        Where the space is a token of its own, the first form covers both. vLLM leaves out other
        second forms, too, unless they have as many tokens as the first.
        """
        words = list[tuple[int, ...]]()
        for text in body.bad_words or ():
            word, spaced = (self._tokens_of_word(before + text.lstrip()) for before in ("", " "))
            if not word:
                raise invalid_value("bad_words", f"{shown(text)} has no tokens; leave it out")
            words.append(word)
            if spaced[-len(word) :] != word:
                words.append(spaced)
        num_tokens = sum(map(len, words))
        if num_tokens > _MAX_BAD_TOKENS:
            reason = f"they have {num_tokens} tokens; give fewer, with at most"
            raise invalid_value("bad_words", f"{reason} {_MAX_BAD_TOKENS} tokens")
        return tuple(dict.fromkeys(words))

    def _tokens_of_word(self, text: str) -> tuple[int, ...]:
        try:
            found = self.model.prompts.text(text, add_special_tokens=False, with_spans=False)
        except UserError as error:
            raise invalid_value("bad_words", str(error)) from error
        return tuple(found.ids)

    def truncation(self, body: GenerationRequest, default_tokens: int) -> Truncation:
        """Return how the body's prompts are cut, by default leaving room for some output tokens."""
        wanted, most = body.truncate_prompt_tokens, most_tokens(self.model, self.limits)
        if wanted is None:
            return Truncation()
        if wanted > most:
            reason = f"{wanted} exceeds the {most} tokens that a prompt may have; lower it"
            raise invalid_value("truncate_prompt_tokens", reason)
        if wanted < 0:
            num_output = body.limit[1]
            room = self.model.max_length - (default_tokens if num_output is None else num_output)
            wanted = max(1, min(most, room))
        return Truncation(wanted, keeps_last=body.truncation_side != "right")


def size_of(body: GenerationRequest, num_bytes: int) -> int:
    """Return about how many bytes of text take as long to read as a body of ``num_bytes``."""
    has_ids = isinstance(body, CompletionRequest) and not isinstance(body.prompt, str)
    of_prompts = num_bytes * (_IDS_BYTES if has_ids else 1)
    return of_prompts + _BYTES_OF_WORD * len(body.bad_words or ())


def template_kwargs(body: ChatCompletionRequest, model: ServedModel) -> dict[str, Any]:
    """Return the variables that a body gives its chat template, by its effort or by name."""
    effort = body.reasoning_effort
    values = {"enable_thinking": effort != "none", "thinking": effort != "none"}
    switches = () if effort is None else model.switches
    by_effort = {name: values.get(name, effort) for name in switches}
    return {**by_effort, **(body.chat_template_kwargs or {})}


def check_prompt_ids(where: str, ids: Sequence[int], model: ServedModel, caller: Caller) -> None:
    """Refuse token ids that may not stand in a prompt.

    These are ids without a token, the mask, and control tokens if the caller may not send them,
    except for those that the tokenizer itself adds before and behind a text.
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
    """Return the number of outputs; refuse more than the server's limits allow."""
    wanted = num_prompts * (body.n or 1)
    if wanted > limits.choices:
        field = "n" if (body.n or 1) > 1 else "prompt"
        reason = f"{wanted} outputs exceed the limit of {limits.choices} per request"
        raise invalid_value(field, f"{reason}; lower n or send several requests")
    return wanted


def echoed_message(body: ChatCompletionRequest) -> EchoedPrompt | None:
    """Return the last message as the answer repeats it; None if it does not."""
    if not body.echo or body.messages[-1].role != "assistant":
        return None
    return EchoedPrompt(messages_for_template(body.messages[-1:])[0]["content"])


def _check_may_control(caller: Caller) -> None:
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

    ``limit`` is name and value of the request's field, and ``default`` the value if it is absent.

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
    room = model.max_length - num_prompt
    if given is None and room < 1:
        reason = f"{num_prompt} tokens leave no room for an output within this model's limit of"
        raise too_long(where, f"{reason} {model.max_length}; shorten the prompt")
    max_tokens = min(default, limits.output_tokens or default, room) if given is None else given
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
