"""What ``marsray simulate`` is told, and the policies that follow from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from pydantic import Field, model_validator

from mars_autoscale.capacity import Capacity, Rung, StepTime, linear_step_time
from mars_autoscale.decide import OuterSettings
from mars_autoscale.local import LocalSettings
from mars_autoscale.simulation.joint import Joint
from mars_autoscale.simulation.policies import FixedRung, Local, Policy, StaticReplicas
from mars_autoscale.simulation.rivals import (
    Knative,
    ModelReplicas,
    ProportionalIntegral,
    RayDefault,
)
from mars_autoscale.simulation.run import ClusterSettings
from mars_autoscale.synthetic import SyntheticTrace, TraceChange
from mars_autoscale.traces import TraceRequest
from mars_platform.config import Settings

_INITIAL_UTILIZATION = 0.8
"""Share of the initial replicas' time that the trace takes on average at τ = 1, where their number
is not given."""


class LinearStepTime(Settings):
    """Step time of ``t0 * (1 + positions / K)``."""

    t0_s: float = Field(gt=0)
    """Seconds of a step without positions."""
    positions_to_double: float = Field(gt=0)
    """K: positions that take as long again."""

    def step_time(self) -> StepTime:
        """As the simulator uses it."""
        return linear_step_time(self.t0_s, self.positions_to_double)


class LadderPoint(Settings):
    """What a threshold gives and costs."""

    threshold: float = Field(gt=0, le=1)
    """τ."""
    tokens_per_forward: float = Field(ge=1)
    """Mean tokens a pass."""
    loss: float = Field(ge=0)
    """Points of quality below τ = 1, of 100."""


class ReplicaSettings(Settings):
    """How many replicas there may be."""

    min: int = Field(default=1, ge=1)
    """At the least."""
    max: int = Field(default=16, ge=1)
    """At the most."""
    initial: int | None = Field(default=None, ge=1)
    """Ready at the start; None for as many as the trace keeps busy for 80% of the time."""
    cold_start_s: float = Field(default=60.0, ge=0)
    """Seconds from asking for one to its first request."""


class RivalSettings(Settings):
    """What rivals' parameters are tried; the best of each is shown."""

    ray_targets: tuple[float, ...] = (8.0, 10.0, 12.0)
    """``target_ongoing_requests`` of Ray Serve's autoscaling."""
    knative_targets: tuple[float, ...] = (8.0, 9.6, 11.2)
    """Concurrent requests of a replica, utilisation included."""
    static_threshold: float = Field(default=0.95, gt=0, le=1)
    """τ of Knative's autoscaling at a fixed threshold."""


class SimulationConfig(Settings):
    """One comparison: a kind of replica, limits, a trace's changes and the policies' constants."""

    step_time: LinearStepTime
    """Of a replica's steps."""
    prefill_tokens_per_s: float = Field(gt=0)
    """Prompt tokens that a replica computes a second; its rows wait meanwhile."""
    slots_per_replica: int = Field(ge=1)
    """Rows of a step at the most."""
    num_masks: int = Field(default=3, ge=1)
    """That a row feeds below τ = 1."""
    frontier: tuple[LadderPoint, ...]
    """The ladder; τ = 1 must be in it, with one token a pass and no loss."""
    replicas: ReplicaSettings = ReplicaSettings()
    synthetic: SyntheticTrace | None = None
    """The trace, where no file is given."""
    trace: TraceChange = TraceChange()
    """What is done to the trace."""
    seeds: tuple[int, ...] = (0,)
    """Of the trace's changes; figures are means over them."""
    measured_from_s: float = Field(default=0.0, ge=0)
    """Requests that arrive earlier do not count."""
    objective_ttft_s: float = Field(default=1.0, gt=0)
    """Seconds to the first token that are promised."""
    outer: OuterSettings = OuterSettings()
    """The joint policy's; replicas and cold start are those above."""
    inner: LocalSettings = LocalSettings()
    """The joint policy's."""
    rivals: RivalSettings = RivalSettings()

    @model_validator(mode="after")
    def _check(self) -> SimulationConfig:
        thresholds = [point.threshold for point in self.frontier]
        if len(set(thresholds)) != len(thresholds):
            raise ValueError("frontier: a threshold is there twice; leave one out")
        plain = [point for point in self.frontier if point.threshold == 1.0]
        if not plain or plain[0].tokens_per_forward != 1.0 or plain[0].loss != 0.0:
            raise ValueError("frontier: threshold 1 must be there with 1 token a pass and loss 0")
        if self.rivals.static_threshold not in thresholds:
            raise ValueError("rivals.static_threshold: it is not in the frontier; add it there")
        if self.replicas.min > self.replicas.max:
            raise ValueError("replicas: min is above max; lower one or raise the other")
        return self

    def capacity(self) -> Capacity:
        """Of a replica."""
        points = sorted(self.frontier, key=lambda point: -point.threshold)
        rungs = tuple(
            Rung(
                point.threshold,
                point.tokens_per_forward,
                point.loss,
                self.num_masks if point.threshold < 1.0 else 0,
            )
            for point in points
        )
        step_time = self.step_time.step_time()
        return Capacity(step_time, rungs, self.slots_per_replica, self.prefill_tokens_per_s)

    def cluster(self, trace: Sequence[TraceRequest]) -> ClusterSettings:
        """Limits of the cluster that serves a trace."""
        replicas = self.replicas
        initial = replicas.initial or self._initial(trace)
        return ClusterSettings(
            min_replicas=replicas.min,
            max_replicas=replicas.max,
            initial_replicas=min(max(initial, replicas.min), replicas.max),
            cold_start_s=replicas.cold_start_s,
        )

    def _initial(self, trace: Sequence[TraceRequest]) -> int:
        capacity = self.capacity()
        decode_s = sum(request.output_tokens for request in trace) / capacity.tokens_per_s(
            capacity.rungs[0]
        )
        prompt_s = sum(request.prompt_tokens for request in trace) / self.prefill_tokens_per_s
        length_s = max(trace[-1].arrival_s, 1.0)
        return round((decode_s + prompt_s) / length_s / _INITIAL_UTILIZATION)


Variant = tuple[str, Callable[[], Policy]]
"""What tells a variant of a policy from the others, and what makes it."""
Family = tuple[str, list[Variant]]
"""A policy's name and its variants."""


def families(config: SimulationConfig) -> list[Family]:
    """The joint policy first, then its rivals."""
    capacity = config.capacity()
    limits = {
        "min_replicas": config.replicas.min,
        "max_replicas": config.replicas.max,
        "cold_start_s": config.replicas.cold_start_s,
    }
    outer = config.outer.model_copy(update=limits)
    most = config.replicas.max
    by_threshold = {rung.threshold: rung for rung in capacity.rungs}
    fixed = by_threshold[config.rivals.static_threshold]

    plain = partial(FixedRung, capacity.rungs[0])
    static = partial(FixedRung, fixed)
    integral = partial(ProportionalIntegral, capacity.rungs, capacity.num_slots)

    def knative(local: Callable[[], Local]) -> list[Variant]:
        return [
            (f"target {target:g}", partial(Knative, target, local, max_replicas=most))
            for target in config.rivals.knative_targets
        ]

    ray: list[Variant] = [
        (f"target {target:g}", partial(RayDefault, target, plain))
        for target in config.rivals.ray_targets
    ]
    return [
        ("joint", [("", partial(Joint, capacity, outer, config.inner))]),
        (f"static, {most} replicas", [("", partial(StaticReplicas, most, capacity.rungs[0]))]),
        ("ray", ray),
        ("knative", knative(plain)),
        (f"knative, τ={fixed.threshold:g}", knative(static)),
        ("knative, PI on τ", knative(integral)),
        ("replicas by token rate", [("", partial(ModelReplicas, capacity, outer))]),
    ]


def mean_or_infinite(values: Sequence[float]) -> float:
    """Mean; infinite where any is."""
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.inf
