"""The outer loop: how many replicas, and how far τ may go, from what arrives.

Replicas follow the token rate at the target τ, never concurrency: a lower τ empties the queue, and
whoever counts concurrency would end replicas just while quality is being paid. For bursts that come
again, beyond what τ carries, they stay: no replica starts in time for those. `decide` is pure and
total: any snapshot gives a decision within bounds, whatever is missing, stale or not a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from pydantic import Field, model_validator

from mars_autoscale.model.capacity import Capacity
from mars_autoscale.policy import budget, demand
from mars_autoscale.policy.observe import Arrivals, ReplicaLoad, Snapshot
from mars_platform.config import Settings

_ROUNDING = 1e-9
"""Of a replica: a load that is worth a whole number of them needs no further one."""

_Value = TypeVar("_Value", int, float)


class Reason(StrEnum):
    """Why a decision is what it is."""

    STEADY = "steady"
    """As many replicas as are needed."""
    LOAD = "load"
    """What arrives, or waits, needs more replicas."""
    DEBT = "debt"
    """τ has been low for long: quality is being paid for what replicas should do."""
    BURSTS = "bursts"
    """What arrives needs fewer, and bursts that have come several times all of them."""
    IDLE = "idle"
    """Fewer are needed, and have been for a while."""
    WAITING = "waiting"
    """Fewer are needed, but not for long enough, or τ is still low, or a replica is silent."""
    HELD = "held"
    """What is known is too old, or not a number: nothing changes."""


class OuterSettings(Settings):
    """Constants of the outer loop."""

    period_s: float = Field(default=2.0, gt=0)
    """Seconds between two decisions; reports older than six of them are not used."""
    min_replicas: int = Field(default=1, ge=1)
    """Replicas at the least."""
    max_replicas: int = Field(default=16, ge=1)
    """Replicas at the most."""
    utilization: float = Field(default=0.68, gt=0, le=1)
    """Share of a replica's speed at τ = 1 that the mean rate may take: the rest is for what a
    window's mean does not show."""
    cold_start_s: float = Field(default=60.0, ge=0)
    """Seconds from asking for a replica to its first request: how far the trend is followed."""
    sizing_window_s: float = Field(default=45.0, gt=0)
    """Over which the rate is averaged, so that replicas do not follow its noise."""
    burst: float = Field(default=1.3, ge=1)
    """Times that average from which on the latest rate counts instead, if replicas are busy."""
    busy: float = Field(default=0.9, ge=0)
    """(running + waiting) / slots, mean over the replicas, that confirms a burst: rates of a few
    seconds are noise, and what the replicas carry needs no further ones."""
    max_trend: float = Field(default=1.15, ge=1)
    """Times the rate that a trend may add up to: slopes of short windows are noise."""
    scale_in_window_s: float = Field(default=90.0, ge=0)
    """Seconds for which fewer replicas must have been enough; longer than a start and a drain, so
    that no replica is ended and missed at once."""
    burst_memory_s: float = Field(default=1200.0, ge=0)
    """Seconds for which bursts are remembered that the lowest τ did not carry. As many replicas as
    the second highest needs stay: one shorter than a start, and that comes again, finds no others.
    """
    debt_s: float = Field(default=20.0, gt=0)
    """Seconds of decoding at the ladder's lowest rung that buy a replica."""
    drain_s: float = Field(default=30.0, gt=0)
    """Seconds within which a queue should be worked off by replicas that are asked for."""
    full: float = Field(default=1.0, gt=0, le=1)
    """Share of the ready replicas' speed from which on τ is lowered before a queue forms."""
    floor_threshold: float = Field(default=0.9, gt=0, le=1)
    """The lowest τ for class default."""
    flex_floor_threshold: float = Field(default=0.7, gt=0, le=1)
    """The lowest τ for class flex."""
    loss_budget: float = Field(default=2.0, ge=0, le=100)
    """Points of quality that class default may lose on average over any hour, beyond those that the
    target τ loses. Once they are spent, its τ stays at the target until some have come back."""

    @model_validator(mode="after")
    def _check_bounds(self) -> OuterSettings:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is above max_replicas; lower one or raise the other")
        if self.flex_floor_threshold > self.floor_threshold:
            raise ValueError(
                "flex_floor_threshold is above floor_threshold, but class flex pays first; lower it"
            )
        return self


@dataclass(frozen=True)
class OuterState:
    """What the outer loop remembers; plain data, so that it can be kept elsewhere."""

    num_replicas: int = 0
    """That were asked for last; 0 before the first decision."""
    loads: tuple[tuple[float, float], ...] = ()
    """(time, replicas that what arrives keeps busy at τ = 1) within the sizing window."""
    wants: tuple[tuple[float, int], ...] = ()
    """(time, replicas that the load needed) within the scale-in window."""
    debt: float = 0.0
    """Seconds at the lowest rung, not yet paid by a replica."""
    decided_s: float | None = None
    losses: budget.Losses = ()
    """What class default has lost within the budget's hour."""
    is_overspent: bool = False
    """Whether it has reached the budget, and not enough has come back."""
    bursts: tuple[tuple[float, float], ...] = ()
    """(begin, replicas that it keeps busy at the lowest τ) of each that is remembered."""


@dataclass(frozen=True)
class Decision:
    """What is to be done, and why."""

    num_replicas: int
    floor_threshold: float
    """The lowest τ that replicas may go down to for class default."""
    flex_floor_threshold: float
    """And for class flex."""
    feed_forward: float
    """Gain in speed over τ = 1 that the arrivals need of the replicas that are ready."""
    reason: Reason
    decode_tokens_per_s: float
    """That arrive; 0 where it is not known."""
    needed: float
    """Replicas for what arrives, or for bursts like those of late, before rounding."""
    debt: float
    """See `OuterState`."""
    is_saturated: bool = False
    """Whether there is nothing left to give: as many replicas are asked for as there may be, and
    those that serve are full and at their lowest τ. What still comes too late should be refused:
    a replica that starts is no help to it."""
    is_overspent: bool = False
    """See `OuterState`."""


def decide(
    snapshot: Snapshot, state: OuterState, capacity: Capacity, settings: OuterSettings
) -> tuple[Decision, OuterState]:
    """Take one decision.

    Args:
        snapshot: what is known.
        state: what the decision before returned; `OuterState()` at first.
        capacity: of a replica.
        settings: constants.

    Returns:
        The decision, within the settings' bounds whatever the snapshot holds, and the next state.
    """
    current, now = _current(snapshot, state, settings), snapshot.now_s
    age_s = 6 * settings.period_s
    loads, arrivals = snapshot.known_loads(age_s), snapshot.known_arrivals(age_s)
    if arrivals is None or (snapshot.replicas and not loads):
        return held(snapshot, state, settings)
    state = _restarted(state, now, settings)
    elapsed = 0.0 if state.decided_s is None else max(0.0, now - state.decided_s)
    losses = budget.added(state.losses, loads, elapsed_s=elapsed, now_s=now)
    is_overspent = budget.is_spent(losses, settings.loss_budget, was_spent=state.is_overspent)
    floor = 1.0 if is_overspent else settings.floor_threshold
    load = demand.load_of(arrivals, capacity)
    history = (*_within(state.loads, now - settings.sizing_window_s), (now, load))
    bursts = demand.remembered(
        state.bursts,
        demand.load_of(arrivals, capacity, demand.lowest_gain(capacity, floor)),
        demand.mean(history) / settings.utilization,  # what replicas for the mean carry
        now_s=now,
        apart_s=settings.sizing_window_s,  # a step is a burst for no longer
        memory_s=settings.burst_memory_s,
    )
    arriving = _needed(history, loads, arrivals, capacity, settings)
    needed = max(arriving, demand.recurring(bursts))
    debt = _debt(state, loads, elapsed, capacity)
    if not math.isfinite(needed + debt):
        return held(snapshot, state, settings)
    bought = debt >= settings.debt_s
    want = _whole(needed, settings)
    wants = (*_within(state.wants, now - settings.scale_in_window_s), (now, want))
    number, reason = _number(current, want, wants, loads, bought, settings)
    if number < current and len(loads) < len(snapshot.replicas):
        number, reason = current, Reason.WAITING  # a replica that says nothing may be the busy one
    if reason is Reason.STEADY and _whole(arriving, settings) < want:
        reason = Reason.BURSTS
    decision = Decision(
        number,
        floor,
        settings.flex_floor_threshold,
        max(demand.gain_needed(arrivals, capacity, len(loads)) / settings.full, 1.0),
        reason,
        arrivals.requests_per_s * arrivals.mean_output_tokens,
        needed,
        debt,
        _is_saturated(number, loads, capacity, settings),
        is_overspent,
    )
    debt = 0.0 if bought else debt
    return decision, OuterState(number, history, wants, debt, now, losses, is_overspent, bursts)


def held(
    snapshot: Snapshot, state: OuterState, settings: OuterSettings
) -> tuple[Decision, OuterState]:
    """As `decide`, where nothing can be decided: nothing changes, but that τ goes to the target."""
    current = _current(snapshot, state, settings)
    decision = Decision(current, 1.0, 1.0, 1.0, Reason.HELD, 0.0, float(current), state.debt)
    return decision, replace(state, num_replicas=current)


def _current(snapshot: Snapshot, state: OuterState, settings: OuterSettings) -> int:
    return _clipped(state.num_replicas or len(snapshot.replicas) + snapshot.num_starting, settings)


def _within(history: Sequence[tuple[float, _Value]], since: float) -> list[tuple[float, _Value]]:
    return [each for each in history if each[0] > since]


def _clipped(number: int, settings: OuterSettings) -> int:
    return min(max(number, settings.min_replicas), settings.max_replicas)


def _whole(needed: float, settings: OuterSettings) -> int:
    return _clipped(math.ceil(needed - _ROUNDING), settings)


def _restarted(state: OuterState, now: float, settings: OuterSettings) -> OuterState:
    """Without history where the clock has jumped: its times mean nothing now."""
    if state.decided_s is None or 0 <= now - state.decided_s <= 20 * settings.period_s:
        return state
    return replace(state, loads=(), wants=(), decided_s=None)


def _needed(
    history: demand.Loads,
    loads: Sequence[ReplicaLoad],
    arrivals: Arrivals,
    capacity: Capacity,
    settings: OuterSettings,
) -> float:
    """Replicas for what arrives and waits."""
    load = demand.sized(history, _is_busy(loads, capacity, settings), settings.burst)
    load *= demand.trend(history, settings.cold_start_s, settings.max_trend)
    queue = demand.queue_load(loads, arrivals, capacity, settings.drain_s)
    return load / settings.utilization + queue


def _is_busy(loads: Sequence[ReplicaLoad], capacity: Capacity, settings: OuterSettings) -> bool:
    requests = sum(load.num_running + load.num_waiting for load in loads)
    return requests >= settings.busy * capacity.max_num_seqs * len(loads)


def _debt(
    state: OuterState, loads: Sequence[ReplicaLoad], elapsed: float, capacity: Capacity
) -> float:
    if not loads:
        return state.debt
    lowest = capacity.gain(capacity.rungs[-1]) - 1.0
    used = [max(load.gain - 1.0, 0.0) for load in loads]
    share = sum(used) / len(used) / lowest if lowest > 0 else 0.0
    return state.debt + share * elapsed if share > 0 else max(0.0, state.debt - elapsed)


def _is_saturated(
    number: int, loads: Sequence[ReplicaLoad], capacity: Capacity, settings: OuterSettings
) -> bool:
    if not loads or number < settings.max_replicas:
        return False
    return _is_busy(loads, capacity, settings) and all(load.is_lowest for load in loads)


def _number(
    current: int,
    want: int,
    wants: Sequence[tuple[float, int]],
    loads: Sequence[ReplicaLoad],
    bought: bool,
    settings: OuterSettings,
) -> tuple[int, Reason]:
    if want > current:
        return want, Reason.LOAD
    if bought and current < settings.max_replicas:
        return current + 1, Reason.DEBT
    if want == current:
        return current, Reason.STEADY
    enough = max(number for _, number in wants)
    is_long = wants[-1][0] - wants[0][0] >= settings.scale_in_window_s - 2 * settings.period_s
    is_paid = all(load.gain <= 1.0 for load in loads)
    is_empty = sum(load.num_waiting for load in loads) == 0
    if enough < current and is_long and is_paid and is_empty:
        return enough, Reason.IDLE
    return current, Reason.WAITING
