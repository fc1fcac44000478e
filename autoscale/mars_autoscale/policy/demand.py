"""How many replicas carry what arrives. Knows no settings, no decision and no clock.

A load is in replicas that it keeps busy: at τ = 1, where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Sequence

from mars_autoscale.model.capacity import Capacity
from mars_autoscale.policy.observe import Arrivals, ReplicaLoad

Loads = Sequence[tuple[float, float]]
"""(time in s, load), by time."""

_LEAST_FOR_TREND = 4
"""Decisions without which a slope says nothing."""

_LEAST_ROOM = 0.1
"""Share of the ready replicas' time that prompts must leave for a lower τ to be of use."""


def prompt_load(arrivals: Arrivals, capacity: Capacity) -> float:
    """What prompts alone keep busy."""
    return arrivals.prompt_tokens_per_s / capacity.prefill_tokens_per_s


def decode_load(arrivals: Arrivals, capacity: Capacity, gain: float = 1.0) -> float:
    """What decoding keeps busy, where it is ``gain`` times faster than at τ = 1."""
    rate = arrivals.requests_per_s * arrivals.mean_output_tokens
    return rate / (gain * capacity.tokens_per_s(capacity.rungs[0]))


def load_of(arrivals: Arrivals, capacity: Capacity, gain: float = 1.0) -> float:
    """What both keep busy, where decoding is ``gain`` times faster than at τ = 1; prompts never
    are.
    """
    return decode_load(arrivals, capacity, gain) + prompt_load(arrivals, capacity)


def lowest_gain(capacity: Capacity, floor_threshold: float) -> float:
    """Times that a replica decodes faster than at τ = 1 where it goes as low as it may; at least 1.

    Args:
        capacity: of a replica.
        floor_threshold: the lowest τ allowed.
    """
    allowed = [rung for rung in capacity.rungs if rung.threshold >= floor_threshold]
    return max([1.0, *(capacity.gain(rung) for rung in allowed)])


def gain_needed(arrivals: Arrivals, capacity: Capacity, num_ready: int) -> float:
    """Times that the ready replicas must decode faster than at τ = 1 to carry what arrives; 1 where
    prompts alone take them: no τ makes those faster.
    """
    room = num_ready - prompt_load(arrivals, capacity)
    if room <= _LEAST_ROOM * max(num_ready, 1):
        return 1.0
    return decode_load(arrivals, capacity) / room


def queue_load(
    loads: Sequence[ReplicaLoad], arrivals: Arrivals, capacity: Capacity, drain_s: float
) -> float:
    """What works off all that waits within ``drain_s``, if it is like what arrives."""
    waiting = sum(load.num_waiting for load in loads)
    if not waiting:
        return 0.0
    decode_s = arrivals.mean_output_tokens / capacity.tokens_per_s(capacity.rungs[0])
    prompt_s = 0.0
    if arrivals.requests_per_s:
        prompt_s = prompt_load(arrivals, capacity) / arrivals.requests_per_s
    return waiting * (decode_s + prompt_s) / drain_s


def sized(history: Loads, is_busy: bool, burst: float) -> float:
    """The load to size by: the mean, or the latest where that is a burst.

    Args:
        history: not empty.
        is_busy: whether replicas confirm a burst.
        burst: times the mean from which on the latest is one.
    """
    latest, usual = history[-1][1], mean(history)
    return latest if is_busy and latest > burst * usual else usual


def mean(history: Loads) -> float:
    """The mean load.

    Args:
        history: not empty.
    """
    return sum(load for _, load in history) / len(history)


def trend(history: Loads, cold_start_s: float, most: float) -> float:
    """Times that the load will have grown once a replica asked for now is there; 1 to ``most``."""
    latest = history[-1][1]
    span = history[-1][0] - history[0][0]
    if len(history) < _LEAST_FOR_TREND or latest <= 0 or span <= 0:
        return 1.0
    half = len(history) // 2
    early = sum(load for _, load in history[:half]) / half
    late = sum(load for _, load in history[half:]) / (len(history) - half)
    growth = (late - early) / (span / 2) * cold_start_s
    return min(max(1.0 + growth / latest, 1.0), most)


def remembered(
    bursts: Loads, load: float, carried: float, *, now_s: float, apart_s: float, memory_s: float
) -> tuple[tuple[float, float], ...]:
    """The bursts of late: when each began, and the highest load of it.

    Args:
        bursts: until now; those that begin later begin now.
        load: now.
        carried: a load that is no burst.
        now_s: the time.
        apart_s: seconds after the begin of one within which it is the same one.
        memory_s: seconds for which one counts.
    """
    kept = [(min(at, now_s), peak) for at, peak in bursts if at > now_s - memory_s]
    if load <= carried:
        return tuple(kept)
    if kept and now_s - kept[-1][0] < apart_s:
        began_s, peak = kept.pop()
        return (*kept, (began_s, max(peak, load)))
    return (*kept, (now_s, load))


def recurring(bursts: Loads) -> float:
    """The load that several bursts have reached; 0 where there was one at the most: it may have
    been the only one.
    """
    return sorted(peak for _, peak in bursts)[-2] if len(bursts) > 1 else 0.0
