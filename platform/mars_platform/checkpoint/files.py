"""Writes files into a checkpoint directory, whole or not at all.

Imports no Ray, torch or HTTP library.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from mars_platform.errors import UserError


def write_whole(directory: Path, name: str, text: str) -> Path:
    """Write a file, replacing an existing one; readers see the old content or the new, no mixture.

    Returns:
        The file's path.

    Raises:
        UserError: the file cannot be written.
    """
    file, partial = directory / name, directory / f".{name}.{os.getpid()}"
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise _cannot_write(directory, name, error) from error
    return file


def check_writable(directory: Path, name: str) -> None:
    """Check, before anything is measured, that results can be written into a directory.

    Args:
        directory: the checkpoint directory.
        name: the file that will be written; named in the error, not created.

    Raises:
        UserError: the directory takes no files.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix="."):
            return
    except OSError as error:
        raise _cannot_write(directory, name, error) from error


def _cannot_write(directory: Path, name: str, error: OSError) -> UserError:
    return UserError(
        f"model: {name} cannot be written into {directory} ({error.strerror or error}); "
        "make the directory writable or copy the model"
    )
