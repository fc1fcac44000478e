"""Random models so small that a test's forward passes take milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # spreads the logits: confidences vary
}


def build_model(family: str = "qwen2", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build a model of a family, with changes to `SIZES` and any further field of its config."""
    sizes = {**SIZES, **changes}
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{"head_dim": head_dim, **sizes})
    return AutoModelForCausalLM.from_config(config).eval()
