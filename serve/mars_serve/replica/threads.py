"""Chooses an engine's number of CPU threads by a step's time. Imports no Ray or HTTP library."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from mars_serve.engine.engine import Engine
from mars_serve.replica.engine_process import Threads

_STEP_TOKENS = 16
"""Positions of the timed steps, those of a batch of moderate size."""
_REPEATS, _ROUNDS = 5, 3
_WORTH_S = 0.0125
"""Seconds of a step that further threads must save at best. The last of them runs on the core that
HTTP needs for about 5 ms for as many tokens, and all threads of a step wait for the slowest."""

_log = logging.getLogger(__name__)


def set_threads(engine: Engine, threads: Threads) -> int:
    """Set torch's number of threads to the better one for an engine that has no requests.

    Returns:
        The number that is set.
    """
    torch.set_num_threads(threads.num)
    if engine.overlaps or threads.num_if_slow == threads.num:
        return threads.num
    chosen = better_threads(lambda: engine.measure_prefill(_STEP_TOKENS, _REPEATS), threads)
    torch.set_num_threads(chosen)
    return chosen


def better_threads(measure: Callable[[], float], threads: Threads) -> int:
    """Return the better number of threads.

    Steps are timed with the smaller number alone: one with every core would be slowed down by the
    processes that start at the same time, and hide what it gains.

    Args:
        measure: returns the present speed in tokens per second.
        threads: the two numbers; the smaller one is set.
    """
    step_s = _STEP_TOKENS / max(measure() for _ in range(_ROUNDS))
    saved_s = step_s * (1 - threads.num / threads.num_if_slow)
    chosen = threads.num_if_slow if saved_s >= _WORTH_S else threads.num
    _log.info(
        "%d threads: a step of %d positions takes %.1f ms with %d",
        chosen,
        _STEP_TOKENS,
        step_s * 1e3,
        threads.num,
    )
    return chosen
