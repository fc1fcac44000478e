"""The reference of the command line, which typer writes from the commands as they are installed."""

from __future__ import annotations

import typer
from typer.cli import get_docs_for_click

from mars_platform.cli.main import build_cli

_HEAD = """# Command line

Generated from the commands themselves. `marsray COMMAND --help` prints the same. Every command ends
with status 0 on success, 2 for a mistake that the caller can mend, 1 for any other error, 130 after an
interrupt and 143 after SIGTERM; an error is one line on stderr.

"""


def page() -> str:
    """Return the page as Markdown."""
    root = typer.main.get_command(build_cli())
    context = typer.Context(root, info_name="marsray", resilient_parsing=True)
    return _HEAD + get_docs_for_click(obj=root, ctx=context, indent=1, name="marsray")
