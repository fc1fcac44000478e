"""Part 3: what does MARS training cost over AR training, with flex attention?"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import torch
from bench.gpu.steps import Result, Setup, Step
from bench.training.train_cost import compare, measure
from bench.training.train_variants import Options

_PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}
"""Dense products of bfloat16 a second, by a part of the GPU's name; published figures."""


def steps(setup: Setup) -> list[Step]:
    """Return the steps: without and with compiled layers."""
    return [
        Step(f"training{name}", partial(train, compiled=compiled), 150, needs_s=40)
        for name, compiled in (("", False), (" compiled", True))
        if not (compiled and setup.is_tiny)
    ]


def train(setup: Setup, compiled: bool) -> Result:
    """Measure steps of both kinds of training in turn, on the same conversations."""
    on_cuda, is_tiny = setup.device == "cuda", setup.is_tiny
    options = Options(
        model="demo" if is_tiny else "qwen2.5-0.5b",
        data="demo",
        device=setup.device,
        dtype="bf16" if on_cuda else "float32",
        attention="flex" if on_cuda else "sdpa",
        compile=compiled,
        batch_size=2 if is_tiny else 16,
        micro_batch_size=2 if is_tiny else 4,
        length=24 if is_tiny else 1024,
        block_size=4,
        row_slots=128 if is_tiny else 4096,
        ar_row_slots=128 if is_tiny else 4096,
        steps=2 if is_tiny else 4,
        rounds=1 if is_tiny else 3,
        threads=torch.get_num_threads(),
        peak_tflops=_peak_tflops() if on_cuda else None,
        seed=0,
    )
    measured = measure(options, ["ar", "mars"])
    return {
        "options": asdict(options),
        "variants": {each.variant: asdict(each) for each in measured},
        **compare(measured)["mars / ar"],
    }


def _peak_tflops() -> float | None:
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in _PEAK_TFLOPS.items() if part in name), None)
