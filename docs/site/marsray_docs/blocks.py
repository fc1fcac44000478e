"""The blocks of a page that a reader runs, put together into one script for bash.

A comment before a block of shell or Python says that it is run: ``<!-- run -->``, or for Python
``<!-- run with a server -->`` if it asks a server at port 8000 for model ``mine``. A block with a
``title="NAME"`` is written into the file NAME, if any block of the page is run. All blocks of a page
share a directory and a shell, from the first to the last.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>run|run with a server) -->\n+)?"
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_SHELL, _PYTHON = ("sh", "bash"), ("py", "python")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    code: str
    title: str | None
    """Name of the file that the block shows."""
    is_run: bool
    """Whether a reader runs the block."""
    needs_server: bool = False
    """Whether the block is run while a server is up."""


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [
        Block(
            found["language"],
            found["code"],
            found["title"],
            is_run=found["mark"] == "run",
            needs_server=found["mark"] == "run with a server",
        )
        for found in _BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]


def program_with_server(found: list[Block]) -> str:
    """Return the blocks of Python that need a server, as one program."""
    return "".join(block.code for block in found if block.needs_server)


def script(found: list[Block]) -> str:
    """Return a script for bash that writes the files and runs the blocks, in their order."""
    lines = ["set -euo pipefail"]
    for block in found:
        if block.title:
            lines.append(
                f"cat > {shlex.quote(block.title)} <<'END OF FILE'\n{block.code}END OF FILE"
            )
        elif block.is_run and block.language in _SHELL:
            lines.append(block.code)
        elif block.is_run and block.language in _PYTHON:
            lines.append(f"python - <<'END OF PROGRAM'\n{block.code}END OF PROGRAM")
        elif block.is_run:
            raise ValueError(f"a block of {block.language} cannot be run:\n{block.code}")
    return "\n".join(lines) + "\n"
