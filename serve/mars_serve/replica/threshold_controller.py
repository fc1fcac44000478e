"""A replica's part in autoscaling: it runs the inner loop and refuses late requests.

Twice a second it looks at its engine, and sets τ within the range that the governor allows. While
the governor is silent, it goes on with the last range. Imports no Ray or HTTP library.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from mars_autoscale.policy.decision import ThresholdRange
from mars_autoscale.policy.inner_loop import EngineSample, InnerLoop, InnerLoopDecision
from mars_autoscale.policy.lengths import LengthCounts
from mars_autoscale.policy.outer_loop import AutoscalingBasis
from mars_autoscale.policy.pace import PaceMeter, bounded
from mars_autoscale.policy.reports import EngineStatus
from mars_autoscale.queueing.estimate import LateRule
from mars_platform.method.mode import LiveDecoding
from mars_platform.tier import Tier
from mars_serve.config.served import PublishedThreshold
from mars_serve.config.settings import AutoscalingSettings
from mars_serve.engine.ipc.client import EngineClient
from mars_serve.observability.request_telemetry import RequestTelemetry

_PROMPT_WINDOW_S = 5.0
"""Seconds over which the share of time that prompts take is measured."""
_FRESH_PERIODS = 6
"""Periods of the outer loop for which its view of the arrivals holds."""


class ThresholdController:
    """Applies the τ that the governor publishes; `take` and `step` belong to one thread."""

    basis: AutoscalingBasis | None = None
    decision: InnerLoopDecision | None = None
    """Latest decision of the inner loop; a τ set by hand takes the place of its τ."""
    pace: float = 0.0
    """Measured speed as a multiple of the frontier's; 0 while it is unknown."""

    def __init__(self, engine: EngineClient, initial: PublishedThreshold) -> None:
        """Apply the governor's value, as far as it is known."""
        self._engine = engine
        self.published = initial
        """The governor's value that was applied last."""
        self._apply()

    def take(self, published: PublishedThreshold, now_s: float) -> None:  # noqa: ARG002
        """Follow the governor."""
        self.published = published
        self._apply()

    def step(self, now_s: float) -> None:
        """Choose τ by the engine's load and apply it, if that is this object's task.

        ``now_s`` is the time on any clock that does not jump.
        """

    def _apply(self) -> None:
        self._engine.set_live(LiveDecoding(self.published.threshold))


class InnerLoopController(ThresholdController):
    """Runs the inner loop of an autoscaled model's replica within the governor's range."""

    def __init__(
        self,
        engine: EngineClient,
        initial: PublishedThreshold,
        basis: AutoscalingBasis,
        settings: AutoscalingSettings,
        requests: Callable[[], RequestTelemetry],
    ) -> None:
        """Apply the target τ, or the initial one if it was set by hand.

        ``initial`` is the governor's value, as far as it is known; ``requests`` returns what is
        known of the engine's requests.
        """
        self.basis: AutoscalingBasis = basis
        self._settings = settings
        self._requests = requests
        self._inner_loop = InnerLoop(basis.capacity, settings.inner)
        self._meter = PaceMeter(basis.capacity)
        self._range = ThresholdRange(
            basis.settings.floor_threshold, basis.settings.flex_floor_threshold
        )
        self._range_s = 0.0
        """Time at which the range came."""
        target = basis.capacity.target_threshold
        self.decision: InnerLoopDecision = InnerLoopDecision(LiveDecoding(target, target))
        self._prompts = deque[tuple[float, int]]()
        """(time in s, prompt tokens computed since the start) within the window."""
        self._counts = LengthCounts()
        """Outputs since the start, at the last look."""
        self._lengths = LengthCounts()
        """Outputs, the latest with the highest weight."""
        self._late_rule: LateRule | None = None
        """The rule that the engine has."""
        super().__init__(engine, initial)

    def take(self, published: PublishedThreshold, now_s: float) -> None:
        """Follow the governor: a τ set by hand at once, a range from the next look on."""
        if published.range is not None:
            self._range, self._range_s = published.range, now_s
        super().take(published, now_s)

    def step(self, now_s: float) -> None:
        """Look at the engine, choose τ and apply it."""
        status = self._engine.status()
        # the number of replicas counts on the base's speed where τ is set by hand
        self._meter.look(now_s, status, 1.0 if self.published.is_pinned else self.decision.gain)
        self.pace = self._meter.pace
        self.decision = self._inner_loop.update(self._sample(status, now_s))
        self._apply()

    def late_rule(self) -> LateRule | None:
        """Return the rule by which late requests are refused; None if something is left to give."""
        if not self._range.is_saturated or self.published.is_pinned:
            return None
        each_s = self.basis.capacity.busy_s(
            self._lengths.mean, self._requests().counts.mean_prompt_tokens, self.decision.gain
        )
        return LateRule(each_s / bounded(self.pace), self._settings.objective_ttft_s)

    def _sample(self, status: EngineStatus, now_s: float) -> EngineSample:
        if now_s - self._range_s > _FRESH_PERIODS * self.basis.settings.period_s:
            # the governor is silent: its floors still hold, but not what it said about arrivals
            self._range = replace(self._range, feed_forward=1.0, is_saturated=False)
        return EngineSample(
            now_s=now_s,
            load=status.num_requests,
            allowed=self._range,
            prompt_share=self._prompt_share(status, now_s),
            flex_share=self._requests().share(Tier.FLEX),
            pinned_share=self._requests().share(None),
        )

    def _prompt_share(self, status: EngineStatus, now_s: float) -> float:
        self._prompts.append((now_s, status.num_prompt_tokens - status.num_prefix_hit_tokens))
        while self._prompts[0][0] < now_s - _PROMPT_WINDOW_S:
            self._prompts.popleft()
        (first_s, first), (last_s, last) = self._prompts[0], self._prompts[-1]
        if last_s <= first_s:
            return 0.0
        rate = max(last - first, 0) / (last_s - first_s)
        return min(rate / self.basis.capacity.prefill_tokens_per_s, 1.0)

    def _note_lengths(self) -> None:
        counts = self._requests().counts.lengths
        self._lengths = self._lengths.followed_by(counts - self._counts)
        self._counts = counts

    def _apply(self) -> None:
        live = self.decision.live
        if self.published.is_pinned:
            # at 1, mode exact gives the same tokens, and the number of replicas counts on its speed
            live = LiveDecoding(self.published.threshold, is_exact=live.is_exact)
        if live != self._engine.live:
            self._engine.set_live(live)
        self._note_lengths()
        rule = self.late_rule()
        if rule != self._late_rule:
            self._engine.set_late_rule(rule)
            self._late_rule = rule
