"""Limits of a simulated cluster's replicas, and their number at the start."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, model_validator

from mars_autoscale.model.capacity import Capacity
from mars_autoscale.traces.files import TraceRequest
from mars_platform.config import Settings

_INITIAL_UTILIZATION = 0.8
"""Share of the initial replicas' time that the trace takes on average at the base, if their
number is not given."""


class SpeedChange(Settings):
    """A real speed that is not the one of the model, by which policies decide."""

    times: float = Field(gt=0, allow_inf_nan=False)
    """Real speed of steps and prompts as a multiple of the model's."""
    from_s: float = Field(default=0.0, ge=0)
    """Seconds into the trace from which on the change holds."""
    one_in: int = Field(default=1, ge=1)
    """Number of replicas, in the order of their starts, of which the change holds for one."""


class ReplicaSettings(Settings):
    """Limits of the number of replicas, and their cold start."""

    min: int = Field(default=1, ge=1)
    """Lowest number of replicas."""
    max: int = Field(default=16, ge=1)
    """Highest number of replicas."""
    initial: int | None = Field(default=None, ge=1)
    """Replicas that are ready at the start; None for as many as the trace keeps busy for 80% of the
    time."""
    cold_start_s: float = Field(default=60.0, ge=0)
    """Seconds from ordering a replica to its first request."""
    prefix_cache_tokens: int = Field(default=1_000_000, ge=0)
    """Tokens of prompts that a replica keeps, for prompts that begin alike, if the trace tells
    which do; 0 for no reuse. The default is what 57 GB hold of a 7B model with grouped-query
    attention (57 kB a token: 28 layers, 4 KV heads of 128, 2 bytes a number)."""
    real_rows: int | None = Field(default=None, ge=1)
    """Rows for which a replica really has pages; None for as many as it has slots."""
    real_speed: tuple[SpeedChange, ...] = ()
    """Real speed of the replicas where it is not the model's; of those that hold for a replica, the
    last one counts."""

    @model_validator(mode="after")
    def _check_limits(self) -> ReplicaSettings:
        if self.min > self.max:
            raise ValueError("min is above max; lower one or raise the other")
        return self

    def speed_of(self, number: int, now_s: float) -> float:
        """Return the real speed of a replica, as a multiple of the model's.

        ``number`` replicas were started before it; ``now_s`` is in seconds into the trace.
        """
        for each in reversed(self.real_speed):
            if each.from_s <= now_s and (number + 1) % each.one_in == 0:
                return each.times
        return 1.0

    def num_initial(self, trace: Sequence[TraceRequest], capacity: Capacity) -> int:
        """Return the number of replicas that are ready at the start, within the limits."""
        wanted = self.initial or _num_kept_busy(trace, capacity)
        return min(max(wanted, self.min), self.max)


def _num_kept_busy(trace: Sequence[TraceRequest], capacity: Capacity) -> int:
    output_tokens = sum(request.output_tokens for request in trace)
    prompt_tokens = sum(request.prompt_tokens for request in trace)
    length_s = max(trace[-1].arrival_s, 1.0)
    return round(capacity.busy_s(output_tokens, prompt_tokens) / length_s / _INITIAL_UTILIZATION)
