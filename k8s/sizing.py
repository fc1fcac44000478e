"""Computes, from published figures, what a replica of a model on a GPU can be expected to do.

Nothing here is measured. ``marsray calibrate`` measures the same on your hardware, and the
autoscaler goes by that.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

CONTEXT = 2048
"""Tokens that a request has stored on average: prompt and half of its output."""
PAGE = 256
"""Tokens a page, as engines have it on GPUs."""
MEMORY_FRACTION = 0.85
"""Share of the memory that the weights leave that the pool takes; engine.memory_fraction."""
CUDA_BYTES = 1.5e9
"""Taken by the driver, the kernels and the captured graphs."""
BANDWIDTH_SHARE, ARITHMETIC_SHARE = 0.65, 0.45
"""Shares of the published peaks that a step reaches."""
STEP_OVERHEAD_S = 0.002
"""Of a step, beside reading and computing."""
UTILIZATION = 0.68
"""Share of a replica's speed that the mean load may take; autoscaling.utilization."""
LOAD = 10_000
"""Output tokens a second that the column of replicas is for."""
MOST_BATCH = 64
"""Past which the table does not go, whatever the memory holds."""


@dataclass(frozen=True)
class Model:
    """A model in bfloat16."""

    name: str
    parameters: float
    layers: int
    key_value_heads: int
    head_size: int

    @property
    def weight_bytes(self) -> float:
        """Of all weights."""
        return 2 * self.parameters

    @property
    def token_bytes(self) -> int:
        """Of one token's keys and values."""
        return 2 * 2 * self.layers * self.key_value_heads * self.head_size


@dataclass(frozen=True)
class Gpu:
    """A GPU as published: bytes, bytes a second, dense bfloat16 operations a second."""

    name: str
    memory: float
    bandwidth: float
    operations: float


MODELS = (
    Model("0.5B (Qwen2.5)", 0.49e9, 24, 2, 64),
    Model("7B (Qwen2.5)", 7.6e9, 28, 4, 128),
    Model("8B (Llama 3.1)", 8.0e9, 32, 8, 128),
    Model("14B (Qwen2.5)", 14.8e9, 48, 8, 128),
    Model("32B (Qwen2.5)", 32.8e9, 64, 8, 128),
)
GPUS = (
    Gpu("L4 24 GB", 24e9, 300e9, 121e12),
    Gpu("A100 80 GB", 80e9, 2039e9, 312e12),
    Gpu("H100 80 GB", 80e9, 3350e9, 989e12),
    Gpu("H200 141 GB", 141e9, 4800e9, 989e12),
)


def num_pages(model: Model, gpu: Gpu) -> int:
    """Pages of the pool; 0 where the weights do not fit."""
    left = gpu.memory - CUDA_BYTES - model.weight_bytes
    return max(0, int(MEMORY_FRACTION * left / (PAGE * model.token_bytes)))


def batch(model: Model, gpu: Gpu) -> int:
    """Requests that run at once."""
    return min(MOST_BATCH, num_pages(model, gpu) * PAGE // CONTEXT)


def step_s(model: Model, gpu: Gpu, rows: int) -> float:
    """Seconds of a step that gives each row one token: it reads all weights and the rows' pages."""
    read = model.weight_bytes + rows * CONTEXT * model.token_bytes
    computed = 2 * model.parameters * rows
    return STEP_OVERHEAD_S + max(
        read / (BANDWIDTH_SHARE * gpu.bandwidth), computed / (ARITHMETIC_SHARE * gpu.operations)
    )


def tokens_per_s(model: Model, gpu: Gpu) -> float:
    """Output tokens a second of a full replica, one token a pass."""
    rows = batch(model, gpu)
    return rows / step_s(model, gpu, rows) if rows else 0.0


def table() -> str:
    """The table, in Markdown."""
    lines = [
        f"| model | GPU | pages of {PAGE} | batch | step, ms | tokens/s a replica | "
        f"replicas for {LOAD:,} tokens/s |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [_row(model, gpu) for model in MODELS for gpu in GPUS]
    return "\n".join(lines) + "\n"


def _row(model: Model, gpu: Gpu) -> str:
    rows, pages, speed = batch(model, gpu), num_pages(model, gpu), tokens_per_s(model, gpu)
    if rows < 1:
        return f"| {model.name} | {gpu.name} | does not fit | | | | |"
    replicas = ceil(LOAD / (UTILIZATION * speed))
    milliseconds = 1000 * step_s(model, gpu, rows)
    return (
        f"| {model.name} | {gpu.name} | {pages:,} | {rows} | {milliseconds:.1f} | "
        f"{speed:,.0f} | {replicas} |"
    )
