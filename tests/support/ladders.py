"""The ladder of a 7B model, as the autoscaler's tests use it."""

from __future__ import annotations

from mars_autoscale.model.capacity import Capacity, Rung, linear_step_time

LADDER = (
    Rung(1.0, 1.0, 0.0),
    Rung(0.95, 1.695, 1.7, 3),
    Rung(0.9, 1.85, 2.95, 3),
    Rung(0.8, 2.065, 7.6, 3),
    Rung(0.7, 2.255, 12.6, 3),
)
"""Threshold, tokens per forward, loss and masks, from the MARS paper's Table 8."""
CAPACITY = Capacity(
    linear_step_time(0.032, 128), LADDER, max_num_seqs=16, prefill_tokens_per_s=20_000
)
