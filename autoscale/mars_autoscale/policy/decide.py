"""Decides how many replicas there should be, and how far τ may go.

Replicas follow the token rate, at the speed of the fastest decoding that loses nothing, and at the
pace at which replicas really work, and never concurrency: a lower τ empties the queue, and a policy
that counts concurrency would stop replicas just while quality is paying. Replicas also stay for
bursts that recur and that τ cannot carry, because no replica starts in time for those. A queue that
stays too long orders replicas even if all speeds are wrong.
`decide` is pure and total: any snapshot gives a decision within bounds, whatever is missing, stale
or not finite.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from mars_autoscale.model.capacity import Capacity
from mars_autoscale.policy import budget, demand
from mars_autoscale.policy.decision import (
    AT_TARGET,
    Decision,
    OuterState,
    Reason,
    ThresholdRange,
)
from mars_autoscale.policy.observe import ReplicaLoad, Snapshot
from mars_autoscale.policy.pace import mean_pace
from mars_autoscale.policy.settings import OuterSettings

_MAX_AGE_PERIODS = 6
"""Age in periods beyond which reports are not used."""
_CLOCK_JUMP_PERIODS = 20
"""Periods between two decisions beyond which the clock must have jumped."""
_LATE_QUEUE_S = 20.0
"""Time for which a queue must have been too long before it orders replicas, or a third of a cold
start if that is less: the sooner a replica is there, the more it still helps."""
_ROUNDING = 1e-9
"""Share of a replica by which a demand may exceed a whole number of them."""

_Value = TypeVar("_Value", int, float)


def decide(
    snapshot: Snapshot, state: OuterState, capacity: Capacity, settings: OuterSettings
) -> tuple[Decision, OuterState]:
    """Take one decision, within the settings' bounds whatever the snapshot holds.

    ``state`` is what the last decision returned, `OuterState()` at first; ``capacity`` is the speed
    of one replica. The next state is returned beside the decision.
    """
    max_age_s = _MAX_AGE_PERIODS * settings.period_s
    replicas, arrivals = snapshot.known_replicas(max_age_s), snapshot.known_arrivals(max_age_s)
    if arrivals is None or (snapshot.replicas and not replicas):
        return hold(snapshot, state, settings)

    now_s = snapshot.now_s
    state = _without_invalid_history(state, now_s, settings)
    elapsed_s = 0.0 if state.decided_s is None else max(0.0, now_s - state.decided_s)
    losses = budget.added(state.losses, replicas, elapsed_s=elapsed_s, now_s=now_s)
    is_overspent = budget.is_spent(losses, settings.loss_budget, was_spent=state.is_overspent)
    # nobody knows what lower thresholds lose once audits contradict the frontier
    flex_floor_threshold = 1.0 if snapshot.is_refuted else settings.flex_floor_threshold
    is_closed = is_overspent or snapshot.is_refuted
    floor_threshold = 1.0 if is_closed else settings.floor_threshold
    highest_gain = demand.highest_gain(capacity, floor_threshold)
    debt = _debt(state, replicas, elapsed_s, _full_debt_gain(capacity, settings))

    current_demand = (now_s, demand.total_demand(arrivals, capacity))
    demand_history = (
        *_since(now_s - settings.sizing_window_s, state.demand_history),
        current_demand,
    )
    bursts = demand.remembered_bursts(
        state.bursts,
        demand.total_demand(arrivals, capacity, highest_gain),
        max(  # what replicas for the mean carry, and what is no more than chance
            demand.mean(demand_history) / settings.utilization,
            demand.chance(demand_history, arrivals.number),
        ),
        now_s=now_s,
        apart_s=settings.sizing_window_s,  # a step in demand is a burst for no longer
        memory_s=settings.burst_memory_s,
    )
    pace = mean_pace((replica.pace for replica in replicas), state.pace)
    needed_now = _needed_now(demand_history, replicas, capacity, settings) / pace
    needed = max(needed_now, demand.recurring_demand(bursts) / pace)
    if not math.isfinite(needed + debt):
        return hold(snapshot, state, settings)

    rate, by_load = arrivals.requests_per_s, _rounded_up(needed, settings)
    floor, late_queue = _queue_floor(state, snapshot, replicas, rate, capacity, settings)
    wanted = max(by_load, _rounded_up(floor, settings))
    wanted_history = (
        *_since(now_s - settings.scale_in_window_s, state.wanted_history),
        (now_s, wanted),
    )
    is_bought = debt >= settings.debt_s
    current = _current_number(snapshot, state, settings)
    number, reason = _number(current, wanted_history, replicas, is_bought, settings)
    if number < current and len(replicas) < len(snapshot.replicas):
        number, reason = current, Reason.WAITING  # a silent replica may be the busy one
    if reason is Reason.LOAD and by_load < wanted:
        reason = Reason.QUEUE
    if reason is Reason.STEADY and _rounded_up(needed_now, settings) < by_load:
        reason = Reason.BURSTS

    needed_gain = demand.gain_needed(arrivals, capacity, len(replicas) * pace) / settings.full
    decision = Decision(
        num_replicas=number,
        range=ThresholdRange(
            floor_threshold=floor_threshold,
            flex_floor_threshold=flex_floor_threshold,
            feed_forward=max(needed_gain, 1.0),
            is_saturated=_is_saturated(number, replicas, capacity, settings),
        ),
        reason=reason,
        decode_tokens_per_s=arrivals.output_tokens_per_s,
        needed=needed,
        debt=debt,
        is_overspent=is_overspent,
        is_refuted=snapshot.is_refuted,
        pace=pace,
    )
    return decision, OuterState(
        num_replicas=number,
        demand_history=demand_history,
        wanted_history=wanted_history,
        debt=0.0 if is_bought else debt,
        decided_s=now_s,
        losses=losses,
        is_overspent=is_overspent,
        bursts=bursts,
        pace=pace,
        late_queue=late_queue,
    )


def hold(
    snapshot: Snapshot, state: OuterState, settings: OuterSettings
) -> tuple[Decision, OuterState]:
    """Decide that the number of replicas stays and τ goes to the target.

    Arguments and results are those of `decide`.
    """
    current = _current_number(snapshot, state, settings)
    decision = Decision(
        num_replicas=current,
        range=AT_TARGET,
        reason=Reason.HELD,
        decode_tokens_per_s=0.0,
        needed=float(current),
        debt=state.debt,
        is_refuted=snapshot.is_refuted,
        pace=mean_pace((), state.pace),
    )
    return decision, replace(state, num_replicas=current)


def _current_number(snapshot: Snapshot, state: OuterState, settings: OuterSettings) -> int:
    return _clipped(state.num_replicas or len(snapshot.replicas) + snapshot.num_starting, settings)


def _clipped(number: int, settings: OuterSettings) -> int:
    return min(max(number, settings.min_replicas), settings.max_replicas)


def _rounded_up(needed: float, settings: OuterSettings) -> int:
    return _clipped(math.ceil(needed - _ROUNDING), settings)


def _since(
    begin_s: float, history: Sequence[tuple[float, _Value]]
) -> tuple[tuple[float, _Value], ...]:
    return tuple(each for each in history if each[0] > begin_s)


def _without_invalid_history(
    state: OuterState, now_s: float, settings: OuterSettings
) -> OuterState:
    """Drop the history if the clock has jumped, because its times mean nothing now."""
    longest_s = _CLOCK_JUMP_PERIODS * settings.period_s
    if state.decided_s is None or 0 <= now_s - state.decided_s <= longest_s:
        return state
    return replace(state, demand_history=(), wanted_history=(), late_queue=(), decided_s=None)


def _full_debt_gain(capacity: Capacity, settings: OuterSettings) -> float:
    """Return the gain at which time counts in full as debt; 1 if no τ may be lowered.

    It is that at tier default's floor, or at tier flex's if tier default's lets nothing be gained.
    What closes the floor, such as a spent budget, does not make what was lost before count for
    more.
    """
    gain = demand.highest_gain(capacity, settings.floor_threshold)
    return gain if gain > 1 else demand.highest_gain(capacity, settings.flex_floor_threshold)


def _debt(
    state: OuterState, replicas: Sequence[ReplicaLoad], elapsed_s: float, full_gain: float
) -> float:
    """Add the time since the last decision to the debt, in proportion to the gain in use.

    Time at ``full_gain`` or above counts in full. The debt falls while τ is at the target.
    """
    if not replicas:
        return state.debt
    highest = full_gain - 1.0
    used = sum(replica.gain - 1.0 for replica in replicas if replica.gain > 1.0) / len(replicas)
    share = min(used / highest, 1.0) if highest > 0 else 0.0
    return state.debt + share * elapsed_s if share > 0 else max(0.0, state.debt - elapsed_s)


def _needed_now(
    demand_history: demand.History,
    replicas: Sequence[ReplicaLoad],
    capacity: Capacity,
    settings: OuterSettings,
) -> float:
    """Return the replicas of pace 1 that the arrivals need, before rounding.

    Waiting requests need no more: these replicas work them off with the part of their speed that
    the mean leaves free, and further ones would come when nothing waits any more.
    """
    rate = demand.mean(demand_history)
    rate *= demand.trend(demand_history, settings.cold_start_s, settings.max_trend)
    usual = rate / settings.utilization
    # the latest demand hides nothing, as a mean does, so it needs no such reserve
    latest = demand_history[-1][1]
    return max(usual, latest) if _is_busy(replicas, capacity, settings) else usual


def _queue_floor(
    state: OuterState,
    snapshot: Snapshot,
    replicas: Sequence[ReplicaLoad],
    rate: float,
    capacity: Capacity,
    settings: OuterSettings,
) -> tuple[float, demand.History]:
    """Return the replicas for all that runs and waits if too much has waited for long, else 0.

    Also returns the next `OuterState.late_queue`. By Little's law, requests wait longer than the
    objective if more wait than arrive within it, at a rate per second. While replicas are starting,
    these may be all that is needed.
    """
    waiting = sum(replica.num_waiting for replica in replicas)
    if snapshot.num_starting or waiting <= settings.objective_ttft_s * rate:
        return 0.0, ()
    now_s, least_s = snapshot.now_s, min(_LATE_QUEUE_S, settings.cold_start_s / 3)
    requests = waiting + sum(replica.num_running for replica in replicas)
    # however far apart decisions are, the last one that is old enough stays
    begin_s = max((at for at, _ in state.late_queue if now_s - at >= least_s), default=-math.inf)
    queue = (*(each for each in state.late_queue if each[0] >= begin_s), (now_s, requests))
    is_long = math.isfinite(begin_s)
    return min(number for _, number in queue) / capacity.max_num_seqs * is_long, queue


def _number(
    current: int,
    wanted_history: Sequence[tuple[float, int]],
    replicas: Sequence[ReplicaLoad],
    is_bought: bool,
    settings: OuterSettings,
) -> tuple[int, Reason]:
    """Return the number of replicas to order, and why; `is_bought` if debt has bought one."""
    wanted = wanted_history[-1][1]
    if wanted > current:
        return wanted, Reason.LOAD
    if is_bought and current < settings.max_replicas:
        return current + 1, Reason.DEBT
    if wanted == current:
        return current, Reason.STEADY
    highest = max(number for _, number in wanted_history)
    seen_s = wanted_history[-1][0] - wanted_history[0][0]
    is_long = seen_s >= settings.scale_in_window_s - 2 * settings.period_s
    is_at_target = all(replica.gain <= 1.0 for replica in replicas)
    is_queue_empty = sum(replica.num_waiting for replica in replicas) == 0
    if highest < current and is_long and is_at_target and is_queue_empty:
        return highest, Reason.IDLE
    return current, Reason.WAITING


def _is_saturated(
    number: int, replicas: Sequence[ReplicaLoad], capacity: Capacity, settings: OuterSettings
) -> bool:
    if not replicas or number < settings.max_replicas:
        return False
    is_busy = _is_busy(replicas, capacity, settings)
    return is_busy and all(replica.is_lowest for replica in replicas)


def _is_busy(replicas: Sequence[ReplicaLoad], capacity: Capacity, settings: OuterSettings) -> bool:
    requests = sum(replica.num_running + replica.num_waiting for replica in replicas)
    return requests >= settings.busy * capacity.max_num_seqs * len(replicas)
