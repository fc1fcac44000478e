"""The configuration of ``marsray simulate``, and the policies that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from mars_autoscale.model.capacity import AR, Capacity, Rung, Window
from mars_autoscale.model.frontier import read_frontier
from mars_autoscale.model.step_times import linear_step_time
from mars_autoscale.policy.settings import InnerSettings, OuterSettings
from mars_autoscale.simulation.policies import (
    FixedThreshold,
    InnerLoopPolicy,
    Joint,
    Policy,
    StaticReplicas,
)
from mars_autoscale.simulation.replicas import ReplicaSettings
from mars_autoscale.simulation.rivals import Keda, RayDefault
from mars_autoscale.traces.synthetic import ClosedLoop, SyntheticTrace, TraceChange
from mars_platform.config import Settings
from mars_platform.method.mode import Mode

_MADE_UP = ("step_time", "prefill_tokens_per_s", "frontier")
"""Keys that must be given if ``frontier_file`` is not."""


class LinearStepTime(Settings):
    """A step time of ``t0 * (1 + positions / K)``."""

    t0_s: float = Field(gt=0)
    """Seconds of a step without positions."""
    positions_to_double: float = Field(gt=0)
    """K: number of positions that double the time."""


class LadderPoint(Settings):
    """Speed and loss of decoding with one threshold."""

    threshold: float = Field(gt=0, le=1)
    """τ in (0, 1]."""
    tokens_per_forward: float = Field(ge=1)
    """Mean tokens that a pass gives a row."""
    loss: float = Field(ge=0)
    """Points of quality (of 100) below τ = 1."""


class ExactPoint(Settings):
    """Speed of mode exact."""

    tokens_per_forward: float = Field(ge=1)
    """Mean tokens that a pass gives a row."""
    positions_per_row: float = Field(ge=1)
    """Mean positions that a row costs in a step."""


class RivalSettings(Settings):
    """Parameters of the rivals that are tried; the best variant of each rival is shown."""

    ray_targets: tuple[float, ...] = (8.0, 10.0, 12.0)
    """``target_ongoing_requests`` of Ray Serve's autoscaling."""
    static_threshold: float = Field(default=0.95, gt=0, le=1)
    """τ of the rival that has Ray Serve's autoscaling and decodes with a fixed threshold."""
    keda_waiting_target: float = Field(default=4.0, gt=0)
    """Waiting requests per replica that KEDA's queue trigger allows."""
    keda_token_shares: tuple[Annotated[float, Field(gt=0)], ...] = (0.65, 0.8, 0.95)
    """Output tokens per second and replica that KEDA's rate trigger allows, as shares of what a
    full batch decodes."""


class SimulationConfig(Settings):
    """One comparison: the replicas, the changes of the trace and the settings of the policies.

    What a replica can do comes from ``frontier_file``, or from ``step_time``,
    ``prefill_tokens_per_s`` and ``frontier``.
    """

    slots_per_replica: int = Field(ge=1)
    """Highest number of rows in a step."""
    frontier_file: Path | None = None
    """Directory of a checkpoint with the ``frontier.json`` that ``marsray calibrate`` wrote."""
    mean_stored_tokens: float = Field(default=512, ge=0, allow_inf_nan=False)
    """Cached tokens that a row reads in a step; it selects the step times in ``frontier_file``."""
    step_time: LinearStepTime | None = None
    """Time of a replica's step by its number of positions."""
    prefill_tokens_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Prompt tokens that a replica computes each second, during which its rows wait."""
    num_masks: int = Field(default=3, ge=1)
    """Masks that a row feeds below τ = 1."""
    frontier: tuple[LadderPoint, ...] = ()
    """The ladder; it must contain τ = 1 with one token a pass and no loss."""
    exact: ExactPoint | None = None
    """Mode exact, which replaces plain AR decoding where it is faster; None for never."""
    replicas: ReplicaSettings = ReplicaSettings()
    """Limits of the number of replicas, and their cold start."""
    synthetic: SyntheticTrace | None = None
    """Trace to generate if no file is given."""
    trace: TraceChange = TraceChange()
    """Changes that are made to the trace."""
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0,), min_length=1)
    """Seeds of the trace's changes; the figures are means over them."""
    measured_from_s: float = Field(default=0.0, ge=0)
    """Seconds into the trace; requests that arrive earlier do not count."""
    objective_ttft_s: float = Field(default=1.0, gt=0)
    """Promised seconds to the first token."""
    queue_wait_s: float | None = Field(default=None, gt=0)
    """Seconds after which a request that still waits in the server's queue is refused; None for
    never."""
    clients: ClosedLoop | None = None
    """Clients that send the trace's requests in order, and then again from its beginning, until the
    time of its last arrival; None for sending each request at its own time."""
    outer: OuterSettings = OuterSettings()
    """Outer loop of the joint policy; limits and cold start are taken from ``replicas``, and
    ``objective_ttft_s`` from above."""
    inner: InnerSettings = InnerSettings()
    """Inner loop of the joint policy."""
    rivals: RivalSettings = RivalSettings()
    """Parameters of the rivals."""

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
        """Speed of a replica."""
        if self.frontier_file is not None:
            frontier = read_frontier(self.frontier_file)
            return frontier.capacity(self.slots_per_replica, self.mean_stored_tokens)
        assert self.step_time is not None, "checked"
        assert self.prefill_tokens_per_s is not None, "checked"
        return Capacity(
            linear_step_time(self.step_time.t0_s, self.step_time.positions_to_double),
            (AR, *self._exact_rungs, *self._threshold_rungs),
            self.slots_per_replica,
            self.prefill_tokens_per_s,
        )

    @property
    def _exact_rungs(self) -> list[Rung]:
        if self.exact is None:
            return []
        window = Window(self.exact.tokens_per_forward, self.exact.positions_per_row)
        return [Rung(Mode.EXACT, 1.0, (window,))]

    @property
    def _threshold_rungs(self) -> list[Rung]:
        rungs = []
        for point in sorted(self.frontier, key=lambda point: -point.threshold):
            tokens = point.tokens_per_forward
            window = Window(tokens, tokens + self.num_masks)
            if point.threshold < 1.0:
                rungs.append(Rung(Mode.THRESHOLD, point.threshold, (window,), point.loss))
        return rungs


Variant = tuple[str, Callable[[], Policy]]
"""Name of a policy's variant, and a function that makes the policy."""
Family = tuple[str, list[Variant]]
_Decoding = tuple[str, Callable[[], InnerLoopPolicy], Rung]
"""Name of a fixed way to decode, a function that makes its inner loop, and its rung."""


def families(config: SimulationConfig) -> list[Family]:
    """Return the joint policy and its rivals, in this order, each with its variants.

    Rivals decode in one fixed way. Where the ladder has mode exact, they have variants that always
    use it.
    """
    capacity, most = config.capacity, config.replicas.max
    tau = config.rivals.static_threshold
    lossless = _lossless_decodings(capacity)
    low: _Decoding = ("", partial(FixedThreshold, tau), capacity.rung(Mode.THRESHOLD, tau))
    return [
        ("joint", [("", partial(Joint, capacity, _outer(config), config.inner))]),
        (
            f"static, {most} replicas",
            [(name, partial(StaticReplicas, most, loop)) for name, loop, _ in lossless],
        ),
        ("ray", _ray(config, lossless)),
        (f"ray, τ={tau:g}", _ray(config, [low])),
        ("keda", _keda(config, lossless)),
    ]


def _outer(config: SimulationConfig) -> OuterSettings:
    limits = {
        "min_replicas": config.replicas.min,
        "max_replicas": config.replicas.max,
        "cold_start_s": config.replicas.cold_start_s,
        "objective_ttft_s": config.objective_ttft_s,
    }
    return config.outer.model_copy(update=limits)


def _lossless_decodings(capacity: Capacity) -> list[_Decoding]:
    return [
        ("exact" if is_exact else "", partial(FixedThreshold, 1.0, is_exact), rung)
        for rung in capacity.rungs
        if rung.threshold == 1.0
        for is_exact in (rung.mode is Mode.EXACT,)
    ]


def _ray(config: SimulationConfig, decodings: Iterable[_Decoding]) -> list[Variant]:
    return [
        (_joined(f"target {target:g}", name), partial(RayDefault, target, loop))
        for name, loop, _ in decodings
        for target in config.rivals.ray_targets
    ]


def _keda(config: SimulationConfig, decodings: Iterable[_Decoding]) -> list[Variant]:
    make = partial(Keda, config.rivals.keda_waiting_target, max_replicas=config.replicas.max)
    return [
        (
            _joined(f"{share:.0%} of its tokens/s", name),
            partial(make, share * config.capacity.tokens_per_s(rung), loop),
        )
        for name, loop, rung in decodings
        for share in config.rivals.keda_token_shares
    ]


def _joined(*names: str) -> str:
    return ", ".join(name for name in names if name)
