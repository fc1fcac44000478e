"""Rotation that does not depend on the rows of a step is that of transformers for long texts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from decoding.tiny_models import build_model
from mars_serve.engine.decoder.rotation import settle_rotation

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "dynamic": {"factor": 2.0},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def rope(kind: str) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **ROPES[kind]}}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("original", [32, 256])
@torch.inference_mode()
def test_the_angles_of_a_short_text_are_those_of_the_models_longest(
    kind: str, original: int
) -> None:
    """With longrope, 60 tokens have long angles if the model was first trained on 32."""
    words = rope(kind)
    if "original_max_position_embeddings" in words["rope_parameters"]:
        words["rope_parameters"]["original_max_position_embeddings"] = original
    model = build_model("llama", initializer_range=0.1, **words)
    ids = torch.arange(4, 64)[None]
    expected = model(ids).logits
    settled = copy.deepcopy(model)
    settle_rotation(settled)
    settled(ids[:, :3])
    torch.testing.assert_close(settled(ids).logits, expected, rtol=1e-5, atol=1e-5)
