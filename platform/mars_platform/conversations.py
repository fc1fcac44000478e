"""The chat data format: one conversation a row, rendered by the model's own chat template.

Knows no tokenisation and no cluster.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError
from transformers import PreTrainedTokenizerBase

from mars_platform.config import describe_validation_error
from mars_platform.errors import UserError


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


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """Text that asks the model for the next assistant turn.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses the messages.
    """
    return _render(tokenizer, messages, add_generation_prompt=True)


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
    text = _render(tokenizer, messages, add_generation_prompt=False)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
    spans = []
    for index in turns if loss_on == "all" else turns[-1:]:
        prompt = render_prompt(tokenizer, messages[:index])
        upto = (
            text
            if index + 1 == len(messages)
            else _render(tokenizer, messages[: index + 1], add_generation_prompt=False)
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
    messages: list[dict[str, str]],
    *,
    add_generation_prompt: bool,
) -> str:
    if tokenizer.chat_template is None:
        raise UserError("the tokenizer has no chat template; add one as chat_template.jinja")
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # jinja templates raise whatever they like
        raise UserError(f"messages: the chat template cannot render them ({error})") from error
    assert isinstance(text, str)
    return text
