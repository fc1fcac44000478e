"""API keys for tests: entries of key files, headers, and a clock for limits per minute."""

from __future__ import annotations

import hashlib
from typing import Any


def digest_of(key: str) -> str:
    """Return a key's hash as a key file contains it."""
    return hashlib.sha256(key.encode()).hexdigest()


def key_entry(key: str, **fields: Any) -> dict[str, Any]:
    """Return a key's entry, which by default is named like the key itself."""
    return {"name": key, "sha256": digest_of(key), **fields}


def bearer(key: str | None) -> dict[str, str]:
    """Return the header that gives a key; no header for None."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


class FakeClock:
    """A monotonic clock that a test sets, in seconds."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s
