"""Directories that are complete or absent, on local disk or any fsspec file system.

A directory is written under a temporary name, flushed to disk, described by a manifest of sizes
and SHA-256 sums, and only then renamed; where there is no atomic rename, as on object stores, the
manifest is uploaded last and makes the directory count. Knows nothing of models or training.
"""

from __future__ import annotations

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

from mars_platform.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    FileEntry,
    Manifest,
    describe,
    describe_all,
    read_manifest,
    verify,
)
from mars_platform.errors import UserError
from mars_train.storage.disk import sync

_PARTIAL = ".partial-"
_REFUSED = ".refused-"


class SaveFailed(Exception):
    """A directory could not be written; nothing of it is left."""


class Group(Protocol):
    """Processes that write a directory together."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, in order of rank; waits for all of them."""


@dataclass(frozen=True)
class Alone:
    """A group of one process."""

    rank: int = 0

    def gather(self, value: Any) -> list[Any]:
        """The value itself."""
        return [value]


class Storage:
    """Named directories under one root, which is a local directory or an fsspec URL."""

    def __init__(self, root: str) -> None:
        try:
            # others write here, too: a remembered listing would hide what they have saved
            self._fs, self._root = fsspec.core.url_to_fs(root, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise UserError(f"checkpoints.storage: {root} cannot be used ({error})") from error
        self.is_local = isinstance(self._fs, LocalFileSystem)
        self.root = self._root if self.is_local else root

    @property
    def file_system(self) -> Any:
        """The fsspec file system."""
        return self._fs

    def file_path(self, name: str) -> str:
        """Path of a directory on its file system."""
        return self._path(name)

    def names(self) -> list[str]:
        """Directories that have been completed, sorted; their content may be damaged since."""
        if not self._fs.isdir(self._root):
            return []
        found = [Path(path).name for path in self._fs.ls(self._root, detail=False)]
        return sorted(
            name
            for name in found
            if not name.startswith(".") and self._fs.exists(self._path(name, MANIFEST))
        )

    def path(self, name: str) -> str:
        """Path or URL of a directory."""
        return f"{self.root.rstrip('/')}/{name}"

    def save(self, name: str, write: Callable[[Path], None], group: Group) -> None:
        """Write a directory together; ``write`` puts this process's files into the given one.

        Raises:
            SaveFailed: on every process, if any of them could not write; nothing is left behind.
        """
        token = group.gather(uuid.uuid4().hex[:8])[0]  # stale files of a killed writer never mix in
        partial = self._path(f"{_PARTIAL}{name}-{token}" if self.is_local else name)
        entries: dict[str, FileEntry] = {}
        failure = None
        try:
            entries = self._write_files(partial, write, group)
        except OSError as error:
            failure = f"{error.strerror or error} on rank {group.rank}"
        except SafetensorError as error:  # which is how safetensors reports a full disk
            failure = f"{error} on rank {group.rank}"
        gathered = group.gather((entries, failure))
        failures = [failed for _, failed in gathered if failed]
        if not failures:
            manifest = Manifest(files={k: v for files, _ in gathered for k, v in files.items()})
            failures = [f for f in group.gather(self._commit(name, partial, manifest, group)) if f]
        if failures:
            if group.rank == 0:
                self._remove_if_present(partial)
            raise SaveFailed(f"{self.path(name)} could not be written: {failures[0]}")

    def verify(self, name: str) -> None:
        """Compare a directory with its manifest; see `mars_platform.checkpoint.manifest.verify`.

        Raises:
            Damaged: naming the file and what is wrong with it.
        """
        verify(self._fs, self._path(name))

    def set_aside(self, name: str) -> None:
        """Rename a damaged directory, so that it is no longer used but can be looked at."""
        target = self._path(f"{_REFUSED}{name}-{uuid.uuid4().hex[:8]}")
        self._fs.mv(self._path(name), target, recursive=True)

    def remove(self, name: str) -> None:
        """Delete a directory, its manifest first."""
        self._fs.rm(self._path(name, MANIFEST))
        self._fs.rm(self._path(name), recursive=True)

    def remove_all(self, name: str) -> None:
        """Delete whatever there is under a name, complete or not."""
        self._remove_if_present(self._path(name))

    def remove_partial(self) -> None:
        """Delete what killed writers left behind."""
        if not self._fs.isdir(self._root):
            return
        complete = set(self.names())
        for path in self._fs.ls(self._root, detail=False):
            name = Path(path).name
            unfinished = not self.is_local and not name.startswith(".") and name not in complete
            if unfinished or name.startswith(_PARTIAL):
                self._remove_if_present(path)

    def fetch(self, name: str) -> Path:
        """Local path of a directory; from elsewhere it is downloaded once for each machine.

        Raises:
            Damaged: the download does not match the manifest.
        """
        if self.is_local:
            return Path(self._path(name))
        manifest = read_manifest(self._fs, self._path(name))
        key = hashlib.sha256((self.path(name) + manifest.model_dump_json()).encode()).hexdigest()
        cache = Path(tempfile.gettempdir()) / f"marsray-{os.getuid()}"
        cache.mkdir(mode=0o700, exist_ok=True)
        target = cache / key[:32]
        with FileLock(f"{target}.lock"):
            if not target.exists():
                self._download(name, manifest, target)
        return target

    def _path(self, *parts: str) -> str:
        return "/".join([self._root.rstrip("/"), *parts])

    def _write_files(
        self, partial: str, write: Callable[[Path], None], group: Group
    ) -> dict[str, FileEntry]:
        """Have this process write its files, and move them to where the others' are."""
        if not self.is_local:
            with tempfile.TemporaryDirectory(prefix="marsray-") as temporary:
                entries = _written(Path(temporary), write)
                for file in entries:
                    self._fs.put_file(f"{temporary}/{file}", f"{partial}/{file}")
            return entries
        own = Path(partial) / f"{_PARTIAL}{group.rank}"  # whose files are whose stays plain
        own.mkdir(parents=True)
        entries = _written(own, write)
        for file in entries:
            target = Path(partial) / file
            target.parent.mkdir(parents=True, exist_ok=True)
            (own / file).rename(target)
        shutil.rmtree(own)
        return entries

    def _commit(self, name: str, partial: str, manifest: Manifest, group: Group) -> str | None:
        """Make the directory count; returns what went wrong."""
        if group.rank != 0:
            return None
        text = manifest.text.encode()
        try:
            if not self.is_local:
                self._fs.pipe_file(f"{partial}/{MANIFEST}", text)
                return None
            path = Path(partial)
            (path / MANIFEST).write_bytes(text)
            for item in [path / MANIFEST, path]:
                sync(item)
            path.rename(self._path(name))
            sync(path.parent)
        except OSError as error:
            return str(error.strerror or error)
        return None

    def _remove_if_present(self, path: str) -> None:
        if self._fs.exists(path):
            self._fs.rm(path, recursive=True)

    def _download(self, name: str, manifest: Manifest, target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            for file, entry in manifest.files.items():
                path = Path(temporary) / "content" / file
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fs.get_file(self._path(name, file), str(path))
                if describe(path) != entry:
                    raise Damaged(f"{file} does not match its checksum")
            content = Path(temporary) / "content"
            (content / MANIFEST).write_text(manifest.text, encoding="utf-8")
            content.rename(target)


def share(storage: Storage, name: str, source: Path) -> str:
    """Make a directory readable by every worker; returns what `fetch_shared` takes.

    Local storage is reached by all of them, and so is the directory itself.
    """
    if storage.is_local:
        return str(source)
    if name not in storage.names():
        storage.save(name, lambda target: copy_into(target, source), Alone())
    return storage.path(name)


def fetch_shared(reference: str) -> str:
    """Local path of a directory that was shared."""
    if "://" not in reference:
        return reference
    root, _, name = reference.rpartition("/")
    return str(Storage(root).fetch(name))


def copy_into(directory: Path, source: Path) -> None:
    """Copy the files of another directory into this one, following links."""
    shutil.copytree(source, directory, dirs_exist_ok=True)


def _written(directory: Path, write: Callable[[Path], None]) -> dict[str, FileEntry]:
    """Run ``write``, describe what it wrote, and flush it to disk.

    A manifest among it, of a directory that was copied, makes room for the new one.
    """
    write(directory)
    (directory / MANIFEST).unlink(missing_ok=True)
    entries = describe_all(directory).files
    for file in entries:
        sync(directory / file)
    return entries
