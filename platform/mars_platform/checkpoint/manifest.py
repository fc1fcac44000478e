"""Manifests: a file in a directory that lists the others by size and SHA-256 sum.

A stored directory is compared with its manifest before it is used. It lies on local disk or on any
fsspec file system. A manifest may be a stranger's, so every name in it is a plain one below the
directory. Imports no Ray, torch or HTTP library.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from fsspec.implementations.local import LocalFileSystem
from pydantic import AfterValidator, Field, ValidationError

from mars_platform.config import Settings
from mars_platform.errors import UserError

MANIFEST = "manifest.json"
MEASURED = frozenset({"calibration.json", "examples.json", "frontier.json", ".calibrate.json"})
"""Files that each ``marsray calibrate`` rewrites; figures name the weights that they belong to."""

_MAX_BYTES = 4 * 2**20
_MAX_FILES = 10_000
_MAX_FILE_BYTES = 2**53  # 8 PiB, and every whole number below is exact in any JSON parser
_MAX_NAME = 1024  # bytes, as in S3
_MAX_PART = 255  # bytes, as in common file systems
_MAX_DEPTH = 16
_DOCUMENTS = frozenset({".md", ".png", ".svg"})
_LINK_REMEDY = "remove it, or put a copy of its target in its place if that belongs there"


def plain_name(name: str) -> str:
    """Return the name of a file below a directory, if it can be joined to any directory as it is.

    Raises:
        ValueError: the name leads elsewhere or differs between systems; the message says why.
    """
    parts = name.split("/")
    encoded = [part.encode(errors="replace") for part in parts]
    problems = {
        "is empty": not name,
        "has a character that cannot be printed": not name.isprintable(),
        "is an absolute path": name.startswith("/"),
        "has a backslash": "\\" in name,
        "begins with a drive": re.match("[A-Za-z]:", name),
        "has an empty part, '.' or '..'": {"", ".", ".."} & set(parts),
        "is too deep": len(parts) > _MAX_DEPTH,
        "is too long": max(map(len, encoded)) > _MAX_PART or sum(map(len, encoded)) > _MAX_NAME,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(f"the file name {name[:80]!r} {problem}")
    return name


def _distinct(files: dict[str, FileEntry]) -> dict[str, FileEntry]:
    """Refuse names that stand for one file where case does not count, and files in files."""
    if MANIFEST in files:
        raise ValueError("it lists itself")
    folded = {MANIFEST: MANIFEST}
    for name in files:
        other = folded.setdefault(name.casefold(), name)
        if other is not name:
            raise ValueError(
                f"the file name {name[:80]!r} differs from {other[:80]!r} only in case"
            )
    folders = {str(folder) for name in folded for folder in PurePosixPath(name).parents}
    if both := sorted(folders & set(folded)):
        raise ValueError(f"the file name {folded[both[0]][:80]!r} is also that of a directory")
    return files


class FileEntry(Settings):
    """Size and checksum of one file."""

    num_bytes: int = Field(ge=0, le=_MAX_FILE_BYTES)
    """Size, in bytes."""
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """SHA-256 sum, in hexadecimal."""


class Manifest(Settings):
    """Content of ``manifest.json``."""

    files: Annotated[
        dict[Annotated[str, AfterValidator(plain_name)], FileEntry],
        Field(max_length=_MAX_FILES),
        AfterValidator(_distinct),
    ]
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
    """Return the manifest of a local directory as it is now, without reading an existing one.

    Raises:
        UserError: there is something that a manifest cannot hold: a link that leads out of the
            directory, a pipe, a strange name, or too many files.
    """
    try:
        names = sorted(name for name in own_files(directory) if name != MANIFEST)
        for name in names:
            if not (directory / name).is_file():
                raise Damaged(f"{name} is no file")
        Manifest(files=dict.fromkeys(names, FileEntry(num_bytes=0, sha256="0" * 64)))
    except Damaged as error:
        raise UserError(f"{directory}: {error}; {_LINK_REMEDY}") from error
    except ValidationError as error:
        raise UserError(f"{directory}: {_reason(error)}; rename or remove it") from error
    return Manifest(files={name: describe(directory / name) for name in names})


def read_manifest(file_system: Any, directory: str) -> Manifest:
    """Read the manifest of a directory on an fsspec file system.

    Raises:
        Damaged: the manifest is missing, too large, malformed, or names a file elsewhere.
    """
    try:
        content = file_system.cat_file(f"{directory}/{MANIFEST}", end=_MAX_BYTES + 1)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise Damaged(f"{MANIFEST} cannot be read ({type(error).__name__})") from error
    if len(content) > _MAX_BYTES:
        raise Damaged(f"{MANIFEST} has more than {_MAX_BYTES:,} bytes")
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        raise Damaged(f"{MANIFEST} cannot be read ({_reason(error)})") from error


def verify(file_system: Any, directory: str) -> None:
    """Compare every file of a directory on an fsspec file system with its manifest.

    Files in `MEASURED` are skipped, since they may be rewritten or deleted after the directory was
    stored; their readers check which weights they belong to.

    Raises:
        Damaged: a file differs, is missing or not listed, or is a link that leads out of a local
            directory; the message names it.
    """
    manifest = read_manifest(file_system, directory)
    refuse_unlisted(manifest, _present(file_system, directory))
    for file, entry in manifest.files.items():
        if file in MEASURED:
            continue
        path = f"{directory}/{file}"
        if not file_system.exists(path):
            raise Damaged(f"{file} is missing")
        check_size(file_system, path, file, entry)
        with file_system.open(path, "rb") as handle:
            digest = hashlib.file_digest(handle, "sha256")
        if digest.hexdigest() != entry.sha256:
            raise Damaged(f"{file} does not match its checksum")


def check_size(file_system: Any, path: str, file: str, entry: FileEntry) -> None:
    """Refuse a file whose size is not its entry's, before anything of it is read."""
    info = file_system.info(path)
    if info["type"] != "file":
        raise Damaged(f"{file} is no file")
    if info["size"] != entry.num_bytes:
        raise Damaged(f"{file} has {info['size']} bytes instead of {entry.num_bytes}")


def refuse_unlisted(manifest: Manifest, present: Iterator[str]) -> None:
    """Refuse files that a manifest says nothing of, although a checkpoint's readers may read them.

    Not meant are files that calibration writes, pictures and Markdown, and hidden files such as
    those of a version control system or a network disk: nothing reads them by themselves.
    """
    for name in present:
        path = PurePosixPath(name)
        is_hidden = any(part.startswith(".") and part != ".." for part in path.parts)
        if is_hidden or path.suffix in _DOCUMENTS or name in MEASURED or name == MANIFEST:
            continue
        if name not in manifest.files:
            raise Damaged(f"{name} is not listed in {MANIFEST}")


def refuse_links_out(directory: Path, setting: str = "model") -> None:
    """Refuse a checkpoint with links to files elsewhere, which would be read, shown and sent.

    Raises:
        UserError: there is such a link; the message begins with ``setting``, and names the link and
            the remedy. The directory may itself be a link.
    """
    try:
        for _ in own_files(directory):
            pass
    except Damaged as error:
        raise UserError(f"{setting}: {directory}: {error}; {_LINK_REMEDY}") from error


def own_files(directory: Path) -> Iterator[str]:
    """Yield the paths of all files below a local directory, relative to it; a link is a file.

    Raises:
        Damaged: a link leads out of the directory, other than to the blobs that the Hugging Face
            hub's cache keeps for the same repository, or a directory below cannot be read.
    """
    root = Path(os.path.realpath(directory))
    repository = root.parent.parent
    is_cached = root.parent.name == "snapshots" and repository.name.startswith("models--")
    roots = (root, repository / "blobs") if is_cached else (root,)
    for name in _local_files(root):
        target = Path(os.path.realpath(root / name))
        if not any(target.is_relative_to(each) for each in roots):
            raise Damaged(f"{name} is a link that leads out of the directory")
        yield name


def _local_files(directory: Path) -> Iterator[str]:
    def unreadable(error: OSError) -> None:
        if isinstance(error, FileNotFoundError) and error.filename != os.fspath(directory):
            return  # the directory of a file that was being replaced, see `files.replacing`
        raise Damaged(f"{error.filename} cannot be read ({error.strerror})") from error

    for folder, folders, files in os.walk(directory, onerror=unreadable):
        linked = [name for name in folders if Path(folder, name).is_symlink()]
        for name in sorted(files + linked):
            yield Path(folder, name).relative_to(directory).as_posix()


def _present(file_system: Any, directory: str) -> Iterator[str]:
    if isinstance(file_system, LocalFileSystem):
        yield from own_files(Path(directory))
        return
    for path in file_system.find(directory):
        if not path.endswith("/"):  # stands for a directory in some object stores
            yield path.removeprefix(f"{directory.rstrip('/')}/")


def _reason(error: ValidationError) -> str:
    """Return what is wrong with a name, or the error's type if the content is no manifest."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "too_long":
        return f"more than {_MAX_FILES:,} files"
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    return type(error).__name__
