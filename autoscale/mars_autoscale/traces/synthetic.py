"""Makes traces: synthetic ones, and changed versions of given ones.

All randomness comes from a given seed.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from mars_autoscale.traces.files import TraceRequest
from mars_platform.config import Settings
from mars_platform.errors import UserError
from mars_platform.tier import Tier

MAX_REQUESTS = 10_000_000
"""Highest number of requests in a trace made here; more would not fit into usual memory."""

_TAIL_INDEX = 1.5
"""Alpha of the Pareto distribution, whose mean is three times its minimum and whose variance is
infinite."""


class Spike(Settings):
    """A span of time in which the rate of requests is multiplied; overlapping spikes multiply."""

    at_s: float = Field(ge=0, allow_inf_nan=False)
    """Begin of the spike, in seconds since the trace began."""
    for_s: float = Field(gt=0, allow_inf_nan=False)
    """Length of the spike in seconds."""
    times: float = Field(ge=0, allow_inf_nan=False)
    """Factor of the rate; 0 is an outage."""


class ClosedLoop(Settings):
    """Clients that each send the next request when their last has ended, and so no faster than they
    are served.
    """

    num: int = Field(ge=1)
    """Number of clients; they begin at the times of the trace's first requests."""
    think_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Seconds from the end of a request to the client's next; after a refusal they are at least 1.
    """


class TraceChange(Settings):
    """Changes that `changed` makes to a trace; the defaults change nothing."""

    cut_s: float | None = Field(default=None, gt=0)
    """Seconds into the given trace after which requests are dropped; None keeps all."""
    multiply: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Mean number of copies of each request; below 1, some requests are dropped."""
    shift_s: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """Longest delay in seconds of a copy; the mean delay is half of it."""
    spikes: tuple[Spike, ...] = ()
    """Spans of the given trace in which ``multiply`` is greater or smaller."""
    classes: dict[Tier, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Share of each tier, drawn per request; the shares sum to 1. Empty keeps the trace's tiers,
    which are ``default`` if the file names none."""

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        total = math.fsum(self.classes.values())
        if self.classes and not abs(total - 1) <= 1e-6:
            raise ValueError(f"classes: the shares make {total:g} together; let them make 1")
        return self


class Lengths(Settings):
    """A lognormal distribution of numbers of tokens, with a share of far larger ones."""

    mean: float = Field(ge=1, allow_inf_nan=False)
    """Mean number of tokens, before the tail and ``max`` change it."""
    sigma: float = Field(default=0.0, ge=0, le=5)
    """Standard deviation of the logarithm; 0 makes all lengths equal."""
    max: int = Field(ge=1)
    """Highest number of tokens; larger ones are cut to it."""
    tail_share: float = Field(default=0.0, ge=0, le=1)
    """Share of requests that are in the heavy tail."""
    tail_times: float = Field(default=10.0, ge=1, allow_inf_nan=False)
    """Lowest factor of the lengths in the tail. It has a Pareto distribution with index 1.5, and
    its mean is three times this."""

    @model_validator(mode="after")
    def _check_max(self) -> Self:
        if self.mean > self.max:
            raise ValueError(f"max: {self.max} is below the mean of {self.mean:g}; raise it")
        return self


class SyntheticTrace(Settings):
    """Rates and lengths of a trace that `generate` makes."""

    duration_s: float = Field(gt=0, allow_inf_nan=False)
    """Length of the trace in seconds."""
    mean_rate_per_s: float = Field(gt=0, allow_inf_nan=False)
    """Mean requests per second outside of spikes."""
    spikes: tuple[Spike, ...] = ()
    """Spans in which the rate is multiplied."""
    prompt: Lengths
    """Lengths of the prompts."""
    output: Lengths
    """Lengths of the outputs, drawn independently of the prompts'."""

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if self.duration_s * self.peak_rate_per_s > MAX_REQUESTS:
            raise ValueError(
                f"duration_s: at the peak of {self.peak_rate_per_s:g} requests a second it makes "
                f"more than {MAX_REQUESTS}; lower it, or the rate"
            )
        return self

    @property
    def peak_rate_per_s(self) -> float:
        """Requests per second that are never exceeded."""
        edges = [edge for s in self.spikes for edge in (s.at_s, s.at_s + s.for_s)]
        return float(self.rate_at(np.array([0.0, *edges])).max())

    def rate_at(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the requests per second at ``times_s``, [times], seconds since the trace began."""
        return self.mean_rate_per_s * spike_factor(self.spikes, times_s)


def generate(settings: SyntheticTrace, seed: int) -> list[TraceRequest]:
    """Generate requests by arrival, by a Poisson process whose rate changes over time.

    The first request arrives at 0 s; the process gives all others. The same seed gives the same
    trace.
    """
    rng = np.random.default_rng(seed)
    peak = settings.peak_rate_per_s
    # thinning: each arrival of a process at the peak rate stays with probability rate / peak
    num_candidates = rng.poisson(peak * settings.duration_s)
    candidates = np.sort(rng.uniform(0, settings.duration_s, num_candidates))
    stays = rng.random(num_candidates) * peak < settings.rate_at(candidates)
    arrivals = np.concatenate([[0.0], candidates[stays]])
    prompts = _draw_lengths(settings.prompt, len(arrivals), rng)
    outputs = _draw_lengths(settings.output, len(arrivals), rng)
    rows = zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return [TraceRequest(*row) for row in rows]


def changed(trace: Sequence[TraceRequest], change: TraceChange, seed: int) -> list[TraceRequest]:
    """Return a trace with more or fewer requests, and with other tiers, by arrival.

    Let f be ``multiply`` times the spikes' factor at a request's arrival. The request is copied
    floor(f + uniform(0, 1)) times, and each copy arrives uniform(0, ``shift_s``) seconds later. If
    f is 1, the request stays as it is. The time axis is not stretched. The n-th copies of all
    requests have the prefixes in common that the requests have, but n-th and m-th copies have none,
    as if they came from other users; else all but the first would find their prompts cached. The
    same seed gives the same arrivals, whatever the tiers.

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
    # compares the fraction alone, because 1 + uniform(0, 1) could round up to 2
    whole = np.floor(factors)
    repeats = (whole + (rng.random(len(kept)) < factors - whole)).astype(np.int64)
    source = np.repeat(np.arange(len(kept)), repeats)  # [repetitions], an index into kept
    shifts = rng.uniform(0, change.shift_s, len(source))
    times = arrivals[source] + np.where(factors[source] == 1, 0.0, shifts)
    if not len(source):
        raise UserError("multiply: no request is left of the trace; raise it, or raise cut_s")
    order = np.argsort(times, kind="stable")
    # of the repetitions of a request, the first has number 0
    numbers = np.arange(len(source)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    num_ids = 1 + max((max(r.prefix) for r in kept if r.prefix), default=-1)
    picked = [
        replace(
            kept[source[i]],
            arrival_s=float(times[i]),
            prefix=_shifted(kept[source[i]].prefix, int(numbers[i]) * num_ids),
        )
        for i in order
    ]
    return _with_tiers(picked, change.classes, rng)


def _shifted(prefix: Sequence[int], shift: int) -> Sequence[int]:
    """Return ids of blocks that no other shift returns; the same sequence for a shift of 0."""
    return array("q", [each + shift for each in prefix]) if prefix and shift else prefix


def spike_factor(spikes: Iterable[Spike], times_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the factor of spikes in the rate at each of ``times_s``, [times]; 1 outside them."""
    factor = np.ones_like(times_s)
    for spike in spikes:
        inside = (times_s >= spike.at_s) & (times_s < spike.at_s + spike.for_s)
        factor[inside] *= spike.times
    return factor


def _with_tiers(
    trace: list[TraceRequest], shares: dict[Tier, float], rng: np.random.Generator
) -> list[TraceRequest]:
    if not shares:
        return trace
    tiers = list(Tier)  # a fixed order, whatever the order of the shares
    weights = np.array([shares.get(tier, 0.0) for tier in tiers])
    drawn = rng.choice(len(tiers), size=len(trace), p=weights / weights.sum())
    return [replace(r, tier=tiers[i]) for r, i in zip(trace, drawn, strict=True)]


def _draw_lengths(lengths: Lengths, num: int, rng: np.random.Generator) -> NDArray[np.int64]:
    tokens = rng.lognormal(math.log(lengths.mean) - lengths.sigma**2 / 2, lengths.sigma, num)
    in_tail = rng.random(num) < lengths.tail_share
    times = lengths.tail_times * (1 + rng.pareto(_TAIL_INDEX, num))
    longer = np.where(in_tail, tokens * times, tokens)
    return np.clip(np.rint(longer), 1, lengths.max).astype(np.int64)
