"""Markdown tables of the generated references."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def text(words: str | None) -> str:
    """Return a docstring's or help's text on one line, as Markdown that a table's cell can hold."""
    one_line = " ".join((words or "").split()).replace("``", "`")
    parts = re.split(r"(`[^`]*`)", re.sub(r"(?<!\\)\|", r"\\|", one_line))
    return "".join(part if part.startswith("`") else _escaped(part) for part in parts)


def _escaped(words: str) -> str:
    return words.replace("<", "&lt;").replace("*", "\\*")


def code(words: object) -> str:
    """Return a piece of code for a table's cell."""
    return "`" + str(words).replace("|", "\\|") + "`"


def with_plain_pipes(markdown: str) -> str:
    """Return a page whose code in tables has pipes as they are.

    In the repository a pipe in a table's code needs a backslash, which Zensical would show.
    """

    def plain(row: re.Match[str]) -> str:
        return re.sub(r"`[^`]*`", lambda found: found.group().replace("\\|", "|"), row.group())

    return re.sub(r"^ *\|.*$", plain, markdown, flags=re.MULTILINE)
