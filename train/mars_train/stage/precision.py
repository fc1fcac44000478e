"""Tells the user of training in bfloat16 on a processor that is slow at it."""

from __future__ import annotations

import time

import torch

from mars_train.stage.job import Reporter
from mars_train.stage.parallel import Workers

CLEARLY_SLOWER = 1.3
"""Least ratio of the times of a product at which the user is warned."""
_SIZE = 512
"""Rows and columns of the timed weight."""
_TOKENS = 64
"""Rows of the timed input: enough for a product to be bound by arithmetic, as in training."""
_ROUNDS = 3


def warn_of_slow_bfloat16(workers: Workers, reporter: Reporter) -> None:
    """Warn if bfloat16 makes the products of a run in mixed precision slower, on a CPU.

    Processors with neither AVX-512 BF16 nor AMX take 10 to 20 times as long in bfloat16 as in
    float32. The first worker measures for some 50 ms there; nothing is measured on a GPU.
    """
    if workers.rank != 0 or workers.precision != "bf16" or workers.device.type != "cpu":
        return
    ratio = slowdown_in_bfloat16()
    if ratio >= CLEARLY_SLOWER:
        reporter.say(
            f"precision: products in bf16 take {ratio:.1f} times as long as in float32 on this "
            'processor; set precision: "no"',
            warning=True,
        )


def slowdown_in_bfloat16() -> float:
    """Return how often as long as in float32 a product and its gradients take in bfloat16."""
    types = (torch.float32, torch.bfloat16)
    taken = {dtype: [_product_seconds(dtype) for _ in range(_ROUNDS)] for dtype in types}
    return min(taken[torch.bfloat16]) / min(taken[torch.float32])


def _product_seconds(dtype: torch.dtype) -> float:
    weight = torch.full((_SIZE, _SIZE), 0.5, dtype=dtype, requires_grad=True)
    inputs = torch.full((_TOKENS, _SIZE), 0.5, dtype=dtype, requires_grad=True)
    began = time.perf_counter()
    torch.autograd.backward(torch.nn.functional.linear(inputs, weight).sum())
    return time.perf_counter() - began
