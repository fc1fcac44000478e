"""A replica's own part in autoscaling: its inner loop, what it reports, and whom it refuses.

Twice a second it looks at its engine and chooses τ within the range that the governor allows.
Where no news come it goes on with the last range. Knows no Ray.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import replace

from mars_autoscale.policy.admission import estimated_wait_s
from mars_autoscale.policy.control import LoadReport, Plan
from mars_autoscale.policy.inner_loop import LocalController, Stage
from mars_autoscale.policy.observe import Look
from mars_platform.tier import Tier
from mars_serve.config.served import LiveThreshold, ThresholdRange
from mars_serve.config.settings import AutoscalingSettings
from mars_serve.engine.ipc.loop import EngineDied, EngineLoop, QueueFull
from mars_serve.engine.request import EngineStatus, LiveDecoding, Request
from mars_serve.observability.request_load import RequestLoad

_PROMPT_WINDOW_S = 5.0
"""Over which the share of time is taken that prompts need."""
_FRESH_PERIODS = 6
"""Of the outer loop, for which its view of the arrivals holds."""


class Steering:
    """One replica's; `take` and `step` belong to one thread."""

    def __init__(
        self,
        replica: str,
        plan: Plan,
        settings: AutoscalingSettings,
        loop: EngineLoop,
        load: RequestLoad,
    ) -> None:
        self.plan = plan
        self._replica = replica
        self._settings = settings
        self._loop = loop
        self._load = load
        self._controller = LocalController(plan.capacity, settings.inner)
        self._range = ThresholdRange(
            plan.settings.floor_threshold, plan.settings.flex_floor_threshold, 1.0, False
        )
        self._range_s = 0.0
        self._pinned: float | None = None
        self._stage = Stage(plan.capacity.rungs[0], plan.capacity.rungs[0])
        self._prompts = deque[tuple[float, int]]()
        self._apply(self._decoding())

    def take(self, live: LiveThreshold, now_s: float) -> None:
        """Follow the governor: its range from the next step on, a τ that was set by hand at once.

        Raises:
            EngineDied: the engine has stopped.
        """
        self._pinned = live.threshold if live.is_pinned else None
        if live.range is not None:
            self._range, self._range_s = live.range, now_s
        self._apply(self._decoding())

    def step(self, now_s: float) -> LoadReport:
        """Look, choose, apply, and say so.

        Args:
            now_s: by any clock that does not jump.

        Raises:
            EngineDied: the engine has stopped.
        """
        status = self._loop.status()
        self._stage = self._controller.update(self._look(status, now_s))
        self._apply(self._decoding())
        return self._report(status)

    def stats(self, now_s: float) -> dict[str, float]:
        """See `LoadReport.stats`; empty where the engine has stopped.

        Args:
            now_s: seconds since 1970.
        """
        with suppress(EngineDied):
            return self._report(self._loop.status()).stats(now_s)
        return {}

    def refuse_late(self, request: Request) -> None:
        """Refuse what would come too late although everything has been given; it has arrived all
        the same.

        Raises:
            QueueFull: so it is.
        """
        if not self._range.is_saturated or self._pinned is not None:
            return
        capacity, totals = self.plan.capacity, self._load.totals
        wait_s = estimated_wait_s(
            self._load.num_ahead(request.options.tier),
            mean_output_tokens=totals.output_tokens / max(totals.ended, 1),
            mean_prompt_tokens=totals.prompt_tokens / max(totals.arrived, 1),
            tokens_per_s=capacity.tokens_per_s(capacity.rungs[0]) * self._stage.gain,
            prefill_tokens_per_s=capacity.prefill_tokens_per_s,
        )
        objective_s = self._settings.objective_ttft_s
        if wait_s > objective_s:
            self._load.refused(request)
            raise QueueFull(f"it would wait {wait_s:.1f} s, longer than the {objective_s:g} s")

    def _look(self, status: EngineStatus, now_s: float) -> Look:
        self._forget_old_range(now_s)
        allowed = self._range
        return Look(
            now_s,
            status.num_requests,
            allowed.floor_threshold,
            allowed.feed_forward,
            self._prompt_share(status, now_s),
            allowed.flex_floor_threshold,
            self._load.share(Tier.FLEX),
            self._load.share(None),
        )

    def _forget_old_range(self, now_s: float) -> None:
        """Of a governor that is silent only the floors hold: nobody knows what arrives by now."""
        if now_s - self._range_s > _FRESH_PERIODS * self.plan.settings.period_s:
            self._range = replace(self._range, feed_forward=1.0, is_saturated=False)

    def _prompt_share(self, status: EngineStatus, now_s: float) -> float:
        """Of the latest seconds, the share that computing prompts took."""
        self._prompts.append((now_s, status.num_prompt_tokens - status.num_prefix_hit_tokens))
        while self._prompts[0][0] < now_s - _PROMPT_WINDOW_S:
            self._prompts.popleft()
        (first_s, first), (last_s, last) = self._prompts[0], self._prompts[-1]
        if last_s <= first_s:
            return 0.0
        rate = max(last - first, 0) / (last_s - first_s)
        return min(rate / self.plan.capacity.prefill_tokens_per_s, 1.0)

    def _decoding(self) -> LiveDecoding:
        if self._pinned is not None:
            return LiveDecoding(self._pinned)
        stage = self._stage
        return LiveDecoding(stage.default.threshold, stage.flex.threshold, stage.is_exact)

    def _apply(self, decoding: LiveDecoding) -> None:
        if decoding != self._loop.live:
            self._loop.set_live(decoding)

    def _report(self, status: EngineStatus) -> LoadReport:
        live, stage, is_pinned = self._loop.live, self._stage, self._pinned is not None
        return LoadReport(
            self._replica,
            self._loop.age_s,
            status.num_running,
            status.num_waiting,
            live.threshold,
            live.threshold_of(Tier.FLEX),
            # what somebody has set by hand is no debt for replicas to pay
            gain=1.0 if is_pinned else stage.gain,
            loss=0.0 if is_pinned else stage.default.loss - self.plan.capacity.rungs[0].loss,
            is_lowest=stage.is_lowest,
            totals=self._load.totals,
        )
