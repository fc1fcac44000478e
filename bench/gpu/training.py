"""Measures the cost of MARS training over AR training, with flex attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from bench.gpu.setup import Setup
from bench.train_cost import Options, compare, measure

_PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}
"""Dense products of bfloat16 a second, by a part of the GPU's name; published figures."""


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_training_steps_are_finite(
    setup: Setup, compiled: bool, record_property: Callable[[str, Any], None]
) -> None:
    """Measures steps of both kinds of training in turn, on the same conversations."""
    if compiled and not setup.on_cuda:
        pytest.skip("layers are compiled on a GPU only")
    options = Options(batch_size=2, micro_batch_size=2, row_slots=96, steps=2, rounds=1)
    if not setup.is_tiny:
        name = torch.cuda.get_device_name()
        peaks = [peak for part, peak in _PEAK_TFLOPS.items() if part in name]
        options = Options(
            model="qwen2.5-0.5b", device="cuda", dtype="bf16", attention="flex", compile=compiled,
            batch_size=16, micro_batch_size=4, length=1024, row_slots=4096, ar_row_slots=4096,
            steps=4, rounds=3, peak_tflops=peaks[0] if peaks else 0.0,
        )  # fmt: skip
    measured = measure(options, ["ar", "mars"])
    record_property("variants", {each.variant: asdict(each) for each in measured})
    record_property("mars / ar", compare(measured)["mars / ar"])
    assert all(0 < each.first_loss < 100 for each in measured)
