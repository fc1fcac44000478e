"""Writes files and directories whole or not at all, and so that they survive a power cut.

Imports no Ray, torch or HTTP library.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mars_platform.errors import UserError


def write_whole(directory: Path, name: str, text: str) -> Path:
    """Write a file of a checkpoint, replacing an existing one, and return its path; see
    `replacing`.
    """
    file = directory / name
    try:
        with replacing(file) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _cannot_write(directory, name, error) from error
    return file


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to make a file or link at, which replaces that of ``path`` after the block.

    Readers see the old content or the new, no mixture. If the block fails, the old stays.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as directory:
        partial = Path(directory) / path.name
        yield partial
        if not partial.is_symlink():
            sync(partial)
        partial.replace(path)
    sync(path.parent)


def settle(partial: Path, target: Path) -> None:
    """Flush a directory with all of its files to disk, and only then rename it."""
    for path in (*partial.rglob("*"), partial):
        sync(path)
    partial.rename(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(directory: Path, name: str) -> None:
    """Check, before anything is measured, that ``directory`` takes files; errors name ``name``."""
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix="."):
            return
    except OSError as error:
        raise _cannot_write(directory, name, error) from error


def _cannot_write(directory: Path, name: str, error: OSError) -> UserError:
    return UserError(
        f"model: {name} cannot be written into {directory} ({error.strerror or error}); "
        "make room, make the directory writable, or copy the model"
    )
