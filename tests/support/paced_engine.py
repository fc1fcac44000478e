"""An engine that holds its steps back to the step times of its model's ``frontier.json``.

A server of such engines scales like one on the hardware that the frontier was measured on, and its
outputs are the same. Several replicas can share a small machine this way: replicas that compute all
the time would slow each other down, while replicas that mostly wait do not.

To serve with it, start ``marsray serve``, and the Ray cluster, with the variables of `environment`.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mars_autoscale.model.frontier import read_frontier
from mars_autoscale.model.step_times import StepTimes
from mars_platform.checkpoint.directory import Checkpoint
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution.fault_isolation import Step
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.scheduled_row import ScheduledRow

NOT_VALID = "computing takes too much of the paced time"
"""Words of the warning in a server's log behind which its figures do not count."""
_MAX_SHARE = 0.5
"""Largest share of the paced time for computing; above it, replicas slow each other down."""
_WINDOW_S = 60.0
"""Paced seconds over which that share is taken."""
_COLD_START = "MARSRAY_PACED_COLD_START_S"

_log = logging.getLogger(__name__)


def environment(cold_start_s: float) -> dict[str, str]:
    """Return the variables that pace a server's engines, which take ``cold_start_s`` to start."""
    here = Path(__file__).parent
    path = [str(here / "paced_engines"), str(here), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": ":".join(filter(None, path)), _COLD_START: str(cold_start_s)}


class PacedEngine(Engine):
    """Holds each step back until its time on the frontier's hardware is over.

    Consecutive steps are due at the sum of their times, so waking up late does not slow them down
    unless computing takes too long. A step that computes for longer than its paced time delays the
    steps after it.
    """

    def __init__(self, checkpoint: Checkpoint, *arguments: Any, **options: Any) -> None:
        super().__init__(checkpoint, *arguments, **options)
        frontier = read_frontier(checkpoint.own_path)
        self._times = frontier.step_seconds.times()
        self._prompt_token_s = 1 / frontier.prefill_tokens_per_s
        self._start = self._real_s = self._paced_s = 0.0
        self._due: float | None = None  # when the last step was due; None while idle

    def warm_up(self, on_progress: Callable[[int, int], None] | None = None) -> StepTimes:
        """Choose masks by the paced times; an engine takes a cold start from its fork on."""
        super().warm_up(on_progress)
        self.adapt_windows(self._times)
        os.register_at_fork(after_in_child=partial(time.sleep, float(os.environ[_COLD_START])))
        return self._times

    def begin_step(self) -> Step | None:
        self._start = time.perf_counter() if self._due is None else self._due
        step = super().begin_step()
        if step is None:
            self._due = None
        return step

    def cancel(self, request_id: str) -> None:
        super().cancel(request_id)
        if not self.has_work:
            self._due = None

    def finish_step(self, step: Step | None) -> list[StepOutput]:
        if step is None:
            return super().finish_step(step)
        paced_s = self._seconds(step.rows)  # before their tokens are committed
        outputs = super().finish_step(step)
        now = time.perf_counter()
        self._check(now - self._start, paced_s)
        due = max(self._start + paced_s, now)
        time.sleep(due - now)
        self._due = due if self.has_work else None
        return outputs

    def _seconds(self, rows: Sequence[ScheduledRow]) -> float:
        """Return the time of a step: that of the rows that decode, and prompts at their own rate.

        Masks of a row in prefill, behind its last prompt token, count as decoding.
        """
        decoding = [row for row in rows if not row.request.in_prefill(self.window)]
        prompt_tokens = sum(row.num_tokens for row in rows) - sum(
            row.num_tokens for row in decoding
        )
        seconds = prompt_tokens * self._prompt_token_s
        if decoding or any(row.reads_logits for row in rows):
            positions = sum(row.num_positions for row in rows) - prompt_tokens
            cached_tokens = sum(row.request.num_cached for row in decoding)
            seconds += float(self._times.at(positions, cached_tokens))
        return seconds

    def _check(self, real_s: float, paced_s: float) -> None:
        self._real_s += real_s
        self._paced_s += paced_s
        if self._paced_s >= _WINDOW_S:
            if self._real_s > _MAX_SHARE * self._paced_s:
                _log.warning("%s: %.0f%%", NOT_VALID, 100 * self._real_s / self._paced_s)
            self._real_s = self._paced_s = 0.0
