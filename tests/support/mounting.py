"""Mounts small file systems in memory, for which a process needs the right to mount."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def mounted(path: Path, size: str) -> Iterator[Path]:
    """Mount an empty file system over a directory during the block.

    Args:
        path: an existing directory.
        size: size of the file system, such as ``64k``.

    Raises:
        subprocess.CalledProcessError: this process may not mount.
    """
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)  # noqa: S607


def can_mount() -> bool:
    """Return whether this process may mount, which it finds out by doing so once."""
    if shutil.which("mount") is None:
        return False
    with tempfile.TemporaryDirectory() as directory:
        try:
            with mounted(Path(directory), "4k"):
                return True
        except subprocess.CalledProcessError:
            return False
