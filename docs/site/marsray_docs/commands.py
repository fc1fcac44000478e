"""The reference of the command line, from the commands as they are installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from mars_platform.cli.main import build_cli
from marsray_docs.tables import table, text

_HEAD = """# Commands

Generated from the commands; `marsray COMMAND --help` prints the same. Every command ends with status 0 on success, 2 for an error that the
caller can fix, 1 for any other error, 130 after an interrupt and 143 after SIGTERM. An error is one line on stderr.

"""


def page() -> str:
    """Return the page as Markdown."""
    return _HEAD + "".join(_sections(typer.main.get_command(build_cli()), "marsray", None))


def _sections(command: Any, name: str, parent: typer.Context | None) -> Iterator[str]:
    context = typer.Context(command, info_name=name.rpartition(" ")[2], parent=parent)
    records = [each.get_help_record(context) for each in command.params]
    rows = [_row(*record) for record in records if record and not record[0].startswith("--help")]
    told = "\n\n".join(text(each) for each in (command.help or "").split("\n\n"))
    yield f"{'##' if parent is None else '###'} `{name}`\n\n{told}\n\n"
    yield table(["argument or option", "meaning"], rows) + "\n" if rows else ""
    for word, below in getattr(command, "commands", {}).items():
        yield from _sections(below, f"{name} {word}", context)


def _row(names: str, told: str) -> tuple[str, str]:
    return f"`{names}`".replace("|", "\\|"), text(told)
