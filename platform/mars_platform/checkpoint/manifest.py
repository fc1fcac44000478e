"""Manifests: the files of a directory by size and SHA-256 sum, in a file among them.

What is stored is compared with its manifest before it is used. Directories are on local disk or
any fsspec file system. Knows nothing of models, but for the names of what measuring one writes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import IO, Any

from pydantic import Field, ValidationError

from mars_platform.config import Settings

MANIFEST = "manifest.json"
MEASURED = frozenset({"calibration.json", "frontier.json", ".calibrate.json"})
"""What ``marsray calibrate`` writes beside the weights, each time anew; it says whose it is."""
_CHUNK_BYTES = 2**22


class FileEntry(Settings):
    """What the manifest says of one file."""

    num_bytes: int = Field(ge=0)
    """Size, in bytes."""
    sha256: str
    """SHA-256 sum, in hexadecimal."""


class Manifest(Settings):
    """Content of ``manifest.json``."""

    files: dict[str, FileEntry]
    """Every other file of the directory, by its path in it."""

    @property
    def text(self) -> str:
        """What the file holds."""
        return self.model_dump_json(indent=1)


class Damaged(Exception):
    """A stored directory is not what its manifest says."""


def describe(path: Path) -> FileEntry:
    """What a manifest says of a local file."""
    with path.open("rb") as handle:
        return FileEntry(num_bytes=path.stat().st_size, sha256=_sha256(handle))


def describe_all(directory: Path) -> Manifest:
    """The manifest of a local directory as it is now; one that is there is not read."""
    own = directory / MANIFEST
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path != own)
    return Manifest(files={str(path.relative_to(directory)): describe(path) for path in files})


def read_manifest(file_system: Any, directory: str) -> Manifest:
    """The manifest of a directory on an fsspec file system.

    Raises:
        Damaged: it is missing, or no manifest.
    """
    try:
        return Manifest.model_validate_json(file_system.cat_file(f"{directory}/{MANIFEST}"))
    except (FileNotFoundError, ValidationError) as error:
        raise Damaged(f"{MANIFEST} cannot be read ({type(error).__name__})") from error


def verify(file_system: Any, directory: str) -> None:
    """Compare a directory on an fsspec file system with its manifest, reading all of its files.

    `MEASURED` ones may have been there when it was stored, and are no damage if they have been
    written anew or deleted since: readers find out by themselves whose they are.

    Raises:
        Damaged: naming the file and what is wrong with it.
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
            if _sha256(handle) != entry.sha256:
                raise Damaged(f"{file} does not match its checksum")


def _sha256(handle: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := handle.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()
