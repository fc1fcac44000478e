"""Shows in shared memory whether an engine's stepping thread still works, and on what.

The engine's process writes, the process that uses it reads. No message is sent and no lock is
taken, so a process that is stopped, or that hangs in a kernel, is seen as well.
"""

import mmap
import os
import time

_SIZE = mmap.PAGESIZE
_BEAT, _POSITIONS, _CACHED_TOKENS = range(3)


class Pulse:
    """One side of the shared memory; the fields are doubles, each written at once."""

    def __init__(self, descriptor: int) -> None:
        """Map the memory behind a file descriptor from `create`; the descriptor may be closed."""
        self._fields = memoryview(mmap.mmap(descriptor, _SIZE)).cast("d")

    @staticmethod
    def create() -> int:
        """Return the file descriptor of new shared memory, without a beat; the caller closes it."""
        descriptor = os.memfd_create("pulse")  # a write to a file on a full disk would be fatal
        os.truncate(descriptor, _SIZE)
        return descriptor

    def beat(self) -> None:
        """Show that the stepping thread is alive and runs no step."""
        self._fields[_POSITIONS] = 0.0
        self._fields[_BEAT] = time.monotonic()

    def begin(self, positions: int, cached_tokens: int) -> None:
        """Show that a step begins, which feeds and reads so much over all its rows."""
        self._fields[_CACHED_TOKENS] = float(cached_tokens)
        self._fields[_POSITIONS] = float(positions)
        self._fields[_BEAT] = time.monotonic()

    @property
    def beat_s(self) -> float:
        """Time of the latest sign of life by ``time.monotonic``, which all processes share."""
        return self._fields[_BEAT]

    @property
    def step(self) -> tuple[int, int]:
        """Positions and cached tokens of the running step; 0 positions if none runs."""
        return int(self._fields[_POSITIONS]), int(self._fields[_CACHED_TOKENS])
