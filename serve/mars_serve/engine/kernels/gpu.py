"""Adds the Triton kernels to the operators, for GPUs. Importing this module needs Triton."""

from mars_serve.engine.kernels import (
    acceptance_triton,
    adapter_triton,
    attention_triton,
    recurrence_triton,
)

__all__ = ["acceptance_triton", "adapter_triton", "attention_triton", "recurrence_triton"]
