"""The tables of request fields in the documentation, as the bodies' models describe them."""

from __future__ import annotations

import json

from mars_serve.api.bodies import Neutral
from mars_serve.api.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest

ENDPOINTS = {"completions": CompletionRequest, "chat": ChatCompletionRequest}


def field_table() -> list[str]:
    """Return the lines of the table of fields that are honoured, by name."""
    told = {
        endpoint: {name: _told(body, name) for name in body.model_fields}
        for endpoint, body in ENDPOINTS.items()
    }
    return ["| field | meaning |", "| --- | --- |", *_rows(told)]


def refusal_table() -> list[str]:
    """Return the lines of the table of fields that are refused or without effect, by name."""
    told = {
        endpoint: {name: _refusal(each) for name, each in body.neutral.items()}
        for endpoint, body in ENDPOINTS.items()
    }
    return ["| field | may be | reason |", "| --- | --- | --- |", *_rows(told)]


def _rows(told: dict[str, dict[str, str]]) -> list[str]:
    """Return one line for each field, or one for each endpoint where its meaning differs."""
    lines = []
    for name in sorted({name for fields in told.values() for name in fields}):
        meanings = {endpoint: fields[name] for endpoint, fields in told.items() if name in fields}
        if len(meanings) == len(ENDPOINTS) and len(set(meanings.values())) == 1:
            lines.append(f"| `{name}` | {next(iter(meanings.values()))} |")
        else:
            lines += [f"| `{name}` ({each}) | {text} |" for each, text in meanings.items()]
    return lines


def _told(body: type[GenerationRequest], name: str) -> str:
    description = body.model_fields[name].description
    assert description, f"{name} has no docstring"
    return " ".join(description.split()).replace("``", "`").replace("|", "\\|")


def _refusal(neutral: Neutral) -> str:
    accepted = ", ".join(f"`{json.dumps(value)}`" for value in neutral.values)
    return f"{accepted} | {neutral.reason}"
