"""Traces that come from no file: others' multiplied, and wholly synthetic ones.

Knows nothing of what serves them. Everything random comes from the seed that is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from mars_autoscale.traces.files import TraceRequest
from mars_platform.config import Settings
from mars_platform.errors import UserError
from mars_platform.tier import Tier

MAX_REQUESTS = 10_000_000
"""Of a trace that is made here: more would not fit into an ordinary machine's memory."""

_TAIL_INDEX = 1.5
"""Pareto's alpha: a finite mean, three times the least, and no finite variance."""


class Spike(Settings):
    """A time in which the rate of requests is another; where spikes overlap, they multiply."""

    at_s: float = Field(ge=0, allow_inf_nan=False)
    """Its begin, in seconds since the trace began."""
    for_s: float = Field(gt=0, allow_inf_nan=False)
    """Its length in seconds."""
    times: float = Field(ge=0, allow_inf_nan=False)
    """What the rate is multiplied by; 0 is an outage."""


class TraceChange(Settings):
    """What `changed` makes of a trace. The defaults leave it as it is."""

    cut_s: float | None = Field(default=None, gt=0)
    """Requests of the given trace that arrive later are dropped; None keeps all."""
    multiply: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Times that each request is repeated, on average; below 1 some are dropped."""
    shift_s: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """Seconds by which each repetition is late at the most; on average it is half of that."""
    spikes: tuple[Spike, ...] = ()
    """Times in which ``multiply`` is greater or smaller, by the arrival in the given trace."""
    classes: dict[Tier, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Share of each class, drawn for each request; together 1. Empty keeps the trace's own, which
    is ``default`` where the file names none."""

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        total = math.fsum(self.classes.values())
        if self.classes and not abs(total - 1) <= 1e-6:
            raise ValueError(f"classes: the shares make {total:g} together; let them make 1")
        return self


class Ramp(Settings):
    """A lasting change of the rate: linear from where the one before left it."""

    at_s: float = Field(ge=0, allow_inf_nan=False)
    """Its begin, in seconds since the trace began."""
    for_s: float = Field(gt=0, allow_inf_nan=False)
    """Seconds that it takes."""
    times: float = Field(ge=0, allow_inf_nan=False)
    """What the mean rate is multiplied by at its end and ever after, until the next ramp."""


class Lengths(Settings):
    """Numbers of tokens: lognormal, with a share of far longer ones."""

    mean: float = Field(ge=1, allow_inf_nan=False)
    """Tokens on average, before the tail and ``max`` change it."""
    sigma: float = Field(default=0.0, ge=0, le=5)
    """Standard deviation of the logarithm; 0 makes all lengths alike."""
    max: int = Field(ge=1)
    """Tokens at the most; longer ones are cut to it."""
    tail_share: float = Field(default=0.0, ge=0, le=1)
    """Share of requests that are in the heavy tail."""
    tail_times: float = Field(default=10.0, ge=1, allow_inf_nan=False)
    """What those of the tail are multiplied by at the least. How much exactly is Pareto's with
    index 1.5: on average three times as much."""

    @model_validator(mode="after")
    def _check_max(self) -> Self:
        if self.mean > self.max:
            raise ValueError(f"max: {self.max} is below the mean of {self.mean:g}; raise it")
        return self


class SyntheticTrace(Settings):
    """What `generate` makes a trace from."""

    duration_s: float = Field(gt=0, allow_inf_nan=False)
    """No request arrives later."""
    mean_rate_per_s: float = Field(gt=0, allow_inf_nan=False)
    """Requests a second, over whole periods and without spikes and ramps."""
    diurnal_amplitude: float = Field(default=0.0, ge=0, le=1)
    """Share of the mean by which the rate rises and falls, as a sine that starts at the mean."""
    diurnal_period_s: float = Field(default=86400.0, gt=0, allow_inf_nan=False)
    """Seconds of one such wave."""
    spikes: tuple[Spike, ...] = ()
    """They multiply the rate for a while."""
    ramps: tuple[Ramp, ...] = ()
    """They multiply it for good; each begins after the one before has ended."""
    prompt: Lengths
    """Of the prompts."""
    output: Lengths
    """Of the outputs; drawn independently of the prompts'."""

    @model_validator(mode="after")
    def _check_ramps_and_size(self) -> Self:
        for i, (one, other) in enumerate(pairwise(self.ramps)):
            if other.at_s < one.at_s + one.for_s:
                raise ValueError(
                    f"ramps.{i + 1}.at_s: it begins before ramps.{i} has ended; let it begin later"
                )
        if self.duration_s * self.peak_rate_per_s > MAX_REQUESTS:
            raise ValueError(
                f"duration_s: at the peak of {self.peak_rate_per_s:g} requests a second it makes "
                f"more than {MAX_REQUESTS}; lower it, or the rate"
            )
        return self

    @property
    def peak_rate_per_s(self) -> float:
        """A rate that is never exceeded."""
        edges = [edge for s in self.spikes for edge in (s.at_s, s.at_s + s.for_s)]
        spike = spike_factor(self.spikes, np.array([0.0, *edges])).max()
        ramp = max([1.0, *(ramp.times for ramp in self.ramps)])
        return float(self.mean_rate_per_s * (1 + self.diurnal_amplitude) * ramp * spike)

    def rate_at(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Requests a second at each time.

        Args:
            times_s: [times], seconds since the trace began.

        Returns:
            [times].
        """
        wave = np.sin(2 * np.pi * times_s / self.diurnal_period_s)
        rate = self.mean_rate_per_s * (1 + self.diurnal_amplitude * wave)
        return rate * self._ramp_factor(times_s) * spike_factor(self.spikes, times_s)

    def _ramp_factor(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        moments, factors = [0.0], [1.0]
        for ramp in self.ramps:
            moments += [ramp.at_s, ramp.at_s + ramp.for_s]
            factors += [factors[-1], ramp.times]
        return np.interp(times_s, moments, factors)


def generate(settings: SyntheticTrace, seed: int) -> list[TraceRequest]:
    """A trace from a Poisson process whose rate changes over time.

    The first request arrives at 0 s and begins the trace; the process brings all others.

    Args:
        settings: rates and lengths.
        seed: not negative; the same one gives the same trace.

    Returns:
        The requests by arrival.
    """
    rng = np.random.default_rng(seed)
    peak = settings.peak_rate_per_s
    # thinning: a process at the peak rate, of which each arrival stays with rate / peak
    num_candidates = rng.poisson(peak * settings.duration_s)
    candidates = np.sort(rng.uniform(0, settings.duration_s, num_candidates))
    stays = rng.random(num_candidates) * peak < settings.rate_at(candidates)
    arrivals = np.concatenate([[0.0], candidates[stays]])
    prompts = _draw_lengths(settings.prompt, len(arrivals), rng)
    outputs = _draw_lengths(settings.output, len(arrivals), rng)
    rows = zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return [TraceRequest(*row) for row in rows]


def changed(trace: Sequence[TraceRequest], change: TraceChange, seed: int) -> list[TraceRequest]:
    """A trace with more or fewer requests, and of other classes.

    With f as ``multiply`` times the spikes' factor at its arrival, a request is repeated
    floor(f + uniform(0, 1)) times, and each repetition arrives uniform(0, ``shift_s``) seconds
    later. Where f is 1 it stays as it is. The time axis remains the given trace's.

    Args:
        trace: by arrival.
        change: what to do.
        seed: not negative; the same one gives the same trace, on arrivals whatever the classes.

    Returns:
        The requests by arrival.

    Raises:
        UserError: no request is left, or more than `MAX_REQUESTS` are.
    """
    rng = np.random.default_rng(seed)
    kept = [r for r in trace if change.cut_s is None or r.arrival_s <= change.cut_s]
    arrivals = np.array([request.arrival_s for request in kept])  # [kept]
    factors = change.multiply * spike_factor(change.spikes, arrivals)
    if factors.sum() > MAX_REQUESTS:
        raise UserError(
            f"multiply: it makes more than {MAX_REQUESTS} requests; lower it or the spikes' times"
        )
    # the whole part first: 1 + uniform(0, 1) could round up to 2
    whole = np.floor(factors)
    repeats = (whole + (rng.random(len(kept)) < factors - whole)).astype(np.int64)
    source = np.repeat(np.arange(len(kept)), repeats)  # [repetitions], an index into kept
    shifts = rng.uniform(0, change.shift_s, len(source))
    times = arrivals[source] + np.where(factors[source] == 1, 0.0, shifts)
    if not len(source):
        raise UserError("multiply: no request is left of the trace; raise it, or raise cut_s")
    order = np.argsort(times, kind="stable")
    picked = [replace(kept[source[i]], arrival_s=float(times[i])) for i in order]
    return _with_classes(picked, change.classes, rng)


def spike_factor(spikes: Iterable[Spike], times_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """What spikes multiply the rate by at each time; 1 outside them.

    Args:
        spikes: in any order.
        times_s: [times], seconds since the trace began.

    Returns:
        [times].
    """
    factor = np.ones_like(times_s)
    for spike in spikes:
        inside = (times_s >= spike.at_s) & (times_s < spike.at_s + spike.for_s)
        factor[inside] *= spike.times
    return factor


def _with_classes(
    trace: list[TraceRequest], shares: dict[Tier, float], rng: np.random.Generator
) -> list[TraceRequest]:
    if not shares:
        return trace
    names = list(Tier)  # in this order, whatever the order of the shares
    weights = np.array([shares.get(name, 0.0) for name in names])
    drawn = rng.choice(len(names), size=len(trace), p=weights / weights.sum())
    return [replace(r, tier=names[i]) for r, i in zip(trace, drawn, strict=True)]


def _draw_lengths(lengths: Lengths, num: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """int64 [num]."""
    tokens = rng.lognormal(math.log(lengths.mean) - lengths.sigma**2 / 2, lengths.sigma, num)
    in_tail = rng.random(num) < lengths.tail_share
    times = lengths.tail_times * (1 + rng.pareto(_TAIL_INDEX, num))
    longer = np.where(in_tail, tokens * times, tokens)
    return np.clip(np.rint(longer), 1, lengths.max).astype(np.int64)
