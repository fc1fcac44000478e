"""The families of models that are tested, tiny random models of them, and their table."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from decoding.tiny_models import build_model

_KNOWN = """
arcee cohere ernie4_5 exaone gemma glm4 glm4_moe gpt2 gpt_neox granite hunyuan_v1_dense llama
ministral3 mistral mixtral nemotron olmo2 olmoe opt phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe
seed_oss smollm3 starcoder2
"""
_OTHERS = """
apertus aria_text biogpt bitnet codegen dots1 ernie4_5_moe flex_olmo glm gptj granitemoe
granitemoeshared helium hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 mellum
minimax_m2 olmo persimmon phimoe sarvam_moe solar_open stablelm
"""
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,  # numbers that are rotated
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
MIXED: dict[str, dict[str, Any]] = {
    "cohere2": _SLIDING,
    "gemma2": {**_SLIDING, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0},
    "gemma3_text": _SLIDING,
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": [*_SLIDING["layer_types"], *_SLIDING["layer_types"]],
        "num_kv_shared_layers": 2,
        "sliding_window": 8,
        "head_dim": 8,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "num_experts": None,
    },
    "gpt_oss": _SLIDING,
    "llama4_text": {
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "floor_scale": 4,
        "attn_scale": 0.5,
        "intermediate_size_mlp": 64,
    },
    "mimo_v2_flash": {**_SLIDING, "v_head_dim": 6, "layer_types": _SLIDING["layer_types"][::-1]},
    "mistral": {"sliding_window": 8},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), LATENT),
}
"""Families whose layers attend in other ways, with settings by which that shows in short texts."""
_MORE = {**dict.fromkeys(("exaone4", "olmo3"), _SLIDING)}
KNOWN = sorted({*_KNOWN.split(), *MIXED})
OTHERS = [*_OTHERS.split(), *_MORE]
"""Families that every run tests, and those that the full run adds."""

_UNGROUPED = ("biogpt", "codegen", "gpt2", "gpt_neox", "gptj", "opt", "persimmon")
"""Families in which each query head has a key/value head of its own."""
_SETTINGS = {  # each family takes its own ones and leaves the others alone
    "pad_token_id": 0,
    "sliding_window": None,
    "logits_scaling": 8.0,
    "logit_scale": 0.5,
    "rotary_dim": 8,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
}


def build_family(family: str, **changes: Any) -> PreTrainedModel:
    """Build a tiny random model of a tested family, with further changes to its config."""
    heads = {"num_key_value_heads": 4} if family in _UNGROUPED else {}
    own = MIXED.get(family, _MORE.get(family, {}))
    model = build_model(family, **{**_SETTINGS, **heads, **own, **changes})
    model.set_attn_implementation("eager")  # the only one of transformers' that caps scores
    return model


def family_table() -> list[str]:
    """Return the lines of the documentation's table of families."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    rows = [f"| `{family}` | `{names[family]}` |" for family in sorted([*KNOWN, *OTHERS])]
    return ["| `model_type` | class in transformers |", "| --- | --- |", *rows]
