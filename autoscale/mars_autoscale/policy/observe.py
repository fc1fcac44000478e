"""The observations of the outer loop: loads of replicas and rates of arrival."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

RATE_WINDOW_S = 10.0
"""Seconds over which arrivals are averaged."""


@dataclass(frozen=True)
class ReplicaLoad:
    """One replica's load, as decisions see it."""

    observed_s: float
    """Time of the observation in seconds, on the clock of the outer loop."""
    num_running: float
    num_waiting: float
    gain: float = 1.0
    """Decoding speed as a multiple of the base's, by the ladder."""
    loss: float = 0.0
    """Points of quality that a token of tier default loses now, beyond those at the target τ."""
    is_lowest: bool = False
    """Whether no lower τ is allowed or of any use."""
    pace: float = 0.0
    """Measured speed as a multiple of the frontier's; unknown unless above 0 and finite."""

    @property
    def is_valid(self) -> bool:
        """Whether every figure but the pace is finite, and none but the time is negative."""
        # written out, because it is most of a decision's time with a thousand replicas
        return (
            math.isfinite(self.observed_s)
            and 0 <= self.num_running < math.inf
            and 0 <= self.num_waiting < math.inf
            and 0 <= self.gain < math.inf
            and 0 <= self.loss < math.inf
        )


@dataclass(frozen=True)
class Arrivals:
    """Rates of arrival at all replicas together, over `RATE_WINDOW_S`."""

    requests_per_s: float
    prompt_tokens_per_s: float
    """Prompt tokens to compute each second, prefix hits not counted."""
    mean_output_tokens: float
    """Mean length of an output, see `mars_autoscale.policy.lengths`."""

    @property
    def number(self) -> float:
        """Requests that arrived within the window."""
        return self.requests_per_s * RATE_WINDOW_S

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens to decode each second."""
        return self.requests_per_s * self.mean_output_tokens

    @property
    def is_valid(self) -> bool:
        """Whether every figure is finite and not negative."""
        figures = (self.requests_per_s, self.prompt_tokens_per_s, self.mean_output_tokens)
        return all(math.isfinite(value) and value >= 0 for value in figures)


@dataclass(frozen=True)
class Snapshot:
    """Everything that is known at one moment."""

    now_s: float
    replicas: Sequence[ReplicaLoad]
    num_starting: int
    """Replicas that are ordered and do not serve yet."""
    arrivals: Arrivals | None
    """Rates of arrival; None if unknown."""
    arrivals_observed_s: float = 0.0
    """Time in seconds at which the arrivals were observed."""
    is_refuted: bool = False
    """Whether audits of what was served contradict the frontier, by which losses are counted."""

    def known_replicas(self, max_age_s: float) -> list[ReplicaLoad]:
        """Return the loads that are valid and at most ``max_age_s`` seconds old."""
        now_s = self.now_s
        # the comparison is False if either time is NaN
        return [
            replica
            for replica in self.replicas
            if abs(now_s - replica.observed_s) <= max_age_s and replica.is_valid
        ]

    def known_arrivals(self, max_age_s: float) -> Arrivals | None:
        """Return the arrivals if they are valid and at most ``max_age_s`` seconds old."""
        if self.arrivals is None or not self.arrivals.is_valid:
            return None
        is_recent = abs(self.now_s - self.arrivals_observed_s) <= max_age_s
        return self.arrivals if is_recent else None
