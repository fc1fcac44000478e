"""Times the stages of a start.

Imports no Ray, torch or HTTP library.
"""

import time


class Stages:
    """Seconds of each stage since this process began, in the order in which they ended."""

    def __init__(self) -> None:
        # Only imports came before, and they wait for nothing but the processor.
        self._began = self._last = time.monotonic() - time.process_time()
        self._seconds: dict[str, float] = {}

    def end(self, stage: str) -> None:
        """Note that a stage has ended, which began when the one before it ended."""
        now = time.monotonic()
        self._seconds[stage] = now - self._last
        self._last = now

    def summary(self) -> str:
        """Return the whole time and that of each stage, such as ``9.1 s: command 2.1, Ray 7.0``."""
        parts = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self._seconds.items())
        return f"{self._last - self._began:.1f} s: {parts}"
