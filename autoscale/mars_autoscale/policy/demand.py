"""Computes how many replicas carry the arrivals.

A demand is the number of replicas that it keeps busy: at the base, unless said otherwise.
"""

import math

from mars_autoscale.model.capacity import Capacity
from mars_autoscale.policy.observe import Arrivals

History = tuple[tuple[float, float], ...]
"""(time in s, demand), by time."""

_MIN_DECISIONS_FOR_TREND = 4
"""Fewest decisions in a history whose slope is used."""

_NUM_DEVIATIONS = 4.0
"""Standard deviations beyond the mean from which on a demand is no chance. A service decides every
few seconds: at 3, half of all constant loads would seem to have bursts within ten minutes."""

_MIN_FREE_SHARE = 0.1
"""Share of the ready replicas' time that prompts must leave for a lower τ to be of use."""


def total_demand(arrivals: Arrivals, capacity: Capacity, gain: float = 1.0) -> float:
    """Return the demand of prompts, and of decoding at ``gain`` times the base's speed."""
    return capacity.busy_s(arrivals.output_tokens_per_s, arrivals.prompt_tokens_per_s, gain)


def highest_gain(capacity: Capacity, floor_threshold: float) -> float:
    """Return the highest gain over the base of the rungs at or above a floor; at least 1."""
    allowed = [rung for rung in capacity.rungs if rung.threshold >= floor_threshold]
    fastest = max(map(capacity.tokens_per_s, allowed), default=0.0)
    return max(1.0, fastest / capacity.tokens_per_s(capacity.base()))


def gain_needed(arrivals: Arrivals, capacity: Capacity, num_ready: float) -> float:
    """Return the gain over the base at which the ready replicas carry the arrivals.

    It is 1 if prompts alone fill the replicas, as no τ makes those faster.
    """
    free = num_ready - capacity.busy_s(output_tokens=0, prompt_tokens=arrivals.prompt_tokens_per_s)
    if free <= _MIN_FREE_SHARE * max(num_ready, 1):
        return 1.0
    return capacity.busy_s(arrivals.output_tokens_per_s, prompt_tokens=0) / free


def mean(history: History) -> float:
    """Return the mean demand of a history that is not empty."""
    return sum(demand for _, demand in history) / len(history)


def chance(history: History, number: float) -> float:
    """Return the highest demand that arrivals of a constant rate reach by chance.

    The latest demand of ``history`` is that of ``number`` requests; as many come at random in equal
    times as by Poisson.
    """
    if not number:
        return 0.0
    steady = mean(history)
    return steady + _NUM_DEVIATIONS * math.sqrt(steady * history[-1][1] / number)


def trend(history: History, cold_start_s: float, most: float) -> float:
    """Return the factor by which demand will grow during a cold start, from 1 to ``most``."""
    latest = history[-1][1]
    span = history[-1][0] - history[0][0]
    if len(history) < _MIN_DECISIONS_FOR_TREND or latest <= 0 or span <= 0:
        return 1.0
    half = len(history) // 2
    early, late = mean(history[:half]), mean(history[half:])
    growth = (late - early) / (span / 2) * cold_start_s
    return min(max(1.0 + growth / latest, 1.0), most)


def remembered_bursts(
    bursts: History, demand: float, carried: float, *, now_s: float, apart_s: float, memory_s: float
) -> History:
    """Return the recent bursts: when each began, and its highest demand.

    Demand above ``carried`` is a burst. Bursts later than now, as the clock was put back, move to
    now; further demand within ``apart_s`` of a begin belongs to it, and after ``memory_s`` it is
    forgotten.
    """
    kept = [(min(at, now_s), peak) for at, peak in bursts if at > now_s - memory_s]
    if demand <= carried:
        return tuple(kept)
    if kept and now_s - kept[-1][0] < apart_s:
        began_s, peak = kept.pop()
        return (*kept, (began_s, max(peak, demand)))
    return (*kept, (now_s, demand))


def recurring_demand(bursts: History) -> float:
    """Return the demand that at least two bursts have reached; 0 if there was one at most."""
    return sorted(peak for _, peak in bursts)[-2] if len(bursts) > 1 else 0.0
