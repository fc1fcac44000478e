"""The ladder of a 7B model, as the autoscaler's tests use it."""

from __future__ import annotations

from mars_autoscale.model.capacity import AR, Capacity, Rung, Window
from mars_autoscale.model.step_times import linear_step_time
from mars_platform.method.mode import Mode


def threshold_rung(
    threshold: float, tokens_per_forward: float, loss: float, num_masks: int = 3
) -> Rung:
    """Return a rung of mode threshold, whose rows feed their accepted tokens and all masks."""
    window = Window(tokens_per_forward, tokens_per_forward + num_masks)
    return Rung(Mode.THRESHOLD, threshold, (window,), loss)


def exact_rung(tokens_per_forward: float, positions: float) -> Rung:
    """Return the rung of mode exact."""
    return Rung(Mode.EXACT, 1.0, (Window(tokens_per_forward, positions),))


LADDER = (
    AR,
    threshold_rung(0.95, 1.695, 1.7),
    threshold_rung(0.9, 1.85, 2.95),
    threshold_rung(0.8, 2.065, 7.6),
    threshold_rung(0.7, 2.255, 12.6),
)
"""Plain AR decoding and mode threshold, by the MARS paper's Table 8."""
CAPACITY = Capacity(
    linear_step_time(0.032, 128), LADDER, max_num_seqs=16, prefill_tokens_per_s=20_000
)
