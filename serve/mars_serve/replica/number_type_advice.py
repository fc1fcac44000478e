"""Tells the operator where a model would be served faster in another number type."""

from __future__ import annotations

import logging

import torch

from mars_serve.engine.engine import Engine
from mars_serve.engine.execution.linear import product_seconds

CLEARLY_FASTER = 1.3
"""Least ratio of the times of a product at which the advice is given."""
_ROWS = (4, 16)
"""Rows of the timed products, for decoding with few and with several requests."""
_MOST_WEIGHTS = 2**23
"""Weights of the timed layer, at most; a longer layer is cut, which leaves the ratio as it is."""

_log = logging.getLogger("mars_serve.engine")


def advise_number_type(engine: Engine) -> None:
    """Log one line if the other of float32 and bfloat16 would make products clearly faster here.

    A model in bfloat16 is slow on processors with neither AVX-512 BF16 nor AMX.
    """
    if engine.dtype not in (torch.float32, torch.bfloat16):
        return
    config = engine.checkpoint.config
    columns = int(config.hidden_size)
    speed = speed_in_bfloat16(
        columns, int(getattr(config, "intermediate_size", columns)), engine.device
    )
    if engine.dtype == torch.float32 and speed >= CLEARLY_FASTER:
        _log.info(
            "the weights are float32; this hardware multiplies them %.1f times as fast in "
            "bfloat16 (dtype: bfloat16), with slightly different outputs",
            speed,
        )
    elif engine.dtype == torch.bfloat16 and speed * CLEARLY_FASTER <= 1:
        _log.warning(
            "the weights are bfloat16; this hardware multiplies them %.1f times as fast in "
            "float32 (dtype: float32), which takes twice the memory",
            1 / speed,
        )


def speed_in_bfloat16(columns: int, rows: int, device: torch.device) -> float:
    """Time products of a layer, and return the speed in bfloat16 over that in float32.

    Args:
        columns: columns of the layer's weight.
        rows: rows of the layer's weight; many are cut, which leaves the ratio as it is.
        device: the device to run on.
    """
    rows = min(rows, max(1, _MOST_WEIGHTS // columns))
    wide, narrow = (
        sum(product_seconds(rows, columns, count, dtype, device) for count in _ROWS)
        for dtype in (torch.float32, torch.bfloat16)
    )
    return wide / narrow
