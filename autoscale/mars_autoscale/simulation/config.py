"""What ``marsray simulate`` is told, and the policies that follow from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from mars_autoscale.model.capacity import Capacity, Rung, StepTime, linear_step_time
from mars_autoscale.model.frontier import read_frontier
from mars_autoscale.policy.decide import OuterSettings
from mars_autoscale.policy.inner_loop import LocalSettings
from mars_autoscale.simulation.joint import Joint
from mars_autoscale.simulation.policies import FixedRung, Local, Policy, StaticReplicas
from mars_autoscale.simulation.replicas import ReplicaSettings
from mars_autoscale.simulation.rivals import (
    Knative,
    ModelReplicas,
    ProportionalIntegral,
    RayDefault,
)
from mars_autoscale.traces.synthetic import SyntheticTrace, TraceChange
from mars_platform.config import Settings

_MADE_UP = ("step_time", "prefill_tokens_per_s", "frontier")
"""What must be given in place of ``frontier_file``."""


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


class ExactPoint(Settings):
    """What mode exact gives and costs."""

    tokens_per_forward: float = Field(ge=1)
    """Mean tokens a pass."""
    positions_per_row: float = Field(ge=1)
    """Mean positions that a row costs in a step."""


class RivalSettings(Settings):
    """What rivals' parameters are tried; the best of each is shown."""

    ray_targets: tuple[float, ...] = (8.0, 10.0, 12.0)
    """``target_ongoing_requests`` of Ray Serve's autoscaling."""
    knative_targets: tuple[float, ...] = (8.0, 9.6, 11.2)
    """Concurrent requests of a replica, utilisation included."""
    static_threshold: float = Field(default=0.95, gt=0, le=1)
    """τ of Knative's autoscaling at a fixed threshold."""


class SimulationConfig(Settings):
    """One comparison: a kind of replica, limits, a trace's changes and the policies' constants.

    What a replica can do comes from ``frontier_file``, or from ``step_time``,
    ``prefill_tokens_per_s`` and ``frontier``.
    """

    slots_per_replica: int = Field(ge=1)
    """Rows of a step at the most."""
    frontier_file: Path | None = None
    """Directory of a checkpoint with the ``frontier.json`` of ``marsray calibrate``."""
    mean_stored_tokens: float = Field(default=512, ge=0, allow_inf_nan=False)
    """That a row reads in a step, by which that file's step times are chosen."""
    step_time: LinearStepTime | None = None
    """Of a replica's steps."""
    prefill_tokens_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Prompt tokens that a replica computes a second; its rows wait meanwhile."""
    num_masks: int = Field(default=3, ge=1)
    """That a row feeds below τ = 1."""
    frontier: tuple[LadderPoint, ...] = ()
    """The ladder; τ = 1 must be in it, with one token a pass and no loss."""
    exact: ExactPoint | None = None
    """Mode exact in place of plain AR decoding, where that is faster; None for never."""
    replicas: ReplicaSettings = ReplicaSettings()
    synthetic: SyntheticTrace | None = None
    """The trace, where no file is given."""
    trace: TraceChange = TraceChange()
    """What is done to the trace."""
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0,), min_length=1)
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
        self._check_source()
        if self.frontier_file is None:
            self._check_ladder()
        thresholds = [rung.threshold for rung in self.capacity.rungs]
        if self.rivals.static_threshold not in thresholds:
            known = ", ".join(f"{threshold:g}" for threshold in thresholds)
            raise ValueError(f"rivals.static_threshold: it is not in the frontier; take of {known}")
        return self

    def _check_source(self) -> None:
        given = self.model_fields_set
        if self.frontier_file is None:
            missing = [key for key in _MADE_UP if key not in given]
            if missing:
                raise ValueError(f"{missing[0]}: give it, or frontier_file in place of the ladder")
            if "mean_stored_tokens" in given:
                raise ValueError("mean_stored_tokens: it belongs to frontier_file; leave it out")
            return
        for key in (*_MADE_UP, "num_masks", "exact"):
            if key in given:
                raise ValueError(f"{key}: frontier_file says it already; leave one of them out")

    def _check_ladder(self) -> None:
        thresholds = [point.threshold for point in self.frontier]
        if len(set(thresholds)) != len(thresholds):
            raise ValueError("frontier: a threshold is there twice; leave one out")
        plain = [point for point in self.frontier if point.threshold == 1.0]
        if not plain or plain[0].tokens_per_forward != 1.0 or plain[0].loss != 0.0:
            raise ValueError("frontier: threshold 1 must be there with 1 token a pass and loss 0")

    @cached_property
    def capacity(self) -> Capacity:
        """Of a replica.

        Raises:
            UserError: ``frontier_file`` is missing or refused.
        """
        if self.frontier_file is not None:
            frontier = read_frontier(self.frontier_file)
            return frontier.capacity(self.slots_per_replica, self.mean_stored_tokens)
        assert self.step_time is not None, "checked"
        assert self.prefill_tokens_per_s is not None, "checked"
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
        return Capacity(
            self.step_time.step_time(),
            rungs,
            self.slots_per_replica,
            self.prefill_tokens_per_s,
            self._exact_rung(),
        )

    def _exact_rung(self) -> Rung | None:
        exact = self.exact
        if exact is None:
            return None
        tokens, positions = exact.tokens_per_forward, exact.positions_per_row
        return Rung(1.0, tokens, 0.0, positions_per_row=positions)


Variant = tuple[str, Callable[[], Policy]]
"""What tells a variant of a policy from the others, and what makes it."""
Family = tuple[str, list[Variant]]
"""A policy's name and its variants."""


def families(config: SimulationConfig) -> list[Family]:
    """The joint policy first, then its rivals."""
    capacity = config.capacity
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
    integral = partial(ProportionalIntegral, capacity.rungs, capacity.max_num_seqs)

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
