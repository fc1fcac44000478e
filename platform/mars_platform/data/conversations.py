"""The chat data format: one conversation a row, rendered by the model's own chat template.

Knows no tokenisation and no cluster.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError
from transformers import PreTrainedTokenizerBase

from mars_platform.config import describe_validation_error
from mars_platform.errors import UserError

_MISTRAL_CALLS = "[TOOL_CALLS]"
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")


class Message(BaseModel):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, StringConstraints(min_length=1)]


class Conversation(BaseModel):
    """A row of training or evaluation data; other columns are carried along untouched."""

    model_config = ConfigDict(extra="allow")

    messages: list[Message]


def parse_conversation(text: str) -> Conversation:
    """Parse one JSONL line into a conversation that ends with an assistant turn.

    Raises:
        UserError: what is wrong with the line; the caller adds file and line number.
    """
    if not text.strip():
        raise UserError("empty line")
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"not valid JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # numbers and nesting have limits, too
        raise UserError(f"not valid JSON ({error})") from error
    return validate_conversation(row)


def validate_conversation(row: Any) -> Conversation:
    """Check one decoded row; see `parse_conversation`."""
    if not isinstance(row, dict):
        raise UserError('a row must be an object with "messages"')
    try:
        conversation = Conversation.model_validate(row)
    except ValidationError as error:
        raise UserError(describe_validation_error(error, Conversation)) from error
    if not conversation.messages or conversation.messages[-1].role != "assistant":
        raise UserError("messages: the last turn must have the role 'assistant'")
    if len(conversation.messages) == 1:
        raise UserError("messages: an assistant turn needs a turn before it")
    return conversation


def read_answer(conversation: Conversation) -> str | None:
    """The answer that a row expects, in its column ``answer``; None where there is none.

    Raises:
        UserError: it is neither a text nor a number, or empty.
    """
    answer = (conversation.model_extra or {}).get("answer")
    if answer is None:
        return None
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise UserError("answer: must be a text or a number; leave it out where there is none")
    if not str(answer).strip():
        raise UserError("answer: must not be empty; leave it out where there is none")
    return str(answer)


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Text that asks the model for the next assistant turn.

    Args:
        tokenizer: with its chat template, which transformers runs in jinja's sandbox.
        messages: turns as Hugging Face's chat templates read them.
        tools: what the model may call: objects with ``type`` and ``function``.
        template_kwargs: further variables of the template, from whoever sent the request.
        add_generation_prompt: else the text ends with the last turn.

    Raises:
        UserError: the tokenizer has no chat template, the template refuses the messages or knows
            no tools, or a variable has a name that is taken; begins with the argument's name.
    """
    if tools and "tools" not in _template_of(tokenizer, tools):
        raise UserError(
            "tools: this model's chat template does not know tools; leave them out, or use a model "
            "that was trained with tools"
        )
    kwargs = template_kwargs or {}
    taken = sorted(_reserved_names(tokenizer) & kwargs.keys()) if kwargs else []
    if taken:
        raise UserError(
            f"chat_template_kwargs: {taken[0]!r} is set by the server; leave it out, and use names "
            "of the template's own variables"
        )
    return _render(tokenizer, messages, add_generation_prompt, tools or None, kwargs)


def _reserved_names(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Variables of a template that only the server sets."""
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    return {*parameters, *tokenizer.special_tokens_map, "messages", "conversations"}


def render_turns(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, loss_on: Literal["last", "all"]
) -> tuple[str, list[tuple[int, int]]]:
    """Render a whole conversation and find the assistant turns that the loss is taken on.

    Returns:
        The text, and the ``[start, end)`` character spans of the supervised turns. A span starts
        after the generation prompt and ends with the turn's end marker; white space that the
        template puts between turns is not part of it.

    Raises:
        UserError: the template cannot render the data, or renders a turn differently once
            others follow, so that its span cannot be told.
    """
    messages = [message.model_dump() for message in conversation.messages]
    text = _render(tokenizer, messages, False)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
    spans = []
    for index in turns if loss_on == "all" else turns[-1:]:
        prompt = render_prompt(tokenizer, messages[:index])
        upto = (
            text if index + 1 == len(messages) else _render(tokenizer, messages[: index + 1], False)
        )
        if not (upto.startswith(prompt) and text.startswith(upto)):
            raise UserError(
                "messages: the chat template does not render this assistant turn as a continuation "
                "of its generation prompt; use a template that does"
            )
        spans.append((len(prompt), len(upto.rstrip())))
    return text, spans


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None = None,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    turns = _adapted(messages, _template_of(tokenizer, tools))
    try:
        text = tokenizer.apply_chat_template(
            turns,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **kwargs,
        )
    except Exception as error:  # jinja templates raise whatever they like
        reason = " ".join(str(error).split())
        raise UserError(f"messages: the chat template cannot render them ({reason})") from error
    assert isinstance(text, str)
    return text


def _template_of(
    tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None = None
) -> str:
    """The template's text; of several, the one for tools where there are any."""
    if tokenizer.chat_template is None:
        raise UserError(
            "messages: the tokenizer has no chat template; add one as chat_template.jinja"
        )
    try:
        template = tokenizer.get_chat_template(tools=tools)
    except ValueError as error:
        raise UserError(f"messages: there is no chat template to use ({error})") from error
    assert isinstance(template, str)
    return template


def _adapted(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """The turns in the terms that a template knows.

    Few know the role developer, and some that do not leave such a turn out without a word; its
    older name is system. Mistral's demand call ids of nine characters.
    """
    if "developer" not in template:
        messages = [
            {**turn, "role": "system"} if turn["role"] == "developer" else turn for turn in messages
        ]
    return [_with_short_ids(turn) for turn in messages] if _MISTRAL_CALLS in template else messages


def _with_short_ids(turn: dict[str, Any]) -> dict[str, Any]:
    if "tool_call_id" in turn:
        turn = {**turn, "tool_call_id": _short_id(turn["tool_call_id"])}
    if "tool_calls" in turn:
        calls = [{**call, "id": _short_id(call["id"])} for call in turn["tool_calls"]]
        turn = {**turn, "tool_calls": calls}
    return turn


def _short_id(identifier: str) -> str:
    if _SHORT_ID.fullmatch(identifier):
        return identifier
    return hashlib.sha256(identifier.encode()).hexdigest()[:9]
