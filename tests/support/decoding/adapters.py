"""Tiny models with adapters of random weights."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import PreTrainedModel

from mars_platform.checkpoint.adapter.files import identify_base, save_adapter
from mars_platform.checkpoint.adapter.layers import adapter_parameters, attach_adapter
from mars_platform.checkpoint.adapter.settings import AdapterMetadata, AdapterSettings
from mars_platform.checkpoint.directory import load_model, read_checkpoint
from mars_platform.checkpoint.tokenizer import name_mask_token


def with_adapter(
    model: PreTrainedModel,
    mask: int = 3,
    *,
    rank: int = 4,
    target_modules: list[str] | None = None,
    std: float = 0.3,
    seed: int = 1,
) -> PreTrainedModel:
    """Return a copy of a model with an adapter that changes what masks propose."""
    adapted = copy.deepcopy(model)
    settings = AdapterSettings(rank=rank, target_modules=target_modules)
    attach_adapter(adapted, settings, mask)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in adapter_parameters(adapted).values():
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    return adapted.requires_grad_(False).eval()


def write_adapter(base_path: Path, path: Path, *, seed: int = 1) -> Path:
    """Write the directory of an adapter, with a block size of 4, for a checkpoint."""
    base = read_checkpoint(base_path)
    identity = identify_base(base.path, base.tokenizer, str(base_path))
    mask, _ = name_mask_token(base.tokenizer)
    path.mkdir()
    metadata = AdapterMetadata(block_size=4, mask_token_id=mask, base=identity)
    adapted = with_adapter(load_model(base_path), mask, seed=seed)
    save_adapter(path, adapted, base.tokenizer, metadata)
    return path
