"""Tells the operator where a float32 model would be served faster in bfloat16."""

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


def advise_bfloat16(engine: Engine) -> None:
    """Log one line if bfloat16 would make the products of a float32 engine clearly faster here."""
    if engine.dtype != torch.float32:
        return
    config = engine.checkpoint.config
    columns = int(config.hidden_size)
    speed = speed_in_bfloat16(
        columns, int(getattr(config, "intermediate_size", columns)), engine.device
    )
    if speed >= CLEARLY_FASTER:
        _log.info(
            "the weights are float32; this hardware multiplies them %.1f times as fast in "
            "bfloat16 (dtype: bfloat16), with slightly different outputs",
            speed,
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
