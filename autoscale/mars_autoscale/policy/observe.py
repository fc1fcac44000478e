"""What the autoscaler knows: loads of replicas and rates of arrival. Made by adapters, used by
`decide`. Knows no Ray, no clock and no simulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaLoad:
    """One replica's report."""

    observed_s: float
    """When, on the clock of whoever decides."""
    num_running: float
    num_waiting: float
    gain: float = 1.0
    """Times that it decodes faster than at the target τ, by the ladder."""
    loss: float = 0.0
    """Points of quality that a token of class default loses now, beyond those at the target τ."""
    is_lowest: bool = False
    """Whether no lower τ is allowed, or of any use."""

    @property
    def is_valid(self) -> bool:
        """Whether every figure is a finite number that can be one."""
        figures = (self.num_running, self.num_waiting, self.gain, self.loss)
        return math.isfinite(self.observed_s) and all(
            math.isfinite(value) and value >= 0 for value in figures
        )


@dataclass(frozen=True)
class Look:
    """What a replica's inner loop goes by."""

    now_s: float
    """On any clock; one that jumps costs a look."""
    load: float
    """Requests that run or wait."""
    floor_threshold: float = 0.0
    """The lowest τ allowed for class default."""
    feed_forward: float = 1.0
    """Gain in speed over τ = 1 that the controller says the arrivals need."""
    prompt_share: float = 0.0
    """Of the time that the replica worked lately, the share that prompts took."""
    flex_floor_threshold: float = 0.0
    """The lowest τ allowed for class flex."""
    flex_share: float = 0.0
    """Of those requests, the share of class flex."""
    pinned_share: float = 0.0
    """Of those requests, the share that τ does not move: class priority, and those with a τ or a
    mode of their own."""


@dataclass(frozen=True)
class Arrivals:
    """What all replicas together were asked for, as rates over a window."""

    requests_per_s: float
    prompt_tokens_per_s: float
    """Without those that were found stored."""
    mean_output_tokens: float
    """Of requests that have ended."""

    @property
    def is_valid(self) -> bool:
        """Whether every figure is a finite number and not negative."""
        figures = (self.requests_per_s, self.prompt_tokens_per_s, self.mean_output_tokens)
        return all(math.isfinite(value) and value >= 0 for value in figures)


@dataclass(frozen=True)
class Snapshot:
    """All that is known at one moment."""

    now_s: float
    replicas: Sequence[ReplicaLoad]
    """Those that serve, by their latest reports."""
    num_starting: int
    """That were asked for and do not serve yet."""
    arrivals: Arrivals | None
    """None where it is not known."""
    arrivals_observed_s: float = 0.0
    """When that was."""

    def known_loads(self, age_s: float) -> list[ReplicaLoad]:
        """Of `replicas`, those that are valid and at most ``age_s`` seconds old."""
        return [
            load
            for load in self.replicas
            if load.is_valid and self._is_within(load.observed_s, age_s)
        ]

    def known_arrivals(self, age_s: float) -> Arrivals | None:
        """`arrivals`, where they are valid and at most ``age_s`` seconds old."""
        if self.arrivals is None or not self.arrivals.is_valid:
            return None
        return self.arrivals if self._is_within(self.arrivals_observed_s, age_s) else None

    def _is_within(self, observed_s: float, age_s: float) -> bool:
        return abs(self.now_s - observed_s) <= age_s  # false where either is no number
