"""Objects of keys in a directory or an object store, by tenant and kind.

An object is written whole or not at all, and names hold no text of clients. Ids begin with the time
at which they were made, so that listings are in order and lifetimes need no further record.
"""

import asyncio
import re
import secrets
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from mars_platform.checkpoint.files import replacing
from mars_platform.errors import UserError, one_line
from mars_serve.api.errors import ApiError
from mars_serve.config.settings import StorageSettings

_TIME_DIGITS = 12  # hexadecimal digits of milliseconds since 1970
_RANDOM_BYTES = 10
_ID = re.compile(r"[0-9a-f]{32}")
_OWN = re.compile(r"[0-9a-f]{32}/[a-z_]+/([^/]+/){0,2}[0-9a-f]{32}")
"""Path below the root of an object, or of one that is being written."""
_COUNT_S = 60.0
"""Seconds for which the sizes of a key's objects are known, but for what is written here."""

_Found = TypeVar("_Found")
OnFull = Literal["refuse", "drop_oldest", "exceed"]


def new_id(now_s: float | None = None) -> str:
    """Return a new id of 32 hexadecimal digits, which sorts by time; by default that is now."""
    milliseconds = int((time.time() if now_s is None else now_s) * 1000)
    return f"{milliseconds:0{_TIME_DIGITS}x}{secrets.token_hex(_RANDOM_BYTES)}"


def made_at(name: str) -> float:
    """Return the time in seconds since 1970 at which `new_id` made an id."""
    return int(name[:_TIME_DIGITS], 16) / 1000


@dataclass
class _Usage:
    """Room that a key's objects take."""

    counted_s: float
    """Time of the count by the monotonic clock, in seconds."""
    num_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes by kind."""
    num_objects: Counter[str] = field(default_factory=Counter)
    """Objects by kind."""


class TenantThreads:
    """Threads of which a tenant has some at most, so that others find some free."""

    def __init__(self, name: str, num: int, num_of_tenant: int) -> None:
        self._threads = ThreadPoolExecutor(num, name)
        self._turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(num_of_tenant))

    async def run(self, tenant: str, work: Callable[..., _Found], *arguments: Any) -> _Found:
        """Call what waits for the storage in a thread of a tenant's."""
        async with self._turns[tenant]:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, partial(work, *arguments))


class ObjectStorage:
    """Objects below a root, which all ingress replicas share.

    A kind is a word of this package's, or a word and an id of its own making below it. Calls run in
    threads. Objects older than the settings' lifetime do not exist.
    """

    def __init__(self, settings: StorageSettings, clock: Callable[[], float] = time.time) -> None:
        """Open the storage at ``settings.path``, which must be set.

        Raises:
            UserError: it cannot be used; the message says why.
        """
        assert settings.path is not None
        self.settings = settings
        self._clock = clock
        # the event loop's own threads would be missing to requests while many wait for a storage
        self.short = TenantThreads("storage", 32, 8)
        self.long = TenantThreads("storage-long", 4, 1)
        """Threads for what takes seconds, such as whole files."""
        self._usage = dict[str, _Usage]()
        path = settings.path
        try:
            # other processes write here, too, and a cached listing would hide their objects
            self._files, root = fsspec.core.url_to_fs(path, use_listings_cache=False)
            self._root = root.rstrip("/")
            self._is_local = isinstance(self._files, LocalFileSystem)
            if self._is_local:
                Path(self._root).mkdir(mode=0o700, parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self._root).close()
            else:
                self._entries(self._root)
        except Exception as error:  # file systems raise errors of many types
            raise UserError(
                f"storage.path: {path} cannot be used ({one_line(error)}); name a directory or a "
                "URL that can be written"
            ) from error

    async def put(
        self, tenant: str, kind: str, name: str, content: bytes, on_full: OnFull = "refuse"
    ) -> None:
        """Write an object, in place of one with its id if there is one; see `put_file`."""
        await self.put_file(tenant, kind, name, BytesIO(content), on_full)

    async def put_file(
        self, tenant: str, kind: str, name: str, file: BinaryIO, on_full: OnFull = "refuse"
    ) -> int:
        """Write an object with the content of a file from its beginning, in pieces.

        Where the key has no room left, ``on_full`` says whether the object is refused, the oldest
        of its kind give way, or the limit does not count.

        Returns:
            Its size in bytes.

        Raises:
            ApiError: status 429: the key has no room, and ``on_full`` is not to ``exceed``.
        """
        threads = self.short if isinstance(file, BytesIO) else self.long
        return await threads.run(tenant, self._put, tenant, kind, name, file, on_full)

    async def get(self, tenant: str, kind: str, name: str) -> bytes | None:
        """Return an object's content; None if there is none, also for what is no id."""
        return (await self.get_all(tenant, kind, [name])).get(name)

    async def get_all(self, tenant: str, kind: str, ids: Iterable[str]) -> dict[str, bytes]:
        """Return the contents of some objects by their ids, in order; others are missing."""
        return await self.short.run(tenant, self._get, tenant, kind, ids)

    def open(self, tenant: str, kind: str, name: str) -> BinaryIO:
        """Open an object to read it in pieces, in a thread of the caller's.

        Raises:
            FileNotFoundError: there is none.
        """
        if not self._is_alive(name):
            raise FileNotFoundError(f"there is no object {name}")
        return cast("BinaryIO", self._files.open(self._path(tenant, kind, name), "rb"))

    async def has_room(self, tenant: str, num_bytes: int, but_for: str) -> bool:
        """Return whether an object may be written if all others of the kind ``but_for`` go."""

        def find() -> bool:
            sizes = self._usage_of(tenant).num_bytes
            others = sizes.total() - sizes[but_for]
            return others + num_bytes <= self.settings.bytes_per_key

        return await self.short.run(tenant, find)

    async def names(self, tenant: str, kind: str) -> list[str]:
        """Return the ids of a kind's objects, the oldest first."""
        return await self.short.run(tenant, self._names, tenant, kind)

    async def delete(self, tenant: str, kind: str, name: str) -> bool:
        """Delete an object; return whether there was one."""
        return await self.short.run(tenant, self._delete, tenant, kind, [name]) == 1

    async def delete_all(self, tenant: str, kind: str, ids: Iterable[str]) -> None:
        """Delete some objects, as far as they exist."""
        await self.short.run(tenant, self._delete, tenant, kind, ids)

    async def delete_expired(self) -> None:
        """Delete all objects of all keys that are older than the lifetime."""
        await self.long.run("server", self._delete_expired)

    def _path(self, tenant: str, kind: str, name: str) -> str:
        assert _ID.fullmatch(name), name
        return f"{self._directory(tenant)}/{kind}/{name}"

    def _directory(self, tenant: str) -> str:
        # tenants have names that people give, which file systems may not take
        return f"{self._root}/{blake2b(tenant.encode(), digest_size=16).hexdigest()}"

    def _is_alive(self, name: str) -> bool:
        """Return whether an object with an id may exist: text that is no id is alive never."""
        if not _ID.fullmatch(name):
            return False
        return self._clock() - made_at(name) < self.settings.lifetime_s

    def _put(self, tenant: str, kind: str, name: str, file: BinaryIO, on_full: OnFull) -> int:
        path, num_bytes = self._path(tenant, kind, name), file.seek(0, 2)
        file.seek(0)
        usage = self._usage_of(tenant)
        before = self._size_of(path)
        if on_full != "exceed":
            self._make_room(tenant, kind, num_bytes - (before or 0), before is None, on_full)
        if self._is_local:
            target = Path(path)
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(target) as partial, partial.open("wb") as written:
                shutil.copyfileobj(file, written)
        elif isinstance(file, BytesIO):
            self._files.pipe_file(path, file.getvalue())
        else:
            with tempfile.NamedTemporaryFile() as copy:
                shutil.copyfileobj(file, copy)
                copy.flush()
                self._files.put_file(copy.name, path)
        usage.num_bytes[kind] += num_bytes - (before or 0)
        usage.num_objects[kind] += before is None
        return num_bytes

    def _size_of(self, path: str) -> int | None:
        try:
            return int(self._files.info(path)["size"])
        except FileNotFoundError:
            return None

    def _usage_of(self, tenant: str) -> _Usage:
        """Return what a key's objects take, counted anew from time to time."""
        now_s = time.monotonic()
        usage = self._usage.get(tenant)
        if usage is None or now_s - usage.counted_s > _COUNT_S:
            usage = _Usage(now_s)
            directory = self._directory(tenant)
            for path, info in self._found(directory).items():
                kind = path[len(directory) + 1 :].rpartition("/")[0]
                usage.num_bytes[kind] += info["size"] or 0
                usage.num_objects[kind] += 1
            self._usage[tenant] = usage  # not before: others would find room meanwhile
        return usage

    def _make_room(
        self, tenant: str, kind: str, num_bytes: int, is_new: bool, on_full: OnFull
    ) -> None:
        """Make room for an object, or refuse it."""
        usage, settings = self._usage_of(tenant), self.settings
        others = usage.num_bytes.total() - usage.num_bytes[kind]
        may_drop = on_full == "drop_oldest" and others + num_bytes <= settings.bytes_per_key
        for oldest in self._names(tenant, kind) if may_drop else ():
            if not self._lacks_room(usage, kind, num_bytes, is_new):
                return
            self._delete(tenant, kind, [oldest])
        if self._lacks_room(usage, kind, num_bytes, is_new):
            raise ApiError(
                429,
                f"storage of this key: {usage.num_bytes.total()} bytes and "
                f"{usage.num_objects[kind]} "
                f"objects of this kind are kept, and {settings.bytes_per_key} and "
                f"{settings.objects_per_key} may be; delete some",
                code="storage_full",
            )

    def _lacks_room(self, usage: _Usage, kind: str, num_bytes: int, is_new: bool) -> bool:
        return (
            usage.num_bytes.total() + num_bytes > self.settings.bytes_per_key
            or usage.num_objects[kind] + is_new > self.settings.objects_per_key
        )

    def _get(self, tenant: str, kind: str, ids: Iterable[str]) -> dict[str, bytes]:
        paths = {self._path(tenant, kind, name): name for name in ids if self._is_alive(name)}
        # cat() would take brackets in the root's name for a pattern
        found = self._files.cat_ranges(list(paths), None, None, on_error="return")
        for content in found:
            if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                raise content
        pairs = zip(paths.values(), found, strict=True)
        return {name: content for name, content in pairs if isinstance(content, bytes)}

    def _names(self, tenant: str, kind: str) -> list[str]:
        names = self._entries(f"{self._directory(tenant)}/{kind}")
        return sorted(name for name in names if self._is_alive(name))

    def _entries(self, directory: str) -> list[str]:
        try:
            paths = self._files.ls(directory, detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def _found(self, directory: str) -> dict[str, dict[str, int | None]]:
        """Return the files below a directory, which need not exist."""
        found: dict[str, dict[str, int | None]] = self._files.find(directory, detail=True)
        return found

    def _delete(self, tenant: str, kind: str, ids: Iterable[str]) -> int:
        usage, num_deleted = self._usage_of(tenant), 0
        for name in ids:
            if not _ID.fullmatch(name):
                continue
            path = self._path(tenant, kind, name)
            size = self._size_of(path)
            if size is not None:
                try:
                    self._files.rm_file(path)
                except FileNotFoundError:  # another process was quicker
                    continue
                usage.num_bytes[kind] -= size
                usage.num_objects[kind] -= 1
                num_deleted += 1
        if self._is_local and "/" in kind:  # a directory of one thing alone, which may be gone
            with suppress(OSError):
                Path(self._directory(tenant), kind).rmdir()
        return num_deleted

    def _delete_expired(self) -> None:
        for path in self._found(self._root):
            directory, _, name = path.rpartition("/")
            if not _OWN.fullmatch(path.removeprefix(f"{self._root}/")) or self._is_alive(name):
                continue
            # what a process that was killed had begun to write lies in a directory of its own
            if directory.rpartition("/")[2].startswith("."):
                shutil.rmtree(directory, ignore_errors=True)
            else:
                self._files.rm_file(path)
