"""Refuses prompts that cannot fit before they are rendered, tokenized or copied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mars_platform.data.client_text import strings_in
from mars_serve.api.bounds import json_size_of
from mars_serve.api.errors import ApiError, invalid_value
from mars_serve.api.messages import ChatMessage, PastAssistantMessage, RefusalPart, Tool
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import LimitSettings

BYTES_PER_TOKEN = 16
"""Most bytes of text for each token that fits. Ordinary text has three to five; only long runs of
one character have more."""
MAX_COPIED_TOKENS = 2**20
"""Most prompt tokens of a request, counted once for each output: each goes to the model."""

MAX_VALUES_OF_ARGUMENTS = 2**15
"""Most names and values in the arguments of all tool calls of a conversation."""
MAX_REPORTED = 2**16
"""Most log-probabilities that a response holds at once. Each takes half a kilobyte of memory."""


def most_tokens(model: ServedModel, limits: LimitSettings) -> int:
    """Return the most tokens that a prompt may have."""
    return min(model.max_length, limits.prompt_tokens or model.max_length)


def check_length(where: str, num_bytes: int, model: ServedModel, limits: LimitSettings) -> None:
    """Refuse a text that is so long that its tokens cannot fit.

    Raises:
        ApiError: status 400.
    """
    most = most_tokens(model, limits)
    if num_bytes > most * BYTES_PER_TOKEN:
        reason = f"{num_bytes} bytes of text cannot fit into the limit of {most} tokens"
        raise too_long(where, f"{reason}; shorten it")


def check_num_ids(where: str, num_ids: int, model: ServedModel, limits: LimitSettings) -> None:
    """Refuse a list of token ids that is longer than any that fits.

    Raises:
        ApiError: status 400.
    """
    most = most_tokens(model, limits)
    if num_ids > most:
        raise too_long(where, f"{num_ids} tokens exceed the limit of {most}; send fewer")


def check_copies(where: str, num_tokens: int, num_outputs: int) -> None:
    """Refuse prompts that are too many tokens once each output has its own.

    Raises:
        ApiError: status 400.
    """
    most = MAX_COPIED_TOKENS
    if num_outputs > 1 and num_tokens > most:
        reason = f"{num_tokens} prompt tokens, counted for each output, exceed the limit of {most}"
        raise too_long(where, f"{reason} per request; lower n or send several requests")


def check_reported(field: str, num_outputs: int, num_tokens: int, num_likely: int) -> None:
    """Refuse a response with more log-probabilities than may be held at once.

    Args:
        field: the body's field that limits the output tokens.
        num_outputs: number of outputs.
        num_tokens: tokens of each whose log-probabilities are held together, those of an echoed
            prompt included.
        num_likely: likely tokens that are reported beside each token.

    Raises:
        ApiError: status 400.
    """
    if num_tokens > most_reported(num_outputs, num_likely):
        reason = f"{num_outputs} outputs of {num_tokens} tokens with {num_likely} likely ones each"
        remedy = f"lower {field}, n or the number of likely tokens, or send several requests"
        raise invalid_value(
            field, f"{reason} exceed the limit of {MAX_REPORTED} log-probabilities; {remedy}"
        )


def most_reported(num_outputs: int, num_likely: int) -> int:
    """Return the most tokens an output whose log-probabilities may be held together."""
    return max(1, MAX_REPORTED // (num_outputs * (num_likely + 1)))


def too_long(where: str, reason: str) -> ApiError:
    """Return the error for a prompt that is too long for the model or this server."""
    return invalid_value(where, reason, code="context_length_exceeded")


def checked_size_of_chat(
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    template_kwargs: Mapping[str, Any] | None,
    model: ServedModel,
    limits: LimitSettings,
) -> int:
    """Return the bytes of a conversation's texts; refuse one that cannot fit or be read quickly.

    Raises:
        ApiError: status 400.
    """
    size = num_bytes_of_chat(messages, tools, template_kwargs)
    check_length("messages", size, model, limits)
    check_arguments(messages)
    return size


def check_arguments(messages: Sequence[ChatMessage]) -> None:
    """Refuse tool calls whose arguments, JSON as text, would take long to read.

    Raises:
        ApiError: status 400.
    """
    texts = [text for message in messages for text in _arguments_of(message)]
    if sum(map(len, texts)) <= MAX_VALUES_OF_ARGUMENTS:
        return
    left = MAX_VALUES_OF_ARGUMENTS
    for text in texts:
        left -= json_size_of(text.encode("utf-8", "replace"), left).num_values
        if left < 0:
            reason = f"the arguments of tool calls have over {MAX_VALUES_OF_ARGUMENTS} names and"
            raise invalid_value("messages", f"{reason} values; shorten them")


def num_bytes(text: str) -> int:
    """Return the length of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def num_bytes_of_chat(
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    template_kwargs: Mapping[str, Any] | None,
) -> int:
    """Return the bytes of all texts of a conversation.

    A message counts as a token, which templates write for it at least, and a text as a byte more.
    """
    texts = (num_bytes(text) + 1 for message in messages for text in _texts_of(message))
    schemas = [tool.function.parameters for tool in tools or ()]
    told = [tool.function.description or "" for tool in tools or ()]
    others = (num_bytes(text) + 1 for text in strings_in([schemas, told, template_kwargs]))
    return len(messages) * BYTES_PER_TOKEN + sum(texts) + sum(others)


def _texts_of(message: ChatMessage) -> Iterator[str]:
    content = message.content
    parts: Iterable[Any] = () if content is None or isinstance(content, str) else content
    yield content if isinstance(content, str) else ""
    for part in parts:
        yield part.refusal if isinstance(part, RefusalPart) else part.text
    if isinstance(message, PastAssistantMessage):
        yield message.refusal or ""
        yield from _arguments_of(message)


def _arguments_of(message: ChatMessage) -> Iterator[str]:
    calls = message.tool_calls if isinstance(message, PastAssistantMessage) else None
    for call in calls or ():
        yield call.function.arguments
