"""Runs the beds' commands so that a user's mistake is told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from mars_platform.errors import UserError


@contextmanager
def telling_mistakes() -> Iterator[None]:
    """Print a `UserError` of the block as one line, and exit with status 1."""
    try:
        yield
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
