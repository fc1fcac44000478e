"""Tiny models with adapters of random weights."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

from mars_platform.checkpoint.adapter.layers import adapter_parameters, attach_adapter
from mars_platform.checkpoint.adapter.settings import AdapterSettings


def with_adapter(
    model: PreTrainedModel,
    mask: int = 3,
    *,
    rank: int = 4,
    target_modules: list[str] | None = None,
    std: float = 0.3,
) -> PreTrainedModel:
    """Return a copy of a model with an adapter that changes what masks propose."""
    adapted = copy.deepcopy(model)
    settings = AdapterSettings(rank=rank, target_modules=target_modules)
    attach_adapter(adapted, settings, mask)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in adapter_parameters(adapted).values():
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    return adapted.requires_grad_(False).eval()
