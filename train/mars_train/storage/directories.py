"""Stores directories, complete or not at all, on local disk or any fsspec file system.

A directory is written under a temporary name, flushed to disk, described by a manifest of sizes
and SHA-256 sums, and only then renamed. Object stores have no atomic rename; there the manifest is
uploaded last, and a directory without one does not count. Imports no Ray or torch.
"""

import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import fsspec
from filelock import FileLock
from fsspec.implementations.local import LocalFileSystem
from safetensors import SafetensorError

from mars_platform.checkpoint.files import settle, sync
from mars_platform.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    FileEntry,
    Manifest,
    check_size,
    describe,
    describe_all,
    read_manifest,
    refuse_links_out,
    verify,
)
from mars_platform.errors import UserError

_PARTIAL = ".partial-"
_REFUSED = ".refused-"


class SaveFailed(Exception):
    """Raised when a directory could not be written; nothing of it is left."""


class WriterGroup(Protocol):
    """A group of processes that write a directory together."""

    @property
    def rank(self) -> int:
        """Number of this process in the group, from 0."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes in order of rank, waiting for all of them."""


@dataclass(frozen=True)
class SingleWriter:
    """A group of one process."""

    rank: int = 0

    def gather(self, value: Any) -> list[Any]:
        """Return the value in a list."""
        return [value]


class Storage:
    """Named directories under one root, which is a local directory or an fsspec URL."""

    def __init__(self, root: str) -> None:
        try:
            # Other processes write here, too; a cached listing would hide their directories.
            self.file_system, self._root = fsspec.core.url_to_fs(root, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise UserError(f"checkpoints.storage: {root} cannot be used ({error})") from error
        self.is_local = isinstance(self.file_system, LocalFileSystem)
        self.root = self._root if self.is_local else root

    def file_path(self, *parts: str) -> str:
        """Return the path on `file_system` of a directory, or of a file in it."""
        return "/".join([self._root.rstrip("/"), *parts])

    def check(self) -> None:
        """Refuse a root that cannot be listed or, on local disk, not be written."""
        try:
            if self.is_local:
                _try_to_write(Path(self.root))
            self._listed()
        except Exception as error:  # file systems raise errors of many types
            raise UserError(
                f"checkpoints.storage: {self.root} cannot be used ({_reason(error)}); name a "
                "directory or URL that can be written"
            ) from error

    def names(self) -> list[str]:
        """Return the completed directories, sorted; `verify` checks their content."""
        return sorted(
            name
            for name in self._listed()
            if not name.startswith(".") and self.file_system.exists(self.file_path(name, MANIFEST))
        )

    def path(self, name: str) -> str:
        """Return the path or URL of a directory."""
        return f"{self.root.rstrip('/')}/{name}"

    def save(self, name: str, write: Callable[[Path], None], group: WriterGroup) -> None:
        """Write a directory together with the group's other processes.

        Each process writes its own files into the directory that ``write`` is called with.

        Raises:
            SaveFailed: on every process if any of them could not write; nothing is left behind.
        """
        token = group.gather(uuid.uuid4().hex[:8])[0]  # no stale files of a killed writer
        partial_name = f"{_PARTIAL}{name}-{token}" if self.is_local else name
        if not self.is_local:  # its files would lie among the new ones and not be listed
            if group.rank == 0:
                self.remove(name)
            group.gather(None)
        partial = self.file_path(partial_name)
        entries: dict[str, FileEntry] = {}
        failure = None
        try:
            entries = self._write_files(partial, write, group)
        except (OSError, SafetensorError) as error:  # safetensors has its own error of a full disk
            failure = f"{_reason(error)} on rank {group.rank}"
        gathered = group.gather((entries, failure))
        failures = [failed for _, failed in gathered if failed]
        if not failures:
            manifest = Manifest(files={k: v for files, _ in gathered for k, v in files.items()})
            failures = [f for f in group.gather(self._commit(name, partial, manifest, group)) if f]
        if failures:
            if group.rank == 0:
                self.remove(partial_name)
            raise SaveFailed(f"{self.path(name)} could not be written: {failures[0]}")

    def verify(self, name: str) -> None:
        """Compare a directory with its manifest; see `mars_platform.checkpoint.manifest.verify`.

        Raises:
            Damaged: a file is missing or differs; the message names it.
        """
        verify(self.file_system, self.file_path(name))

    def set_aside(self, name: str) -> None:
        """Rename a damaged directory; it is no longer used but can be inspected."""
        target = self.file_path(f"{_REFUSED}{name}-{uuid.uuid4().hex[:8]}")
        self.file_system.mv(self.file_path(name), target, recursive=True)

    def remove(self, name: str) -> None:
        """Delete a directory if it exists, complete or not; its manifest goes first."""
        for path in (self.file_path(name, MANIFEST), self.file_path(name)):
            if self.file_system.exists(path):
                self.file_system.rm(path, recursive=True)

    def remove_partial(self) -> None:
        """Delete incomplete directories left by killed writers."""
        complete = self.names()
        for name in self._listed():
            unfinished = not self.is_local and not name.startswith(".") and name not in complete
            if unfinished or name.startswith(_PARTIAL):
                self.remove(name)

    def fetch(self, name: str) -> Path:
        """Return the local path of a directory; a remote one is downloaded once for each machine.

        Raises:
            Damaged: the download does not match the manifest.
            UserError: there is no room for it, or another user has made the directory for it.
        """
        if self.is_local:
            return Path(self.file_path(name))
        manifest = read_manifest(self.file_system, self.file_path(name))
        key = hashlib.sha256((self.path(name) + manifest.model_dump_json()).encode()).hexdigest()
        target = _own_cache() / key[:32]
        with FileLock(f"{target}.lock"):
            if not target.exists():
                self._download(name, manifest, target)
        return target

    def _listed(self) -> list[str]:
        if not self.file_system.isdir(self._root):
            return []
        return [Path(path).name for path in self.file_system.ls(self._root, detail=False)]

    def _write_files(
        self, partial: str, write: Callable[[Path], None], group: WriterGroup
    ) -> dict[str, FileEntry]:
        """Write this process's files, and move them into the partial directory."""
        if not self.is_local:
            with tempfile.TemporaryDirectory(prefix="marsray-") as temporary:
                entries = _written(Path(temporary), write)
                for file in entries:
                    self.file_system.put_file(f"{temporary}/{file}", f"{partial}/{file}")
            return entries
        own = Path(partial) / f"{_PARTIAL}{group.rank}"  # separates the processes' files
        own.mkdir(parents=True)
        entries = _written(own, write)
        for file in entries:
            target = Path(partial) / file
            target.parent.mkdir(parents=True, exist_ok=True)
            (own / file).rename(target)
        shutil.rmtree(own)
        return entries

    def _commit(
        self, name: str, partial: str, manifest: Manifest, group: WriterGroup
    ) -> str | None:
        """Complete the directory on rank 0; return an error message if that failed."""
        if group.rank != 0:
            return None
        text = manifest.text.encode()
        try:
            if not self.is_local:
                self.file_system.pipe_file(f"{partial}/{MANIFEST}", text)
                return None
            (Path(partial) / MANIFEST).write_bytes(text)
            settle(Path(partial), Path(self.file_path(name)))
        except OSError as error:
            return _reason(error)
        return None

    def _download(self, name: str, manifest: Manifest, target: Path) -> None:
        needed = sum(entry.num_bytes for entry in manifest.files.values())
        if needed > (free := shutil.disk_usage(target.parent).free):
            raise UserError(
                f"{self.path(name)} has {needed:,} bytes, and {target.parent} has room for "
                f"{free:,}; make room there, or set TMPDIR to a larger disk"
            )
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            content = Path(temporary) / "content"
            for file, entry in manifest.files.items():
                path = content / file
                path.parent.mkdir(parents=True, exist_ok=True)
                source = self.file_path(name, file)
                if not self.file_system.exists(source):
                    raise Damaged(f"{file} is missing")
                check_size(self.file_system, source, file, entry)
                self.file_system.get_file(source, str(path))
                if describe(path) != entry:
                    raise Damaged(f"{file} does not match its checksum")
            (content / MANIFEST).write_text(manifest.text, encoding="utf-8")
            settle(content, target)


def share(storage: Storage, name: str, source: Path) -> str:
    """Make a directory available to every worker; return a reference for `fetch_shared`.

    With local storage nothing is copied: the storage must be on a disk that all workers share, and
    ``source`` is taken to be on it as well.
    """
    if storage.is_local:
        return str(source)
    if name not in storage.names():
        storage.save(name, lambda target: copy_into(target, source), SingleWriter())
    return storage.path(name)


def fetch_shared(reference: str) -> str:
    """Return the local path of a directory passed to `share`."""
    if "://" not in reference:
        return reference
    root, _, name = reference.rpartition("/")
    return str(Storage(root).fetch(name))


def copy_into(directory: Path, source: Path) -> None:
    """Copy the files of ``source`` into ``directory``; links within ``source`` are followed.

    Raises `UserError`, and copies nothing, if a link leads out of it.
    """
    refuse_links_out(source)
    shutil.copytree(source, directory, dirs_exist_ok=True)


def _own_cache() -> Path:
    """Return the directory of this user's downloads, which nobody else may have prepared."""
    cache = Path(tempfile.gettempdir()) / f"marsray-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    found = cache.lstat()
    if cache.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UserError(
            f"{cache} is a link, or others may write to it, so that downloads would not be safe "
            "there; remove it, or set TMPDIR to a directory of your own"
        )
    return cache


def _try_to_write(directory: Path) -> None:
    """Write an unnamed file into a directory, or where it would be created."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    tempfile.TemporaryFile(dir=existing).close()


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _written(directory: Path, write: Callable[[Path], None]) -> dict[str, FileEntry]:
    """Run ``write``, then describe its files and flush them to disk.

    A manifest that was copied along with a directory is removed to make room for the new one.
    """
    write(directory)
    (directory / MANIFEST).unlink(missing_ok=True)
    entries = describe_all(directory).files
    for file in entries:
        sync(directory / file)
    return entries
