"""A replica's part in autoscaling: it runs the inner loop, reports load and refuses late requests.

Twice a second it looks at its engine, and sets τ within the range that the governor allows. While
the governor is silent, it goes on with the last range. Imports no Ray or HTTP library.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from mars_autoscale.audit.counts import AuditTally
from mars_autoscale.policy.decision import ThresholdRange
from mars_autoscale.policy.inner_loop import InnerLoop, InnerLoopDecision, Look
from mars_autoscale.policy.lengths import LengthCounts
from mars_autoscale.policy.outer_loop import AutoscalingBasis
from mars_autoscale.policy.reports import LoadReport
from mars_autoscale.queueing.estimate import LateRule
from mars_platform.method.live import LiveDecoding
from mars_platform.tier import Tier
from mars_serve.config.served import PublishedThreshold
from mars_serve.config.settings import AutoscalingSettings
from mars_serve.engine.ipc.loop import EngineDied, EngineLoop
from mars_serve.engine.outputs import EngineStatus
from mars_serve.observability.request_load import RequestLoad

_PROMPT_WINDOW_S = 5.0
"""Seconds over which the share of time that prompts take is measured."""
_FRESH_PERIODS = 6
"""Periods of the outer loop for which its view of the arrivals holds."""


class Steering:
    """One replica's part in autoscaling; `take` and `step` belong to one thread."""

    def __init__(
        self,
        replica: str,
        basis: AutoscalingBasis,
        settings: AutoscalingSettings,
        loop: EngineLoop,
        load: Callable[[], RequestLoad],
        audits: Callable[[], AuditTally] = dict,
    ) -> None:
        """Apply the target τ.

        Args:
            replica: name of the replica, unique among all that ever ran.
            basis: figures by which the model is autoscaled.
            settings: settings of the model's autoscaling.
            loop: leads to the engine.
            load: returns the present load.
            audits: returns the audited outputs since the start.
        """
        self.basis = basis
        self._replica = replica
        self._settings = settings
        self._loop = loop
        self._load = load
        self._audits = audits
        self._inner_loop = InnerLoop(basis.capacity, settings.inner)
        self._range = ThresholdRange(
            basis.settings.floor_threshold, basis.settings.flex_floor_threshold
        )
        self._range_s = 0.0
        """Time at which the range came."""
        self._pinned: float | None = None
        """τ that was set by hand; None if the inner loop sets it."""
        target = basis.capacity.target_threshold
        self._decision = InnerLoopDecision(LiveDecoding(target, target))
        self._prompts = deque[tuple[float, int]]()
        """(time in s, prompt tokens computed since the start) within the window."""
        self._counts = LengthCounts()
        """Outputs since the start, at the last look."""
        self._lengths = LengthCounts()
        """Outputs, the latest with the highest weight."""
        self._late_rule: LateRule | None = None
        """The rule that the engine has."""
        self._apply()

    def take(self, published: PublishedThreshold, now_s: float) -> None:
        """Follow the governor: a τ set by hand at once, a range from the next look on.

        Raises:
            EngineDied: the engine has stopped.
        """
        self._pinned = published.threshold if published.is_pinned else None
        if published.range is not None:
            self._range, self._range_s = published.range, now_s
        self._apply()

    def step(self, now_s: float) -> LoadReport:
        """Look at the engine, choose τ, apply it and report.

        Args:
            now_s: time in seconds on any clock that does not jump.

        Raises:
            EngineDied: the engine has stopped.
        """
        status = self._loop.status()
        self._decision = self._inner_loop.update(self._look(status, now_s))
        self._apply()
        return self._report(status)

    def stats(self, now_s: float) -> dict[str, float]:
        """Return the report as numbers, see `LoadReport.stats`; empty if the engine has stopped.

        Args:
            now_s: seconds since 1970.
        """
        with suppress(EngineDied):
            return self._report(self._loop.status()).stats(now_s)
        return {}

    @property
    def decision(self) -> InnerLoopDecision:
        """The latest decision of the inner loop; a τ set by hand takes the place of its τ."""
        return self._decision

    def late_rule(self) -> LateRule | None:
        """Return the rule by which late requests are refused; None if something is left to give."""
        if not self._range.is_saturated or self._pinned is not None:
            return None
        totals = self._load().totals
        each_s = self.basis.capacity.busy_s(
            self._lengths.mean,
            totals.prompt_tokens / max(totals.arrived, 1),
            self._decision.gain,
        )
        return LateRule(each_s, self._settings.objective_ttft_s)

    def _look(self, status: EngineStatus, now_s: float) -> Look:
        if now_s - self._range_s > _FRESH_PERIODS * self.basis.settings.period_s:
            # the governor is silent: its floors still hold, but not what it said about arrivals
            self._range = replace(self._range, feed_forward=1.0, is_saturated=False)
        return Look(
            now_s=now_s,
            load=status.num_requests,
            allowed=self._range,
            prompt_share=self._prompt_share(status, now_s),
            flex_share=self._load().share(Tier.FLEX),
            pinned_share=self._load().share(None),
        )

    def _prompt_share(self, status: EngineStatus, now_s: float) -> float:
        """Return the share of the latest seconds that computing prompts took."""
        self._prompts.append((now_s, status.num_prompt_tokens - status.num_prefix_hit_tokens))
        while self._prompts[0][0] < now_s - _PROMPT_WINDOW_S:
            self._prompts.popleft()
        (first_s, first), (last_s, last) = self._prompts[0], self._prompts[-1]
        if last_s <= first_s:
            return 0.0
        rate = max(last - first, 0) / (last_s - first_s)
        return min(rate / self.basis.capacity.prefill_tokens_per_s, 1.0)

    def _note_lengths(self) -> None:
        counts = self._load().totals.lengths
        self._lengths = self._lengths.followed_by(counts - self._counts)
        self._counts = counts

    def _apply(self) -> None:
        live = self._decision.live
        if self._pinned is not None:
            # at 1, mode exact gives the same tokens, and the number of replicas counts on its speed
            live = LiveDecoding(self._pinned, is_exact=live.is_exact)
        if live != self._loop.live:
            self._loop.set_live(live)
        self._note_lengths()
        rule = self.late_rule()
        if rule != self._late_rule:
            self._loop.set_late_rule(rule)
            self._late_rule = rule

    def _report(self, status: EngineStatus) -> LoadReport:
        live, decision = self._loop.live, self._decision
        is_pinned = self._pinned is not None  # replicas must not pay for a τ that was set by hand
        return LoadReport(
            replica=self._replica,
            age_s=self._loop.age_s,
            num_running=status.num_running,
            num_waiting=status.num_waiting,
            threshold=live.threshold,
            flex_threshold=live.threshold_of(Tier.FLEX),
            gain=1.0 if is_pinned else decision.gain,
            loss=0.0 if is_pinned else decision.loss,
            is_lowest=decision.is_lowest,
            totals=self._load().totals,
            audits=self._audits(),
        )
