"""Random models so small that a test's forward passes take milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

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


ABSENT = object()
"""Value of a field that is not given, such as one that a family computes."""


def tiny_config(family: str = "qwen2", **changes: Any) -> PreTrainedConfig:
    """Return a family's config with changes to `SIZES` and any further field."""
    sizes = {**SIZES, **changes}
    sizes.setdefault("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
    given = {name: value for name, value in sizes.items() if value is not ABSENT}
    return AutoConfig.for_model(family, **given)


def build_model(family: str = "qwen2", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build a model of a family, with changes to its config; see `tiny_config`."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(family, **changes)).eval()
