"""Describes the findings of ``marsray doctor``.

Only the standard library is imported here, so that checks also run where packages are broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

_MESSAGE_CHARACTERS = 300


class State(StrEnum):
    """How serious a finding is."""

    OK = "ok"
    """Nothing needs to be done."""
    WARNING = "warning"
    """Something works, but slowly or less well than it could."""
    FAILED = "failed"
    """Something does not work."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    """Name of what was checked."""
    state: State
    """How serious it is."""
    found: str
    """Observation in one line."""
    remedy: str = ""
    """Remedy; empty if nothing needs to be done."""


Check = Callable[[], Iterable[Finding]]


def ok(check: str, found: str) -> Finding:
    """Return a finding that needs nothing to be done."""
    return Finding(check, State.OK, found)


def warning(check: str, found: str, remedy: str) -> Finding:
    """Return a finding about what works, but not well."""
    return Finding(check, State.WARNING, found, remedy)


def failed(check: str, found: str, remedy: str) -> Finding:
    """Return a finding about what does not work."""
    return Finding(check, State.FAILED, found, remedy)


def guarded(name: str, check: Check) -> Iterator[Finding]:
    """Yield a check's findings, and one more if the check itself fails.

    Any error is caught, and told of: one broken part must not keep the other checks from running.
    """
    try:
        yield from check()
    except Exception as error:
        remedy = "the message says what is wrong; if it does not, report it as a bug"
        if isinstance(error, ImportError):
            remedy = "install marsray and its packages again: pip install --upgrade marsray"
        yield failed(name, f"the check failed: {described(error)}", remedy)


def described(error: BaseException) -> str:
    """Return an error's type and message as one line of limited length."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    is_short = len(text) <= _MESSAGE_CHARACTERS
    return text if is_short else f"{text[:_MESSAGE_CHARACTERS]} ..."
