"""Brings the messages of a conversation into the form that its chat template reads.

Training and serving use the same form, so the same conversation becomes the same tokens in both.

Imports no Ray or HTTP library.

Source: transformers, "Tool use"; the published chat templates of the families.
"""

import hashlib
import json
import re
from functools import lru_cache
from itertools import pairwise
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic_core import from_json
from transformers import PreTrainedTokenizerBase

THINKING_BEGIN, THINKING_END = "<think>", "</think>"
_MISTRAL_CALLS = "[TOOL_CALLS]"
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
_THINKING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names by which templates know the thinking of a message."""
_JINJA = ImmutableSandboxedEnvironment()


def adapted(
    messages: list[dict[str, Any]], template: str, *, as_text: bool = False
) -> list[dict[str, Any]]:
    """Return messages with the roles, names and ids that a template supports.

    Few templates support the role developer, and some drop such a turn silently: it becomes system,
    the role's older name. A tool result gets the name of the function that was called. Mistral's
    templates demand ids of nine characters for tool calls. Arguments of calls are objects where
    they can be, or JSON text if ``as_text``. Thinking has every name that a template may know, also
    where it begins the content, if the template knows one.
    """
    names = dict[str, str]()
    turns = list[dict[str, Any]]()
    for message in messages:
        turn = {key: each for key, each in message.items() if each is not None}
        if turn["role"] == "developer" and "developer" not in template:
            turn["role"] = "system"
        if calls := turn.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in calls}
            turn["tool_calls"] = [_with_arguments(call, as_text=as_text) for call in calls]
        if name := names.get(turn.get("tool_call_id", "")):
            turn.setdefault("name", name)
        turn = _with_thinking(turn, template)
        turns.append(_with_short_ids(turn) if _MISTRAL_CALLS in template else turn)
    return turns


def split_thinking(message: dict[str, Any]) -> tuple[str | None, str]:
    """Return the thinking of an assistant message, and the content without it.

    Thinking in the content ends with ``</think>`` and begins the content, with ``<think>`` or
    without, as behind a generation prompt that has it. It is None where there is none.
    """
    content: str = message["content"]
    if thinking := message.get(_THINKING_NAMES[0]):
        return thinking, content
    inside, end, behind = content.partition(THINKING_END)
    if inside.lstrip().startswith(THINKING_BEGIN):
        inside = inside.lstrip().removeprefix(THINKING_BEGIN)
    if not end or THINKING_BEGIN in inside:
        return None, content
    return inside, behind


def variables_of(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the names in the code of a tokenizer's chat templates, without those of attributes."""
    templates = tokenizer.chat_template or ""
    return frozenset(
        name
        for template in (templates.values() if isinstance(templates, dict) else [templates])
        for before, kind, name in _words(template)
        if kind == "name" and before != "."
    )


@lru_cache
def reads_thinking(template: str) -> bool:
    """Return whether a chat template asks for the thinking of a message by one of its names."""
    quoted = {f"{mark}{name}{mark}" for name in _THINKING_NAMES for mark in "'\""}
    return any(
        text in quoted if kind == "string" else before == "." and text in _THINKING_NAMES
        for before, kind, text in _words(template)
    )


def _words(template: str) -> list[tuple[str, str, str]]:
    """Return the kind and text of each word in a template's code, behind the text before it."""
    tokens = [each[1:] for each in _JINJA.lex(template) if each[1] != "whitespace"]
    return [(before, *word) for (_, before), word in pairwise([("", ""), *tokens])]


def _with_thinking(turn: dict[str, Any], template: str) -> dict[str, Any]:
    if turn["role"] != "assistant":
        return turn
    thinking, content = split_thinking(turn)
    if not turn.get(_THINKING_NAMES[0]):
        is_known = THINKING_END in template or THINKING_BEGIN in turn["content"]
        if thinking is None or not is_known or not reads_thinking(template):
            return turn
        thinking, turn = thinking.strip("\n"), {**turn, "content": content.lstrip("\n")}
    return {**turn, **dict.fromkeys(_THINKING_NAMES, thinking)} if thinking else turn


def _with_arguments(call: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    function = call["function"]
    given = function["arguments"]
    if as_text and not isinstance(given, str):
        given = json.dumps(given, ensure_ascii=False)
    elif not as_text and isinstance(given, str):
        given = _object_in(given)
    return {**call, "function": {**function, "arguments": given}}


def _object_in(text: str) -> dict[str, Any] | str:
    if not text.strip():
        return {}
    try:
        arguments = from_json(text)
    except ValueError:  # a model wrote it; the template shows it
        return text
    return arguments if isinstance(arguments, dict) else text


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
