"""Brings rows of the shapes that data sets have into one form: messages and tools as OpenAI has
them.

Imports no Ray, torch or HTTP library. Source: the data formats of LLaMA-Factory (alpaca, sharegpt),
TRL (prompt and completion, tools) and OpenAI (messages, content parts, tool calls).
"""

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

from mars_platform.errors import UserError

Column = Literal[
    "messages",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "system",
    "history",
    "tools",
    "chat_template_kwargs",
    "answer",
]
"""A column that rows are read from."""
ColumnNames = Mapping[Column, str]
"""Name of each column that has another one in the data."""

NO_NAMES: ColumnNames = MappingProxyType({})
KNOWN_COLUMNS = (*get_args(Column), "conversations", "conversation")
_LISTS_OF_TURNS = ("messages", "conversations", "conversation")
_MAIN_COLUMNS = ("messages", "prompt", "completion", "instruction", "output")
"""Columns that no row of a shape lacks."""
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
}
"""Role of each other name of one."""
_THINKING_NAMES = ("reasoning_content", "reasoning", "thinking")


def missing_column(columns: ColumnNames, names: Iterable[str]) -> str | None:
    """Return what is wrong if ``columns`` names a main column that is not among ``names``."""
    there = list(names)
    for column, name in columns.items():
        if column in _MAIN_COLUMNS and name not in there:
            return f"data.columns.{column}: no column {name!r} among {', '.join(there) or 'none'}"
    return None


def to_messages(row: Mapping[str, Any], columns: ColumnNames) -> tuple[str, dict[str, Any]]:
    """Return the name of a row's shape, and the row with ``messages`` and ``tools`` in one form.

    What is no text, list or object where one belongs stays as it is, for validation to refuse.

    Raises:
        UserError: the row has none of the shapes, or a part that is not supported.
    """
    if problem := missing_column(columns, row):
        raise UserError(problem)
    given = {name: each for name, each in row.items() if name not in columns.values()}
    given |= {column: row[name] for column, name in columns.items() if name in row}
    if columns.keys() & {"prompt", "instruction"}:  # said so, whatever else a row has
        given = {name: each for name, each in given.items() if name not in _LISTS_OF_TURNS}
    shape, turns = _turns_of(given)
    given["messages"] = turns
    if isinstance(turns, list):
        turns = [_plain_turn(turn, f"messages.{place}") for place, turn in enumerate(turns)]
        given["messages"] = _with_call_ids(_with_system(turns, given.get("system")))
    given["tools"] = _tools(given.get("tools"))
    given["chat_template_kwargs"] = _decoded(
        given.get("chat_template_kwargs"), "chat_template_kwargs"
    )
    return shape, given


def _turns_of(row: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name of a row's shape, and its turns in the shape's own form."""
    for name in _LISTS_OF_TURNS:
        if row.get(name) is not None:
            turns = _decoded(row[name], name)
            is_sharegpt = isinstance(turns, list) and any(_is_sharegpt(turn) for turn in turns)
            return "sharegpt conversations" if is_sharegpt else "messages", turns
    if row.get("prompt") is not None and row.get("completion") is not None:
        parts = [(row["prompt"], "user"), (row["completion"], "assistant")]
        return "prompt and completion", [turn for part in parts for turn in _part(*part)]
    if row.get("instruction") is not None and row.get("output") is not None:
        return "alpaca instructions", _alpaca(row)
    filled = [str(name) for name, each in row.items() if each is not None]
    problem = f"no conversation: filled columns are {', '.join(filled) or 'none'}"
    if "text" in row:
        raise UserError(
            f"{problem}; a text does not say which part the model "
            "is to learn, so write it as messages, or as prompt and completion"
        )
    raise UserError(
        f"{problem}; known are messages, conversations, prompt with completion, and instruction "
        "with output; name others in data.columns"
    )


def _is_sharegpt(turn: Any) -> bool:
    return isinstance(turn, dict) and "role" not in turn and "from" in turn


def _part(part: Any, role: str) -> list[Any]:
    return part if isinstance(part, list) else [{"role": role, "content": part}]


def _alpaca(row: Mapping[str, Any]) -> list[Any]:
    """Return the turns of a row; an input stands on the line behind its instruction."""
    asked = row["instruction"]
    if isinstance(asked, str) and isinstance(row.get("input"), str) and row["input"]:
        asked = f"{asked}\n{row['input']}" if asked else row["input"]
    history = row.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise UserError("history: must be a list of pairs [question, answer]")
    pairs = [*history, [asked, row["output"]]]
    return [turn for pair in pairs for turn in _part(pair[0], "user") + _part(pair[1], "assistant")]


def _with_system(turns: list[Any], system: Any) -> list[Any]:
    is_there = bool(turns) and isinstance(turns[0], dict) and turns[0].get("role") == "system"
    return turns if is_there or not system else [{"role": "system", "content": system}, *turns]


def _plain_turn(turn: Any, place: str) -> Any:
    if not isinstance(turn, dict):
        return turn
    found = {key: each for key, each in turn.items() if each is not None}
    content = found.get("content")
    if _is_sharegpt(turn):
        found["role"], content = found.get("from"), found.get("value")
    found["content"] = _text(content, place)
    thinking = [found[name] for name in _THINKING_NAMES if name in found]
    if thinking:
        found["reasoning_content"] = thinking[0]
    if found.get("train") is False:  # axolotl's name for OpenAI's weight of 0
        found["weight"] = 0
    calls = found.get("tool_calls") or found.get("function_call")
    if found.get("role") == "function_call":
        calls, found["content"] = found["content"], ""
    found.pop("tool_calls", None)  # an empty list is none
    if calls:
        found["tool_calls"] = _calls(calls, place)
    if isinstance(role := found.get("role"), str):
        found["role"] = _ROLES.get(role, role)
    return found


def _text(content: Any, place: str) -> Any:
    if not isinstance(content, list):
        return content
    for index, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UserError(
                f"{place}.content.{index}: a part of type {kind!r} is not supported; only parts "
                "of type 'text' with a text are"
            )
    return "\n".join(part["text"] for part in content)


def _calls(calls: Any, place: str) -> Any:
    """Return tool calls in OpenAI's form, still without the ids that the row lacks."""
    calls = _decoded(calls, f"{place}.tool_calls")
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        if isinstance(call, dict):
            function = call.get("function", call)
            if isinstance(function, dict):
                arguments = function.get("arguments")
                function = {
                    "name": function.get("name"),
                    "arguments": {} if arguments is None else arguments,
                }
            call = {"id": call.get("id"), "type": "function", "function": function}
        found.append(call)
    return found


def _with_call_ids(turns: list[Any]) -> list[Any]:
    """Number the calls that have no id, and give each result without one that of its call."""
    waiting, number = list[Any](), 0
    for turn in (turn for turn in turns if isinstance(turn, dict)):
        calls = turn.get("tool_calls")
        for call in (each for each in calls or () if isinstance(each, dict)):
            call["id"] = f"call_{number}" if call["id"] is None else call["id"]
            waiting.append(call["id"])
            number += 1
        if turn.get("role") == "tool" and waiting:
            given = turn.setdefault("tool_call_id", waiting[0])
            waiting = [each for each in waiting if each != given]
    return turns


def _tools(tools: Any) -> Any:
    tools = _decoded(tools, "tools")
    if not isinstance(tools, list):
        return tools or None
    return [
        {"type": "function", **(tool if "function" in tool else {"function": tool})}
        if isinstance(tool, dict)
        else tool
        for tool in tools
    ] or None


def _decoded(value: Any, place: str) -> Any:
    """Return what a JSON text says, and any other value as it is."""
    if not isinstance(value, str) or not value.strip():
        return None if isinstance(value, str) else value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not valid JSON; write JSON text or an object") from error
