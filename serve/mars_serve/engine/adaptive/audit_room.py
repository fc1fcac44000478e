"""Finds room for audits in an engine's steps."""

from collections.abc import Collection, Sequence

from mars_autoscale.model.step_times import StepTimes
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import ScheduledRow

_MAX_POSITIONS = 256
"""Most positions of an audit in a step, so that a request that comes meanwhile waits little."""
_MAX_SLOWDOWN = 1.02
"""Factor by which an audit may lengthen a step of other requests, by the measured step times."""


class AuditRoom:
    """Counts the positions that audits may take without slowing others down."""

    def __init__(self) -> None:
        self.times: StepTimes | None = None
        """Times of steps here; None if they were not measured."""
        self._last = (0, 0)
        """Positions and cached tokens of the last step, those of audits left out."""

    def observe(self, rows: Sequence[ScheduledRow]) -> None:
        """Note the size of a step."""
        others = [row for row in rows if not row.request.is_audit]
        self._last = (
            sum(row.num_positions for row in others),
            sum(row.request.num_cached for row in others),
        )

    def positions(
        self, requests: Collection[Request], running: Sequence[Request], window: int
    ) -> int:
        """Return the most positions of audits in the next step.

        Beside other requests, audits get positions only if none of those waits or computes a
        prompt, and if steps take no longer with them. ``running`` are the ``requests`` that have
        been admitted.
        """
        others = [request for request in requests if not request.is_audit]
        if not others:
            return _MAX_POSITIONS
        num_running = sum(not request.is_audit for request in running)
        has_urgent = num_running < len(others) or any(each.in_prefill(window) for each in others)
        if has_urgent or self.times is None:
            return 0
        positions, cached_tokens = self._last
        most_s = _MAX_SLOWDOWN * self.times.at(positions, cached_tokens)
        room = _MAX_POSITIONS
        while room and self.times.at(positions + room, cached_tokens) > most_s:
            room //= 2
        return room
