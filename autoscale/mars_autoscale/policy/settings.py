"""Settings of the autoscaling policy: those of the outer loop and those of the inner loops."""

from __future__ import annotations

from pydantic import Field, model_validator

from mars_platform.config import Settings


class OuterSettings(Settings):
    """Settings of the outer loop."""

    period_s: float = Field(default=2.0, gt=0)
    """Seconds between two decisions; reports older than six periods are not used."""
    min_replicas: int = Field(default=1, ge=1)
    """Lowest number of replicas."""
    max_replicas: int = Field(default=16, ge=1)
    """Highest number of replicas."""
    objective_ttft_s: float = Field(default=1.0, gt=0)
    """Objective for the time to first token, in seconds. A queue that takes longer for long orders
    replicas. Once neither τ nor replicas can help further, requests that would wait longer are
    refused, those of tier flex first."""
    utilization: float = Field(default=0.68, gt=0, le=1)
    """Share of a replica's speed at the base that the mean rate may take, in (0, 1]. The rest
    absorbs what the mean over a window hides."""
    cold_start_s: float = Field(default=60.0, ge=0)
    """Seconds from ordering a replica to its first request; the trend is followed this far ahead.
    """
    sizing_window_s: float = Field(default=45.0, gt=0)
    """Seconds over which the rate is averaged; the longer, the less replicas follow its noise."""
    busy: float = Field(default=0.9, ge=0)
    """Mean over the replicas of (running + waiting) / max_num_seqs from which on the latest rate
    counts as well as the mean. Rates of a few seconds are noise, and what the replicas carry needs
    no more of them."""
    max_trend: float = Field(default=1.15, ge=1)
    """Highest factor by which a trend may raise the rate; slopes of short windows are noise."""
    scale_in_window_s: float = Field(default=90.0, ge=0)
    """Seconds for which fewer replicas must have been enough before one is stopped. Shorter than a
    cold start and a drain together, replicas would be stopped and missed at once."""
    burst_memory_s: float = Field(default=1200.0, ge=0)
    """Seconds for which bursts are remembered that the lowest τ could not carry. The replicas that
    the second highest of them needs are kept: a burst that is shorter than a cold start and comes
    again finds no others."""
    debt_s: float = Field(default=20.0, gt=0)
    """Seconds of decoding at the lowest τ that buy one more replica; time at a higher τ counts for
    less. The lowest is that of tier default's floor, or tier flex's where the other gains nothing.
    """
    full: float = Field(default=1.0, gt=0, le=1)
    """Share of the ready replicas' speed above which τ is lowered before a queue forms, in (0, 1].
    """
    floor_threshold: float = Field(default=0.9, gt=0, le=1)
    """Lowest τ for tier default."""
    flex_floor_threshold: float = Field(default=0.7, gt=0, le=1)
    """Lowest τ for tier flex; at most that for tier default."""
    loss_budget: float = Field(default=2.0, ge=0, le=100)
    """Points of quality (of 100) that tier default may lose on average over any hour, beyond those
    that the target τ loses. Once they are spent, its τ stays at the target until some have come
    back."""

    @model_validator(mode="after")
    def _check_bounds(self) -> OuterSettings:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is above max_replicas; lower one or raise the other")
        if self.flex_floor_threshold > self.floor_threshold:
            raise ValueError(
                "flex_floor_threshold is above floor_threshold, but tier flex pays first; lower it"
            )
        return self


class InnerSettings(Settings):
    """Settings of the inner loops."""

    full: float = Field(default=0.8, ge=0)
    """(running + waiting) / max_num_seqs above which a replica wants more speed. It is below 1
    because a full batch already makes the next request wait."""
    proportional: float = Field(default=1.1, ge=0)
    """Gain over the base that is wanted for each further full batch of load above `full`."""
    confirm_s: float = Field(default=1.0, ge=0)
    """Seconds for which more speed must be wanted before τ leaves the target; a batch that fills up
    for a moment empties by itself."""
    urgent: float = Field(default=1.3, ge=0)
    """(running + waiting) / max_num_seqs above which τ leaves the target without that delay."""
    climb_s: float = Field(default=1.0, ge=0)
    """Seconds on a rung before τ may climb to the next; a request's speed should not flap."""
    climb_full: float = Field(default=1.1, ge=0)
    """Highest (running + waiting) / max_num_seqs that may be expected after a climb, at the lower
    speed that it brings; a climb that would only be undone is not made."""
    min_gain: float = Field(default=1.05, ge=1)
    """Gain over the base that a rung must have to be worth any loss of quality."""
    max_prompt_share: float = Field(default=0.35, gt=0, le=1)
    """Share of its time that a replica may spend on prompts and still lower τ. No τ makes prompts
    faster: where they are the load, quality would be lost for nothing."""
    exact_gain: float = Field(default=1.05, ge=1)
    """Gain of mode exact over plain AR decoding, at the current number of rows, from which on it
    replaces plain AR decoding; its further positions are free only while arithmetic is idle."""
