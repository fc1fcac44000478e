"""Tiny models with adapters of random weights."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from mars_platform.checkpoint.adapter.draft_head import attach_draft_head
from mars_platform.checkpoint.adapter.files import identify_base, save_adapter
from mars_platform.checkpoint.adapter.layers import adapter_parameters, attach_adapter
from mars_platform.checkpoint.adapter.settings import AdapterMetadata, AdapterSettings
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.metadata import DraftHeadSettings
from mars_platform.checkpoint.tokenizer import name_mask_token
from mars_platform.checkpoint.weights import load_model


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


def with_lora(
    model: PreTrainedModel,
    path: Path,
    *,
    rank: int = 4,
    target_modules: list[str] | None = None,
    seed: int = 1,
) -> PreTrainedModel:
    """Write a LoRA adapter of random weights by peft, and return the model merged with it."""
    names = target_modules or ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of peft's use of transformers
        adapted = get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    adapted.save_pretrained(path)
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged.requires_grad_(False).eval()


def add_mask_row(base_path: Path, path: Path, row: torch.Tensor) -> int:
    """Make a LoRA adapter's directory one with a mask row of its own; return the mask's id."""
    base = read_checkpoint(base_path)
    identity = identify_base(base.path, base.tokenizer, str(base_path))
    mask, _ = name_mask_token(base.tokenizer)
    metadata = AdapterMetadata(block_size=4, mask_token_id=mask, base=identity, scope="all")
    (path / "mars.json").write_text(metadata.model_dump_json())
    base.tokenizer.save_pretrained(path)
    config = json.loads((path / "adapter_config.json").read_text())
    config["trainable_token_indices"] = {"embed_tokens": [mask]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    file = path / "adapter_model.safetensors"
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    save_file({**load_file(file), name: row[None]}, file)
    return mask


def with_random_head(
    model: PreTrainedModel, settings: DraftHeadSettings, *, seed: int = 1
) -> PreTrainedModel:
    """Give a model, in place, a draft head of random weights, which change every draft."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in attach_draft_head(model, settings).parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return model
