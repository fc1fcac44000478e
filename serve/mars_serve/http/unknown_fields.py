"""Tells clients and operators which fields of a request the server does not know and ignores."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from mars_serve.http.middleware.records import RequestRecord

_HEADER = "X-Marsray-Unknown-Fields"
_MAX_SHOWN = 16
"""Most names in a response's header."""
_MAX_LENGTH = 64
"""Most characters of a name."""
_MAX_RECORDED = 64
"""Most names that records get within `_EVERY_S`; clients could make up any number of them."""
_EVERY_S = 60.0
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


class UnknownFields:
    """Names unknown fields: in each response, and once a minute for each name in a record.

    Args:
        clock: Returns the time in seconds, from any start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recorded = dict[str, float]()
        """Time at which each name was last recorded, the oldest first."""

    def report(self, names: Sequence[str], record: RequestRecord) -> dict[str, str]:
        """Return the header that names the unknown fields of a request, and complete its record.

        Names are a client's text, so letters that could end a header or a line are replaced.
        """
        if not names:
            return {}
        safe = [_UNSAFE.sub("?", name[:_MAX_LENGTH]) for name in names[:_MAX_SHOWN]]
        record.unknown_fields = [name for name in safe if self._is_due(name)] or None
        more = ["..."] if len(names) > _MAX_SHOWN else []
        return {_HEADER: ", ".join([*safe, *more])}

    def _is_due(self, name: str) -> bool:
        """Return whether a name is to be recorded now, and note that it is."""
        now = self._clock()
        while self._recorded and now - next(iter(self._recorded.values())) >= _EVERY_S:
            del self._recorded[next(iter(self._recorded))]
        if name in self._recorded or len(self._recorded) >= _MAX_RECORDED:
            return False
        self._recorded[name] = now
        return True
