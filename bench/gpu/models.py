"""Makes the untrained models of the acceptance run, on the device and once for a group of steps."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench.gpu.steps import Setup

from mars_serve.bench.decode.models import PRESETS, BenchModel, untrained_model

PRESET = {"7b": "qwen2.5-7b", "0.5b": "qwen2.5-0.5b"}
_TINY = {
    **PRESETS["qwen2.5-0.5b"],
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
}


def bench_model(size: str, setup: Setup, dtype: torch.dtype | None = None) -> BenchModel:
    """Return a model of a size, ``7b`` or ``0.5b``, or a tiny one if the run is tiny."""
    dtype = dtype or (torch.bfloat16 if setup.device == "cuda" else torch.float32)
    name = PRESET[size]
    if setup.is_tiny:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "config.json")
            file.write_text(json.dumps(_TINY), encoding="utf-8")
            return untrained_model(str(file), dtype, setup.device, seed=0)
    return untrained_model(name, dtype, setup.device, seed=0)


def weight_bytes(model: BenchModel) -> int:
    """Return the bytes of the weights that a step of few positions reads."""
    from transformers import AutoModelForCausalLM

    config = model.checkpoint.config
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    count = sum(weight.numel() for weight in weights.parameters())
    if not config.tie_word_embeddings:
        count -= weights.get_input_embeddings().weight.numel()  # a step reads one row of it
    return int(count * model.dtype.itemsize)


def synchronise(setup: Setup) -> None:
    """Wait until the device has done all its work."""
    if setup.device == "cuda":
        torch.cuda.synchronize()


def seconds_of(function: Any, setup: Setup, repeats: int) -> float:
    """Return the seconds of a call, the least mean of three series, after one that is not timed."""
    function()
    series = []
    for _ in range(3):
        synchronise(setup)
        begin = time.perf_counter()
        for _ in range(repeats):
            function()
        synchronise(setup)
        series.append((time.perf_counter() - begin) / repeats)
    return min(series)


def memory_facts(setup: Setup) -> dict[str, float]:
    """Return what is allocated, reserved and free on the device, in GiB; nothing on a CPU."""
    if setup.device != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_gib": torch.cuda.memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.memory_reserved() / 2**30,
        "free_gib": free / 2**30,
        "total_gib": total / 2**30,
    }
