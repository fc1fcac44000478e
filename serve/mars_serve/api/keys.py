"""Who a request comes from, by the key that it gives. Knows no HTTP."""

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
    """Who a request comes from, and what it may do."""

    name: str
    """As logs call it; empty on a server without keys."""
    tenant: str = ""
    """Callers of one tenant share stored prefixes."""
    tiers: frozenset[str] = frozenset({"default", "flex", "priority"})
    """Values of ``service_tier`` that it may ask for."""
    min_threshold: float = 0.0
    """Lowest τ of its requests, in [0, 1]."""
    is_admin: bool = False
    max_concurrent: int | None = None
    """Requests at once; None without a limit, as those below."""
    tokens_per_minute: int | None = None
    """Prompt and output tokens."""
    requests_per_minute: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether anything of it has to be counted."""
        limits = (self.max_concurrent, self.tokens_per_minute, self.requests_per_minute)
        return any(limit is not None for limit in limits)

    @classmethod
    def of(cls, entry: KeyEntry) -> Caller:
        """The holder of a key."""
        return cls(
            name=entry.name,
            # The prefix keeps a tenant that is written down apart from a key's own.
            tenant=f"key:{entry.name}" if entry.tenant is None else f"tenant:{entry.tenant}",
            tiers=frozenset(entry.tiers),
            min_threshold=entry.min_confidence_threshold,
            is_admin=entry.admin,
            max_concurrent=entry.max_concurrent,
            tokens_per_minute=entry.tokens_per_minute,
            requests_per_minute=entry.requests_per_minute,
        )


class KeyRing:
    """The keys in force."""

    def __init__(
        self, settings: KeySettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read the keys.

        Raises:
            UserError: the file or variable cannot be read or is malformed.
        """
        self._settings = settings
        self._clock = clock
        self._looked_s = clock()
        self._stamp: _Stamp | None = None
        if settings.file is None:
            entries = settings.current_entries()
        else:
            self._stamp = _stamp_of(settings.file)
            entries = _read(settings.file)
        self.is_open = entries is None
        """Whether requests need no key."""
        self._callers = _by_digest(entries or [])

    def find(self, key: bytes) -> Caller | None:
        """Who holds a key, or None for a key that is not in force.

        Compares with every key in constant time, so that the time tells nothing of a hash.
        """
        digest = hash_key(key).encode()
        found = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    async def refresh(self) -> None:
        """Read the file again if it has changed; cheap between two looks.

        Called on the way of a request: a look is one ``stat``, it needs no task of its own, and
        a server without requests needs no new keys. A file that cannot be used leaves the keys in
        force and is reported once.
        """
        now_s = self._clock()
        path = self._settings.file
        if path is None or now_s - self._looked_s < self._settings.reload_s:
            return
        self._looked_s = now_s
        stamp = _stamp_of(path)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._callers = _by_digest(await asyncio.to_thread(_read, path))
            except UserError as error:
                _log.error("the keys stay as they were: %s", error)
            else:
                _log.warning("%d keys read from %s", len(self._callers), path)


def _by_digest(entries: list[KeyEntry]) -> list[tuple[bytes, Caller]]:
    return [(entry.sha256.encode(), Caller.of(entry)) for entry in entries]


def _stamp_of(path: Path) -> _Stamp | None:
    """Changes with the file's content; None where there is no file."""
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
