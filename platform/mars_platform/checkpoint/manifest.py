"""Manifests: a file in a directory that lists the others by size and SHA-256 sum.

A stored directory is compared with its manifest before it is used. It lies on local disk or on any
fsspec file system. Imports no Ray, torch or HTTP library.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from mars_platform.config import Settings

MANIFEST = "manifest.json"
MEASURED = frozenset({"calibration.json", "frontier.json", ".calibrate.json"})
"""Files that each ``marsray calibrate`` rewrites; they name the weights that they belong to."""


class FileEntry(Settings):
    """Size and checksum of one file."""

    num_bytes: int = Field(ge=0)
    """Size, in bytes."""
    sha256: str
    """SHA-256 sum, in hexadecimal."""


class Manifest(Settings):
    """Content of ``manifest.json``."""

    files: dict[str, FileEntry]
    """Entry of every other file, by its path relative to the directory."""

    @property
    def text(self) -> str:
        """The manifest as JSON, the content of its file."""
        return self.model_dump_json(indent=1)


class Damaged(Exception):
    """A stored directory does not match its manifest."""


def describe(path: Path) -> FileEntry:
    """Return the manifest entry of a local file."""
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256")
    return FileEntry(num_bytes=path.stat().st_size, sha256=digest.hexdigest())


def describe_all(directory: Path) -> Manifest:
    """Return the manifest of a local directory as it is now, without reading an existing one."""
    own = directory / MANIFEST
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path != own)
    return Manifest(files={str(path.relative_to(directory)): describe(path) for path in files})


def read_manifest(file_system: Any, directory: str) -> Manifest:
    """Read the manifest of a directory on an fsspec file system.

    Raises:
        Damaged: the manifest is missing or malformed.
    """
    try:
        return Manifest.model_validate_json(file_system.cat_file(f"{directory}/{MANIFEST}"))
    except (FileNotFoundError, ValidationError) as error:
        raise Damaged(f"{MANIFEST} cannot be read ({type(error).__name__})") from error


def verify(file_system: Any, directory: str) -> None:
    """Compare every file of a directory on an fsspec file system with its manifest.

    Files in `MEASURED` are skipped, since they may be rewritten or deleted after the directory was
    stored; their readers check which weights they belong to.

    Raises:
        Damaged: a file differs or is missing; the message names it.
    """
    for file, entry in read_manifest(file_system, directory).files.items():
        if file in MEASURED:
            continue
        path = f"{directory}/{file}"
        if not file_system.exists(path):
            raise Damaged(f"{file} is missing")
        if (size := file_system.size(path)) != entry.num_bytes:
            raise Damaged(f"{file} has {size} bytes instead of {entry.num_bytes}")
        with file_system.open(path, "rb") as handle:
            digest = hashlib.file_digest(handle, "sha256")
        if digest.hexdigest() != entry.sha256:
            raise Damaged(f"{file} does not match its checksum")
