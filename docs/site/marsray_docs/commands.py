"""The reference of the command line, from the commands as they are installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from mars_platform.cli.main import build_cli
from marsray_docs.tables import code, table, text

_HEAD = """# Command line

Generated from the commands themselves. `marsray COMMAND --help` prints the same. Every command ends
with status 0 on success, 2 for a mistake that the caller can mend, 1 for any other error, 130 after an
interrupt and 143 after SIGTERM; an error is one line on stderr.

"""


def commands() -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the command and its context of ``marsray`` and all commands below it."""
    root = typer.main.get_command(build_cli())
    yield from _below("marsray", root, None)


def options(context: Any, command: Any) -> list[tuple[str, str]]:
    """Return the names of a command's arguments and options with their explanations."""
    records = (parameter.get_help_record(context) for parameter in command.get_params(context))
    return [record for record in records if record is not None]


def page() -> str:
    """Return the page as Markdown."""
    parts = [_HEAD]
    for name, command, context in commands():
        usage = " ".join(command.collect_usage_pieces(context))
        parts.append(f"## {name}\n\n```text\n{name} {usage}\n```\n\n")
        parts.append("\n\n".join(_paragraphs(command.help)) + "\n\n")
        rows = [(code(names), text(told)) for names, told in options(context, command)]
        parts.append(table(["option", "meaning"], rows) + "\n")
    return "".join(parts)


def _below(name: str, command: Any, parent: Any) -> Iterator[tuple[str, Any, Any]]:
    context = command.make_context(
        name.split()[-1], [], parent=parent, resilient_parsing=True, help_option_names=["--help"]
    )
    yield name, command, context
    for word, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _below(f"{name} {word}", inner, context)


def _paragraphs(words: str | None) -> list[str]:
    return [text(paragraph) for paragraph in (words or "").split("\n\n")]
