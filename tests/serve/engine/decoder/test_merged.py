"""Merged layers are taken where they compute what transformers' own layers do, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from decoding.families import build_family
from mars_platform.mixing.bind import ATTENTION_NAME, AttentionCall, bound
from mars_platform.mixing.head import decoder_of, layers_of
from mars_serve.engine.decoder.adapter import adapt_layers, step_adapters
from mars_serve.engine.decoder.merged import (
    MergedDecoder,
    MergedLayer,
    decoder_for_steps,
    merge_layers,
)
from mars_serve.engine.decoder.native import NativeLayer
from mars_serve.engine.kernels.native import Native, native_for

USUAL: list[tuple[str, dict[str, Any], type]] = [
    ("exaone", {}, NativeLayer),
    ("gemma", {}, MergedLayer),  # has another activation
    ("gemma", {"hidden_activation": "silu", "hidden_act": "silu"}, NativeLayer),  # norms add 1
    ("granite", {}, NativeLayer),
    ("llama", {"attention_bias": True}, NativeLayer),
    ("mistral", {}, NativeLayer),
    ("olmo", {}, MergedLayer),  # has other norms
    ("qwen3", {}, NativeLayer),  # norms heads
    (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8},
        NativeLayer,
    ),
]
OTHERS: dict[str, dict[str, Any]] = {
    "ernie4_5": {},  # rotates neighbouring numbers of a head
    "gemma2": {},  # has further norms
    "glm4_moe": {},  # rotates a part of a head
    "granite": {"residual_multiplier": 0.7},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
        }
    },  # scales queries from a position on
    "mixtral": {},
    "olmo": {"clip_qkv": 6.0},
    "starcoder2": {},
}


class Causal:
    def attend(self, call: AttentionCall) -> Tensor:
        dtype = call.value.dtype
        parts = call.query.to(dtype), call.key.to(dtype), call.value
        attended = F.scaled_dot_product_attention(
            *parts, is_causal=True, scale=call.scaling, enable_gqa=True
        )
        return attended.transpose(1, 2)


def hidden(model: PreTrainedModel) -> Tensor:
    with bound(Causal()), torch.inference_mode():
        ids = torch.arange(4, 28)[None]
        output: Tensor = decoder_of(model)(input_ids=ids, use_cache=False)[0]
    return output


def built(family: str, dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
    model = build_family(family, **changes).to(dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    return model


def native_of(model: PreTrainedModel) -> Native:
    native = native_for(model.device, model.dtype)
    assert native is not None
    return native


def check_merging(model: PreTrainedModel, native: Native | None, kind: type) -> None:
    own = hidden(model)

    assert merge_layers(model, native) == len(layers_of(model))

    assert all(isinstance(layer, kind) for layer in layers_of(model))
    difference = (hidden(model) - own).abs().mean() / own.abs().mean()
    assert difference < (1e-5 if model.dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "changes", "kind"), USUAL)
def test_usual_layers_are_merged_and_give_the_same(
    family: str, changes: dict[str, Any], kind: type, dtype: torch.dtype
) -> None:
    check_merging(built(family, dtype, **changes), None, MergedLayer)

    model = built(family, dtype, **changes)
    check_merging(model, native_of(model), kind)


@pytest.mark.parametrize(
    ("family", "changes", "is_merged"),
    [
        ("llama", {}, True),
        ("qwen3", {}, True),
        ("granite", {"embedding_multiplier": 3.0}, False),
        ("gemma2", {}, False),
    ],
)
def test_a_decoder_is_merged_where_that_computes_the_same_bit_for_bit(
    family: str, changes: dict[str, Any], is_merged: bool
) -> None:
    model = built(family, torch.bfloat16, **changes)
    merge_layers(model, native_of(model))

    decoder = decoder_for_steps(model)

    assert isinstance(decoder, MergedDecoder) == is_merged
    step = {"input_ids": torch.arange(4, 28)[None], "position_ids": torch.arange(3, 27)[None]}
    with bound(Causal()), torch.inference_mode():
        own = decoder_of(model)(**step, use_cache=False)[0]
        assert torch.equal(decoder(**step, use_cache=False)[0], own)


def test_functions_of_cpp_rotate_by_numbers_of_the_models_own_type_only() -> None:
    model = built("qwen3", torch.bfloat16)
    decoder_of(model).rotary_emb.register_forward_hook(
        lambda _module, _inputs, rotation: tuple(part.float() for part in rotation)
    )
    check_merging(model, native_of(model), MergedLayer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", OTHERS)
def test_other_layers_stay(family: str, dtype: torch.dtype) -> None:
    model = built(family, dtype, **OTHERS[family])
    before = list(layers_of(model))

    assert merge_layers(model) == 0

    assert list(layers_of(model)) == before


def test_layers_that_rotate_nothing_stay_beside_merged_ones() -> None:
    model = built("smollm3", torch.bfloat16, no_rope_layers=[1, 0])

    assert merge_layers(model) == 1

    assert [isinstance(layer, MergedLayer) for layer in layers_of(model)] == [True, False]


@pytest.mark.parametrize("is_native", [False, True])
def test_layers_of_which_some_projections_have_slots_are_merged_with_them(is_native: bool) -> None:
    model = built("qwen2", torch.float32)
    adapt_layers(model, is_fixed=False, num_slots=1, rank=2)
    adapters = step_adapters(model)
    assert adapters is not None
    with torch.inference_mode():
        for name, layer in adapters.layers.items():
            if name.endswith(("q_proj", "down_proj")):
                down, up = torch.randn(2, layer.in_features), torch.randn(layer.out_features, 2)
                layer.load(0, (down, up), 1.0)
    slots = torch.arange(24) % 2 - 1  # every other position has none
    adapters.set(None, slots)
    own = hidden(model)
    adapters.set(None, None)

    native = native_of(model) if is_native else None
    assert merge_layers(model, native) == len(layers_of(model))

    adapters.set(None, slots)
    torch.testing.assert_close(hidden(model), own, atol=1e-5, rtol=1e-5)
    adapters.set(None, None)
    assert not torch.allclose(hidden(model), own, atol=1e-2)
