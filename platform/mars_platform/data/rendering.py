"""Renders conversations with the model's own chat template.

Imports no Ray or HTTP library.
"""

import hashlib
import inspect
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from mars_platform.data.client_text import Shield
from mars_platform.data.conversations import Conversation
from mars_platform.errors import UserError, one_line

_MISTRAL_CALLS = "[TOOL_CALLS]"
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
_JINJA = ImmutableSandboxedEnvironment()
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands behind a text that is to be continued while the template runs."""
THINKING_BEGIN, THINKING_END = "<think>", "</think>"


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    shield: Shield | None = None,
) -> str:
    """Render the prompt that asks the model for the next assistant turn.

    Args:
        tokenizer: tokenizer with a chat template, which transformers runs in jinja's sandbox.
        messages: turns in the form that Hugging Face's chat templates read.
        tools: functions that the model may call: objects with ``type`` and ``function``.
        template_kwargs: further variables of the template, set by the sender of a request.
        add_generation_prompt: whether the text ends with the header of an assistant turn.
        continue_final_message: whether the text ends where that of the last turn does.
        shield: keeps what the other arguments say apart from control tokens, and seals the text.

    Raises:
        UserError: the tokenizer has no chat template, the template refuses the messages or does not
            support tools, or a variable has a reserved name; the message starts with the name of
            the argument at fault.
    """
    if tools and "tools" not in _template_of(tokenizer, tools):
        raise UserError(
            "tools: this model's chat template does not know tools; leave them out, or use a model "
            "that was trained with tools"
        )
    if template_kwargs and (taken := sorted(_reserved_names(tokenizer) & template_kwargs.keys())):
        raise UserError(
            f"chat_template_kwargs: {taken[0]!r} is set by the server; leave it out, and use names "
            "of the template's own variables"
        )
    if not continue_final_message:
        return _render(
            tokenizer, messages, add_generation_prompt, tools or None, template_kwargs, shield
        )
    marked = _render(
        tokenizer, messages, False, tools or None, template_kwargs, shield, end_mark=_END_MARK
    )
    return _up_to_mark(marked, messages[-1]["content"])


def _up_to_mark(text: str, content: str) -> str:
    """Cut a rendered text at the mark behind its last turn's content.

    Source: transformers, ``render_jinja_template`` with ``continue_final_message``.

    Raises:
        UserError: the template has changed the content.
    """
    end = text.rfind(_END_MARK.strip())
    if end < 0 or content.strip() not in text:
        raise UserError(
            "continue_final_message: this model's chat template does not write the last message as "
            "it is; leave it out, or shorten the message to what the template keeps"
        )
    if text.startswith(_END_MARK, end):
        return text[:end]
    return text[:end].rstrip()  # the template has cut white space off the end of the content


def _reserved_names(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the template variables that only the server may set."""
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    return {*parameters, *tokenizer.special_tokens_map, "messages", "conversations"}


def render_turns(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    loss_on: Literal["last", "all"],
    *,
    shield: Shield | None = None,
) -> list[tuple[str, list[tuple[int, int]]]]:
    """Render a conversation as its model is served it, and find the supervised assistant turns.

    One text holds them all if each turn stands in the prompt of the next one as the model wrote it.
    Templates that drop what earlier turns thought need several.

    Args:
        tokenizer: tokenizer with a chat template.
        conversation: the conversation.
        loss_on: whether the last assistant turn is supervised or all of them, except for one that
            opens the conversation.
        shield: keeps the turns' texts apart from control tokens, and seals the text.

    Returns:
        Each text with the ``[start, end)`` character spans of its supervised turns. A span starts
        after the generation prompt and ends with the turn's end marker, without the white space
        that the template puts between turns.

    Raises:
        UserError: the template cannot render the data, or writes a turn otherwise than the model
            would behind its generation prompt.
    """
    messages = [turn.as_message() for turn in conversation.messages]
    tools, kwargs = conversation.tools, conversation.chat_template_kwargs
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
    found = list[tuple[str, list[tuple[int, int]]]]()
    for index in turns if loss_on == "all" else turns[-1:]:
        prompt = render_prompt(
            tokenizer, messages[:index], tools, template_kwargs=kwargs, shield=shield
        )
        text = _answered(tokenizer, prompt, messages[: index + 1], tools, kwargs, shield)
        span = (len(prompt), len(text.rstrip()))
        if found and prompt.startswith(found[-1][0]):
            found[-1] = (text, [*found[-1][1], span])
        else:
            found.append((text, [span]))
    return found


def _answered(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    kwargs: Mapping[str, Any] | None,
    shield: Shield | None,
) -> str:
    """Return a prompt with the last message as the model would write it behind the prompt.

    A generation prompt may open the thinking, which the template drops from a turn that is there.
    The thinking is then taken from the message; without any, it is closed at once.
    """
    text = _render(tokenizer, messages, False, tools, kwargs, shield)
    if text.startswith(prompt):
        return text
    head, begin, space = prompt.rpartition(THINKING_BEGIN)
    end_mark = _END_MARK.strip()
    marked = _render(tokenizer, messages, False, tools, kwargs, shield, end_mark=end_mark)
    _, mark, turn_end = marked.rpartition(end_mark)
    if not (begin and mark) or space.strip() or not text.startswith(head):
        raise UserError(
            "messages: the chat template does not render this assistant turn as a continuation "
            "of its generation prompt; use a template that does"
        )
    answer: str = messages[-1]["content"]
    if answer.lstrip().startswith(begin):
        answer = answer.lstrip().removeprefix(begin).removeprefix(space)
    elif THINKING_END not in answer:
        answer = f"{space}{THINKING_END}\n\n{answer}"
    return prompt + answer + turn_end


def variables_of(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the names in the code of a tokenizer's chat templates, without those of attributes."""
    templates = tokenizer.chat_template or ""
    names = set[str]()
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        tokens = [each[1:] for each in _JINJA.lex(template) if each[1] != "whitespace"]
        pairs = pairwise([("", ""), *tokens])
        names |= {name for (_, before), (kind, name) in pairs if kind == "name" and before != "."}
    return frozenset(names)


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    shield: Shield | None = None,
    end_mark: str = "",
) -> str:
    template = _template_of(tokenizer, tools)
    turns = _adapted(messages, template)
    try:
        if shield is not None:
            return _render_shielded(
                tokenizer, template, turns, add_generation_prompt, tools, kwargs, shield, end_mark
            )
        text = tokenizer.apply_chat_template(
            _marked(turns, end_mark),
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **(kwargs or {}),
        )
    except Exception as error:  # a template can raise any exception
        raise UserError(
            f"messages: the chat template cannot render them ({one_line(error)})"
        ) from error
    assert isinstance(text, str)
    return text


def _render_shielded(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    turns: list[dict[str, Any]],
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None,
    kwargs: Mapping[str, Any] | None,
    shield: Shield,
    end_mark: str,
) -> str:
    """Render as ``apply_chat_template`` does, which would make plain strings of shielded ones."""
    shielded = [
        {key: each if key == "role" else shield.of(each) for key, each in turn.items()}
        for turn in turns
    ]
    text = _compile_jinja_template(template).render(
        messages=[
            {key: each for key, each in turn.items() if each is not None}
            for turn in _marked(shielded, end_mark)
        ],
        tools=shield.of(tools),
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **{**tokenizer.special_tokens_map, **shield.of(kwargs or {})},
    )
    return shield.seal(text)


def _marked(turns: list[dict[str, Any]], end_mark: str) -> list[dict[str, Any]]:
    """Return the turns with a mark behind the content of the last one."""
    if not end_mark:
        return turns
    return [*turns[:-1], {**turns[-1], "content": turns[-1]["content"] + end_mark}]


def _template_of(
    tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None = None
) -> str:
    """Return the text of the chat template; of several, the one for tools if tools are given."""
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
    """Return the turns with roles and ids that a template supports.

    Few templates support the role developer, and some drop such a turn silently: it becomes system,
    the role's older name. Mistral's templates demand ids of nine characters for tool calls.
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
