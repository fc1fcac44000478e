"""API keys in force, and the caller that each of them identifies."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mars_platform.errors import UserError
from mars_serve.config.key_file import KeyEntry, hash_key, parse_keys
from mars_serve.config.settings import KeySettings

_log = logging.getLogger(__name__)
_Stamp = tuple[int, int, int]  # modification time in ns, size in bytes, inode


@dataclass(frozen=True)
class Caller:
    """The sender of a request and its permissions."""

    name: str
    """Name for logs and metrics; empty on a server without keys."""
    tenant: str = ""
    """Group of callers that share cached prompt prefixes, and what is stored."""
    tiers: frozenset[str] = frozenset({"default", "flex", "priority"})
    """Values of ``service_tier`` that the caller may use."""
    min_threshold: float = 0.0
    """Lowest τ of the caller's requests, in [0, 1]."""
    may_be_audited: bool = True
    """Whether outputs of the caller may be decoded again."""
    is_admin: bool = False
    may_control: bool = False
    """Whether prompts of the caller may contain control tokens."""
    is_alone: bool = True
    """Whether there is no other key, whose requests could be held up."""
    max_concurrent: int | None = None
    """Number of requests that may run at once; None means no limit, here and below."""
    tokens_per_minute: int | None = None
    """Number of prompt and output tokens allowed per minute."""
    requests_per_minute: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether any of the caller's limits is set."""
        limits = (self.max_concurrent, self.tokens_per_minute, self.requests_per_minute)
        return any(limit is not None for limit in limits)

    @classmethod
    def of(cls, entry: KeyEntry, *, is_alone: bool) -> Caller:
        """Return the caller that a key entry describes."""
        return cls(
            name=entry.name,
            # The prefix keeps a configured tenant apart from a key of the same name.
            tenant=f"key:{entry.name}" if entry.tenant is None else f"tenant:{entry.tenant}",
            tiers=frozenset(entry.tiers),
            min_threshold=entry.min_confidence_threshold,
            may_be_audited=entry.audit,
            is_admin=entry.admin,
            may_control=entry.control_tokens,
            is_alone=is_alone,
            max_concurrent=entry.max_concurrent,
            tokens_per_minute=entry.tokens_per_minute,
            requests_per_minute=entry.requests_per_minute,
        )


class KeyRing:
    """The keys in force, read again when their file changes."""

    def __init__(
        self,
        settings: KeySettings,
        *,
        trusts_anyone: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the keys.

        Without keys, ``trusts_anyone`` makes every caller an administrator who may send control
        tokens.

        Raises:
            UserError: the file or variable cannot be read or is malformed.
        """
        self._settings = settings
        self._clock = clock
        self._looked_s = clock()
        self._stamp: _Stamp | None = None
        self._is_reading = False
        if settings.file is None:
            entries = settings.current_entries()
        else:
            self._stamp = _stamp_of(settings.file)
            entries = _read(settings.file)
        self.is_open = entries is None
        """Whether the server has no keys, so that requests need none."""
        is_trusted = trusts_anyone and self.is_open
        self.anyone = Caller("", is_admin=is_trusted, may_control=is_trusted)
        self._callers = _by_digest(entries or [])

    def find(self, key: bytes) -> Caller | None:
        """Return the caller that a key belongs to, or None if the key is not in force.

        Compares with every key in constant time, so that the time tells nothing of a hash.
        """
        digest = hash_key(key).encode()
        found = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    async def named(self, name: str) -> Caller | None:
        """Return the caller with the name of a key in force, empty on an open server, else None."""
        if self.is_open and not name:
            return self.anyone
        await self.refresh()
        return next((caller for _, caller in self._callers if caller.name == name), None)

    async def refresh(self) -> None:
        """Read the key file again if it has changed.

        Each request calls this, so that no background task is needed. The file is checked at most
        every ``reload_s`` seconds, with one ``stat``, and never read twice at once: the older
        content could come last. If the file cannot be used, the keys in force stay and the problem
        is logged once.
        """
        now_s = self._clock()
        path = self._settings.file
        if path is None or self._is_reading or now_s - self._looked_s < self._settings.reload_s:
            return
        self._looked_s = now_s
        stamp = _stamp_of(path)
        if stamp == self._stamp:
            return
        self._is_reading = True
        try:
            self._callers = _by_digest(await asyncio.to_thread(_read, path))
        except UserError as error:
            _log.error("the keys stay as they were: %s", error)
        else:
            _log.warning("%d keys read from %s", len(self._callers), path)
        finally:
            self._is_reading = False
        self._stamp = stamp  # not if the request was cancelled: the next one then reads the file


def _by_digest(entries: list[KeyEntry]) -> list[tuple[bytes, Caller]]:
    is_alone = len(entries) == 1
    return [(entry.sha256.encode(), Caller.of(entry, is_alone=is_alone)) for entry in entries]


def _stamp_of(path: Path) -> _Stamp | None:
    """Return a value that changes with the file's content, or None if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _read(path: Path) -> list[KeyEntry]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"keys.file: {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError:
        raise UserError(f"keys.file: {path} is not UTF-8") from None
    return parse_keys(text, f"keys.file: {path}")
