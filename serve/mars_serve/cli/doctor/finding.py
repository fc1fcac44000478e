"""Describes the findings of ``marsray doctor``.

Imports no package beyond marsray, so that checks also run where others are broken.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from mars_platform.errors import UserError, one_line


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    state: Literal["ok", "warning", "failed"]
    """Whether it works, works less well than it could, or does not work."""
    found: str
    """Observation in one line."""
    remedy: str = ""
    """Remedy; empty if nothing needs to be done."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The same for programs, where it is more than one line."""


def guarded(name: str, check: Callable[[], Iterable[Finding]], remedy: str) -> Iterator[Finding]:
    """Yield a check's findings, and one more if the check itself fails.

    Any error is caught, and told of: one broken part must not keep the other checks from running.
    ``remedy`` is for errors that name none.
    """
    try:
        yield from check()
    except UserError as error:
        found, _, own = str(error).rpartition("; ")
        yield Finding(name, "failed", found or own, own if found else remedy)
    except Exception as error:
        yield Finding(name, "failed", f"{type(error).__name__}: {one_line(error)}", remedy)
