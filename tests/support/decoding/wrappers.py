"""Tiny random multimodal models: a decoder beside a tower for images."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedModel

from decoding.families import MIXED
from decoding.tiny_models import SIZES

_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
}
_WRAPPERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {}, {"mm_tokens_per_image": 4}),
    "gemma4": ("gemma4_text", {"position_embedding_size": 8}, {"audio_config": None}),
    "llama4": (
        "llama4_text",
        {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        {},
    ),
    "mistral3": ("mistral", {"model_type": "pixtral"}, {"spatial_merge_size": 1}),
}
WRAPPERS = sorted(_WRAPPERS)
"""Families of multimodal models whose text part is tested."""


def build_wrapper(family: str, **changes: Any) -> PreTrainedModel:
    """Build a tiny multimodal model, with further changes to the config of its text part."""
    text_family, vision, others = _WRAPPERS[family]
    text = {
        **SIZES,
        "head_dim": 8,
        "pad_token_id": 0,
        "num_experts_per_tok": 1,
        "num_local_experts": 4,
        **MIXED[text_family],
        **changes,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        text_config={"model_type": text_family, **text},
        vision_config={**_VISION, **vision},
        image_token_id=4,
        **others,
    )
    model = AutoModelForMultimodalLM.from_config(config).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):  # Gemma 4's, which scales a layer's output
            buffer.fill_(0.75)
    return model
