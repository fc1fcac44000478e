"""Estimates, from published figures, the speed of a replica of a model on a GPU.

Nothing here is measured. ``marsray calibrate`` measures the same on real hardware, and the
autoscaler uses those measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from mars_autoscale.policy.settings import OuterSettings
from mars_serve.engine.settings import EngineSettings

CONTEXT = 2048
"""Cached tokens of a request on average: its prompt and half of its output."""
PAGE = EngineSettings().page_size_on("cuda")
"""Tokens in a page of the KV cache."""
MEMORY_FRACTION = EngineSettings().memory_fraction
"""Share of the memory left by the weights that the KV cache takes."""
CUDA_BYTES = 1.5e9
"""Memory of the driver, the kernels and the captured graphs."""
BANDWIDTH_SHARE, ARITHMETIC_SHARE = 0.65, 0.45
"""Shares of the published peaks that a step reaches."""
STEP_OVERHEAD_S = 0.002
"""Seconds that a step takes beside reading memory and computing."""
UTILIZATION = OuterSettings().utilization
"""Share of a replica's speed that the mean load may take."""
LOAD = 10_000
"""Output tokens a second that the table counts replicas for."""
MOST_REQUESTS = 64
"""Largest batch in the table, also if memory holds more."""


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
        """Bytes of all weights."""
        return 2 * self.parameters

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * 2 * self.layers * self.key_value_heads * self.head_size


@dataclass(frozen=True)
class Gpu:
    """A GPU with its published figures."""

    name: str
    memory: float
    """Bytes of memory."""
    bandwidth: float
    """Bytes of memory that are read a second."""
    operations: float
    """Dense bfloat16 operations a second."""


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
    """Return the number of pages in the KV cache; 0 if the weights do not fit."""
    left = gpu.memory - CUDA_BYTES - model.weight_bytes
    return max(0, int(MEMORY_FRACTION * left / (PAGE * model.token_bytes)))


def batch(model: Model, gpu: Gpu) -> int:
    """Return the number of requests that run at once."""
    return min(MOST_REQUESTS, num_pages(model, gpu) * PAGE // CONTEXT)


def step_s(model: Model, gpu: Gpu, rows: int) -> float:
    """Return the seconds of a step that decodes one token for each row.

    The step reads all weights and the rows' cached tokens.
    """
    read = model.weight_bytes + rows * CONTEXT * model.token_bytes
    computed = 2 * model.parameters * rows
    return STEP_OVERHEAD_S + max(
        read / (BANDWIDTH_SHARE * gpu.bandwidth), computed / (ARITHMETIC_SHARE * gpu.operations)
    )


def tokens_per_s(model: Model, gpu: Gpu) -> float:
    """Return the output tokens a second of a replica with a full batch, one token a pass."""
    rows = batch(model, gpu)
    return rows / step_s(model, gpu, rows) if rows else 0.0


def table() -> str:
    """Return the table, in Markdown."""
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
