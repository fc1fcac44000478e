"""Merged layers give the hidden states of transformers' own, and free what they replace."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.engine_requests import make_request, make_row
from decoding.engines import paged_attention
from decoding.tiny_models import build_model
from mars_serve.engine.batch import build_batch
from mars_serve.engine.decoder.decoder import (
    MergedDecoder,
    merge_layers,
    why_unmerged,
)
from mars_serve.engine.decoder.rotation import settle_rotation

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
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


def randomized(model: PreTrainedModel) -> PreTrainedModel:
    """The model with norms and biases that change what they are applied to."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight += 0.3 * torch.randn_like(weight)
    return model


@torch.inference_mode()
def hidden_states(model: PreTrainedModel, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Hidden states of a prompt by transformers, and by merged layers in two steps."""
    tokens = [4 + (7 * index) % 60 for index in range(num_tokens)]
    settle_rotation(model)
    expected = model.base_model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    merged = copy.deepcopy(model)
    attention = paged_attention(merged, num_pages=40, page_size=4)
    merge_layers(merged, attention)
    decoder = MergedDecoder(merged)
    request = make_request("one", tokens, pages=list(range(40)))
    found = []
    for count in (num_tokens // 3, num_tokens - num_tokens // 3):
        row = make_row(request, count, (0,), reads_logits=False)
        batch = build_batch([row], None)
        ids, position_ids = torch.tensor(batch.ids), torch.tensor(batch.position_ids)
        hidden = decoder(ids, position_ids, attention.prepare(batch))
        found.append(hidden[: batch.num_positions])
        request.num_cached += count
    return expected, torch.cat(found)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_equal_transformers(family: str, kind: str) -> None:
    model = randomized(build_model(family, initializer_range=0.1, **rope(kind)))
    assert why_unmerged(model) is None
    expected, found = hidden_states(model, 60)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("original", "num_tokens"), [(32, 60), (256, 60)])
@torch.inference_mode()
def test_longrope_settles_for_the_angles_of_the_models_longest_text(
    original: int, num_tokens: int
) -> None:
    """Transformers takes the long angles for 60 tokens if the model was first trained on 32."""
    words = rope("longrope")
    words["rope_parameters"]["original_max_position_embeddings"] = original
    model = build_model("llama", **words)
    ids = torch.arange(4, 4 + num_tokens)[None]
    expected = model(ids).logits
    settled = copy.deepcopy(model)
    settle_rotation(settled)
    settled(ids[:, :3])
    torch.testing.assert_close(settled(ids).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 4}),
        ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16, "attention_bias": True}),
        ("mistral", {"head_dim": 16, "sliding_window": None}),
    ],
)
def test_shapes_and_biases_equal_transformers(family: str, changes: dict[str, Any]) -> None:
    model = randomized(build_model(family, initializer_range=0.1, **changes))
    expected, found = hidden_states(model, 40)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_replaced_weights_are_freed() -> None:
    model = build_model("qwen2")
    replaced = [
        weakref.ref(weight)
        for name, weight in model.named_parameters()
        if any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
    ]
    count = sum(weight.numel() for weight in model.parameters())
    merge_layers(model, paged_attention(model, num_pages=4, page_size=4))
    gc.collect()
    assert len(replaced) == 16
    assert all(each() is None for each in replaced)
    assert sum(weight.numel() for weight in model.parameters()) == count


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("olmo2", {}, "family olmo2"),
        ("llama", {"hidden_act": "gelu"}, "gelu, not silu"),
    ],
)
def test_other_models_keep_their_layers(family: str, changes: dict[str, Any], words: str) -> None:
    model = build_model(family, pad_token_id=0, **changes)
    assert words in (why_unmerged(model) or "")
