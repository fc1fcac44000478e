"""From a served model's settings to its engine, with a drafting one where that is asked for."""

from __future__ import annotations

import torch

from mars_platform.checkpoint import read_checkpoint
from mars_serve.engine.drafter import Drafter, drafting_checkpoint
from mars_serve.engine.engine import Engine
from mars_serve.settings import ModelSettings

_DRAFT_MEMORY = 0.1
"""Share of a GPU's memory fraction that the drafting model's pages take: they are far smaller."""


def load_engine(settings: ModelSettings) -> Engine:
    """Load a model, and the one that drafts for it.

    Raises:
        UserError: a checkpoint cannot be read or served, or the two do not fit together.
    """
    checkpoint, drafter = read_checkpoint(settings.path), None
    dtype = getattr(torch, settings.dtype)
    device = "cuda" if settings.num_gpus else "cpu"
    if settings.draft is not None:
        sizes = settings.engine.model_copy(
            update={
                "reuse_prefixes": False,
                "memory_fraction": settings.engine.memory_fraction * _DRAFT_MEMORY,
            }
        )
        draft = drafting_checkpoint(read_checkpoint(settings.draft.path), checkpoint)
        drafter = Drafter(
            Engine(draft, sizes, dtype=dtype, device=device),
            settings.draft.num_tokens,
            settings.draft.confidence_threshold,
        )
    return Engine(checkpoint, settings.engine, dtype=dtype, device=device, drafter=drafter)
