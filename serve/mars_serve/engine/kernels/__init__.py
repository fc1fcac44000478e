"""Kernels of the engine's own, each an operator of torch with a twin in plain torch beside it.

Modules whose name ends in ``_triton`` import Triton, which only CUDA builds of torch bring along.
"""
