"""Ends an engine whose stepping thread hangs, and says before that it is overdue.

Loading, compiling and warming up are not watched: the watch begins once the engine is ready.
Imports no Ray or HTTP library.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from mars_serve.engine.ipc.client import EngineClient, EngineDied
from mars_serve.engine.ipc.pulse import Pulse

_OVERDUE_S = 5.0
"""Least seconds without a sign of life after which an engine is overdue."""
_OVERDUE_TIMES, _HUNG_TIMES = 2.0, 10.0
"""Multiples of a step's expected time after which it is overdue, and after which it hangs."""
_LOOK_S = 0.5
_MOST_A_LOOK_S = 2 * _LOOK_S
"""Most seconds that count between two looks, so that an engine is not ended because this process,
or the whole machine, stood still."""

_log = logging.getLogger(__name__)


@dataclass
class PulseReader:
    """Judges by its pulse how long an engine has been silent.

    The stepping thread beats before each step, and once a second while there is nothing to run.
    """

    pulse: Pulse
    expected_s: Callable[[int, int], float]
    """Seconds that a step is expected to take, from its positions and its cached tokens."""
    step_timeout_s: float
    """Least seconds after which a step is taken to hang."""
    silent_s: float = 0.0
    """Seconds without a sign of life, without those in which nobody looked."""
    _beat_s: float = 0.0
    _looked_s: float | None = None

    def look(self, now_s: float) -> None:
        """Look at the pulse at ``now_s``, by any clock that does not jump."""
        beat_s, looked_s = self.pulse.beat_s, self._looked_s
        self._looked_s = now_s
        if looked_s is None or beat_s != self._beat_s:
            self._beat_s, self.silent_s = beat_s, 0.0
        else:
            self.silent_s += min(now_s - looked_s, _MOST_A_LOOK_S)

    @property
    def is_overdue(self) -> bool:
        """Whether the engine should get no new requests for now."""
        return self.silent_s >= max(_OVERDUE_S, _OVERDUE_TIMES * self._expected_s())

    @property
    def is_hung(self) -> bool:
        """Whether the engine is to be ended."""
        return self.silent_s >= max(self.step_timeout_s, _HUNG_TIMES * self._expected_s())

    def _expected_s(self) -> float:
        positions, cached_tokens = self.pulse.step
        return self.expected_s(positions, cached_tokens) if positions else 0.0


def watch(reader: PulseReader, engine: EngineClient, end: Callable[[], None]) -> None:
    """Start a daemon thread that watches an engine until it has ended.

    The engine is told whether it is overdue, and asked whether it runs; ``end`` ends it at once.
    """

    def run() -> None:
        is_over = False
        while engine.is_alive and not is_over:
            try:
                is_over = look()
            except Exception:  # an engine that nobody watches may hang for good
                _log.exception("the engine cannot be watched; trying again")
            time.sleep(_LOOK_S)

    def look() -> bool:
        reader.look(time.monotonic())
        if reader.is_hung:
            _log.error("the engine is ended: no sign of life for %.0f s", reader.silent_s)
            end()
            return True
        if reader.is_overdue != engine.condition.is_overdue:
            condition = replace(engine.condition, is_overdue=reader.is_overdue)
            with suppress(EngineDied):
                engine.tell(condition)
            change = "overdue and gets no requests" if condition.is_overdue else "back"
            _log.warning("the engine is %s", change)
        return False

    threading.Thread(target=run, name="watchdog", daemon=True).start()
