"""The table of request fields in the documentation, as the bodies' models describe them."""

from __future__ import annotations

import json

from mars_serve.api.bodies import Neutral
from mars_serve.api.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest

ENDPOINTS = {"completions": CompletionRequest, "chat": ChatCompletionRequest}
HEAD = ["| field | endpoint | meaning |", "| --- | --- | --- |"]


def field_table() -> list[str]:
    """Return the lines of the table, by name; fields that mean the same in both are one line."""
    told = {name: _told(body) for name, body in ENDPOINTS.items()}
    names = sorted({name for fields in told.values() for name in fields})
    lines = list(HEAD)
    for name in names:
        meanings = {endpoint: fields[name] for endpoint, fields in told.items() if name in fields}
        if len(meanings) == len(ENDPOINTS) and len(set(meanings.values())) == 1:
            meanings = {"both": next(iter(meanings.values()))}
        lines += [f"| `{name}` | {endpoint} | {text} |" for endpoint, text in meanings.items()]
    return lines


def _told(body: type[GenerationRequest]) -> dict[str, str]:
    """Return what the documentation says of each field of a body."""
    told = {name: _refusal(neutral) for name, neutral in body.neutral.items()}
    for name, field in body.model_fields.items():
        assert field.description, f"{name} has no docstring"
        told[name] = " ".join(field.description.split()).replace("``", "`").replace("|", "\\|")
    return told


def _refusal(neutral: Neutral) -> str:
    if neutral.values == (True, False):
        return f"Without effect: {neutral.reason}."
    accepted = ", ".join(f"`{json.dumps(value)}`" for value in (None, *neutral.values))
    return f"**Refused** unless {accepted}: {neutral.reason}."
