"""The same conversations as rows of the shapes that data sets have."""

from __future__ import annotations

import json
from typing import Any

_TOOL = {"name": "weather", "description": "Tells it.", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": _TOOL}]
_TURNS = [("system", "Be short."), ("user", "Add 1\nand 2"), ("assistant", "3"), ("user", "And 1?")]
ANSWER = "4"
PLAIN = [{"role": role, "content": text} for role, text in (*_TURNS, ("assistant", ANSWER))]
CALLED = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": city}},
            }
            for number, city in enumerate(["Rome", "Oslo"])
        ],
    },
    {"role": "tool", "content": "hot", "tool_call_id": "call_0"},
    {"role": "tool", "content": "cold", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "Hot and cold.", "reasoning_content": "Two cities."},
]


def _sharegpt(turns: list[dict[str, Any]], **names: str) -> list[dict[str, Any]]:
    known = {"user": "human", "assistant": "gpt", "tool": "observation", **names}
    found = []
    for turn in turns:
        role, value = turn["role"], turn["content"]
        if "tool_calls" in turn:
            value = json.dumps([call["function"] for call in turn["tool_calls"]])
            role = "function_call"
        thinking = {key: turn[key] for key in ("reasoning_content",) if key in turn}
        found.append({"from": known.get(role, role), "value": value, **thinking})
    return found


def _in_parts(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            **turn,
            "content": [{"type": "text", "text": each} for each in turn["content"].split("\n")],
        }
        for turn in turns
    ]


def _bare_calls(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return turns as TRL has them: without ids, with null as the content beside calls."""
    found = []
    for turn in turns:
        kept = {key: each for key, each in turn.items() if key != "tool_call_id"}
        if "tool_calls" in turn:
            calls = [{"function": call["function"]} for call in turn["tool_calls"]]
            kept |= {"tool_calls": calls, "content": None}
        if "reasoning_content" in turn:
            kept["thinking"] = kept.pop("reasoning_content")
        found.append(kept)
    return found


PLAIN_ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": PLAIN},
    "content parts": {"messages": _in_parts(PLAIN)},
    "sharegpt": {"conversations": _sharegpt(PLAIN)},
    "sharegpt with a system column": {"conversations": _sharegpt(PLAIN[1:]), "system": "Be short."},
    "conversations of roles": {"conversations": PLAIN},
    "alpaca": {
        "instruction": "And 1?",
        "input": "",
        "output": ANSWER,
        "system": "Be short.",
        "history": [["Add 1\nand 2", "3"]],
    },
    "prompt and completion of turns": {"prompt": PLAIN[:-1], "completion": PLAIN[-1:]},
    "turns and a completion": {"prompt": PLAIN[:-1], "completion": ANSWER},
}
"""Rows that are `PLAIN`."""
CALLED_ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": CALLED, "tools": TOOLS},
    "tools as JSON text": {"messages": CALLED, "tools": json.dumps(TOOLS)},
    "calls without ids": {"messages": _bare_calls(CALLED), "tools": [_TOOL]},
    "sharegpt": {"conversations": _sharegpt(CALLED), "tools": json.dumps([_TOOL])},
}
"""Rows that are `CALLED` with `TOOLS`."""
SHORT_ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [PLAIN[1], PLAIN[2]]},
    "prompt and completion": {"prompt": "Add 1\nand 2", "completion": "3"},
    "alpaca": {"instruction": "Add 1", "input": "and 2", "output": "3"},
}
"""Rows of one question and one answer."""
