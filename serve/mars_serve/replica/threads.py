"""Chooses an engine's number of CPU threads by timing its steps. Imports no Ray or HTTP library."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from mars_serve.engine.engine import Engine
from mars_serve.replica.engine_process import Threads

_STEP_TOKENS = 16
"""Positions of the timed steps, those of a batch of moderate size."""
_REPEATS, _ROUNDS = 5, 3
_CLEARLY_FASTER = 1.1
"""Speed at which more threads pay, as a multiple of that with fewer: the further ones run on a core
that HTTP needs as well, and all threads of a step wait for the slowest."""

_log = logging.getLogger(__name__)


def set_threads(engine: Engine, threads: Threads) -> None:
    """Set torch's number of threads to the better one for an engine that has no requests."""
    if engine.overlaps or threads.num_if_faster == threads.num:
        torch.set_num_threads(threads.num)
        return
    chosen = better_threads(lambda: engine.measure_prefill(_STEP_TOKENS, _REPEATS), threads)
    torch.set_num_threads(chosen)


def better_threads(measure: Callable[[], float], threads: Threads) -> int:
    """Return the better number of threads.

    Args:
        measure: returns the present speed in tokens per second.
        threads: the two numbers.
    """
    both = (threads.num, threads.num_if_faster)
    best = dict.fromkeys(both, 0.0)
    for _ in range(_ROUNDS):  # in turn, as the machine's speed drifts
        for num in both:
            torch.set_num_threads(num)
            best[num] = max(best[num], measure())
    gain = best[threads.num_if_faster] / best[threads.num]
    chosen = threads.num_if_faster if gain >= _CLEARLY_FASTER else threads.num
    _log.info(
        "%d threads: steps with %d are %.2f times as fast as with %d",
        chosen,
        threads.num_if_faster,
        gain,
        threads.num,
    )
    return chosen
