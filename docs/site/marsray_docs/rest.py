"""The reference of the REST endpoints, from the server's own OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mars_serve.config.settings import ModelSettings, ServeSettings
from mars_serve.http.app import create_app
from marsray_docs.schemas import type_of
from marsray_docs.tables import code, table, text

_HEAD = """# REST endpoints

Generated from the document that a server gives as `/openapi.json`, which has the schemas that are named here, with every field.
[Request fields](request-fields.md) tells which fields of a request are honoured and which are refused, and [Connect clients](../guides/clients.md)
how to call them. Endpoints below `/admin` and those for LoRA adapters need an administrator's key.

"""


def document() -> dict[str, Any]:
    """Return the OpenAPI document of a server."""
    settings = ServeSettings(models=[ModelSettings(name="mine", path="my-model/model")])
    return create_app({}, settings).openapi()


def operations(found: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the method, the path and the description of each endpoint."""
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def page() -> str:
    """Return the page as Markdown."""
    found = document()
    rows = [
        (code(f"{method} {path}"), _first_sentence(each), _body(each), _answer(each))
        for method, path, each in operations(found)
    ]
    return "".join(
        [
            _HEAD,
            table(["endpoint", "does", "body", "answer"], rows),
            "\n## Errors\n\nTheir content is an `ErrorResponse` in OpenAI's shape; `/v1/messages` answers in Anthropic's.\n\n",
            table(["status", "meaning"], _errors(found)),
        ]
    )


def _first_sentence(operation: dict[str, Any]) -> str:
    return text(re.split(r"(?<=\.)\s", operation.get("description", ""))[0])


def _body(operation: dict[str, Any]) -> str:
    return _content(operation.get("requestBody", {}).get("content", {}))


def _answer(operation: dict[str, Any]) -> str:
    """Return what an endpoint answers where nothing is wrong."""
    answers = [each for each in operation["responses"].values() if not _is_error(each)]
    told = (_content(each.get("content", {})) for each in answers)
    return "; ".join(dict.fromkeys(each for each in told if each))


def _content(content: dict[str, Any]) -> str:
    """Return the schemas of a body, or its kind where it is not JSON."""
    return ", ".join(
        type_of(each.get("schema", {}), code) if kind == "application/json" else code(kind)
        for kind, each in content.items()
    )


def _errors(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what each status of an error means, one line for each status and meaning."""
    told = {
        (status, text(answer["description"]))
        for _, _, operation in operations(found)
        for status, answer in operation["responses"].items()
        if _is_error(answer)
    }
    return sorted(told)


def _is_error(answer: dict[str, Any]) -> bool:
    schemas = [each.get("schema", {}) for each in answer.get("content", {}).values()]
    return any(str(schema.get("$ref", "")).endswith("/ErrorResponse") for schema in schemas)
