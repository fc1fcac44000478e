"""Loads a served model's engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import torch

from mars_platform.errors import UserError
from mars_serve.config.served import read_served, with_dtype
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.engine import Engine
from mars_serve.engine.kernels.native import native_for


def load_engine(settings: ModelSettings) -> Engine:
    """Load a model into an engine of its own.

    A replica with a part of a GPU allocates no more than that part of its memory.
    """
    if settings.num_gpus:
        torch.cuda.set_per_process_memory_fraction(settings.num_gpus)
    with within_memory(settings):
        return _load(settings)


@contextmanager
def within_memory(settings: ModelSettings) -> Iterator[None]:
    """Turn the lack of a GPU's memory within the block into an error that says what there is."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(_describe_memory(settings)) from error


def _describe_memory(settings: ModelSettings) -> str:
    free, total = torch.cuda.mem_get_info()
    part, held = settings.num_gpus * total, torch.cuda.memory_allocated()
    return (
        f"models: {settings.name} does not fit into {settings.num_gpus:g} of a GPU, which is "
        f"{part / 2**30:.1f} of its {total / 2**30:.1f} GiB: {held / 2**30:.1f} GiB are allocated "
        f"here, and {free / 2**30:.1f} GiB of the GPU are free; give it a larger GPU or part of "
        "one (num_gpus), a smaller dtype, or lower engine.memory_fraction, engine.max_num_seqs or "
        "engine.max_num_batched_tokens"
    )


def _load(settings: ModelSettings) -> Engine:
    settings = with_dtype(settings)
    dtype = getattr(torch, settings.dtype)
    device = "cuda" if settings.num_gpus else "cpu"
    if not settings.engine.batch_invariant:
        # It may compile for seconds. The engine waits for it, and an error does not.
        Thread(target=native_for, args=(torch.device(device), dtype), daemon=True).start()
    return Engine(read_served(settings), settings.engine, dtype=dtype, device=device)
