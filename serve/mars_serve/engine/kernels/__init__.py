"""Operators of a step as Triton kernels for GPUs, each with a twin in plain torch."""
