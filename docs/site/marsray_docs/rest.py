"""The reference of the REST endpoints, from the server's own OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mars_serve.config.settings import ModelSettings, ServeSettings
from mars_serve.http.app import create_app
from marsray_docs.schemas import meaning, type_of
from marsray_docs.tables import code, table, text

_HEAD = """# REST endpoints

Generated from the document that a server gives as `/openapi.json`. [Request fields](../request-fields.md) tells for every field
of a request to generate whether it is honoured or refused, and [Serving](../serving.md#behaviour) how the server behaves.
Each endpoint may answer with the errors below; their content is an [ErrorResponse](#errorresponse), in OpenAI's shape.

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
    parts = [_HEAD, table(["status", "error"], _errors(found)) + "\n"]
    for method, path, operation in operations(found):
        parts.append(f"## `{method} {path}`\n\n{_paragraphs(operation.get('description'))}\n\n")
        body = operation.get("requestBody", {}).get("content", {})
        parts += [f"Body: {_content(body)}\n\n"] if body else []
        rows = [
            (status, text(answer.get("description")), _content(answer.get("content", {})))
            for status, answer in sorted(operation["responses"].items())
            if not _is_error(answer)
        ]
        parts.append(table(["status", "meaning", "content"], rows) + "\n")
    parts.append("## Schemas\n\n")
    for name, schema in sorted(found["components"]["schemas"].items()):
        parts.append(f"### {name}\n\n{_paragraphs(schema.get('description'))}\n\n")
        parts.append(_schema_body(schema))
    return "".join(parts)


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


def _schema_body(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        (
            code(name) + (" (required)" if name in required else ""),
            type_of(each, _link),
            meaning(each),
        )
        for name, each in schema.get("properties", {}).items()
    ]
    if rows:
        return table(["field", "type", "meaning"], rows) + "\n"
    return f"{type_of(schema, _link)}\n\n"


def _content(content: dict[str, Any]) -> str:
    return "; ".join(
        f"{code(kind)}: {type_of(each.get('schema', {}), _link)}" for kind, each in content.items()
    )


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _paragraphs(words: str | None) -> str:
    return "\n\n".join(text(paragraph) for paragraph in (words or "").split("\n\n"))
