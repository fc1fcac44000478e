"""Tiny random models of the families that transformers has."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from decoding.tiny_models import ABSENT, SIZES, tiny_config

_KNOWN = """
arcee cohere ernie4_5 exaone gemma glm4 glm4_moe gpt2 gpt_neox granite hunyuan_v1_dense llama
ministral3 mistral mixtral nemotron olmo2 olmoe opt phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe
seed_oss smollm3 starcoder2
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
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
_MAMBA = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _DELTA),
    "bamba": {**_MAMBA, "layer_types": ABSENT, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention", "mamba"]},
    "kimi_linear": {
        **LATENT,
        "num_hidden_layers": 3,
        "layer_types": _DELTA["layer_types"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "q_lora_rank": None,
    },
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "nemotron_h": {
        "num_hidden_layers": ABSENT,
        "layers_block_type": ["mamba", "attention", "moe", "mamba"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 32,
        "moe_latent_size": None,
    },
}
"""Families that have layers with states or convolutions beside attention."""
_MORE = {**dict.fromkeys(("exaone4", "olmo3"), _SLIDING)}
KNOWN = sorted({*_KNOWN.split(), *MIXED, *HYBRIDS})
"""Families whose outputs are compared with those of transformers' own loop in every run."""

_UNGROUPED = """
axk1 axk2 bailing_hybrid biogpt codegen deepseek_v32 dots3_note_text glm_moe_dsa gpt2 gpt_neox gptj
hy_v4 kimi_linear longcat_flash minicpm3 opt persimmon sarvam_mla youtu
"""
"""Families in which each query head has a key/value head of its own."""
_HYBRID = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid"] * 2}
_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_UNGROUPED.split(), LATENT),
    **MIXED,
    **_MORE,
    **HYBRIDS,
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_theta": 10_000.0}}},
    "dbrx": {
        "attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 64},
    },
    "deepseek_v4": {
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    },
    "dots3_note_text": {**LATENT, "sliding_window": None},
    "gemma3n_text": {
        **MIXED["gemma4_text"],
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": None,
        "intermediate_size": 64,
    },
    "gemma4_assistant_text": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1},
    "minicpm3": {**LATENT, "logits_scaling": ABSENT},
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse", "full_attention"]},
    "moshi": {"audio_encoder_config": ABSENT, "depth_decoder_config": ABSENT},
    "prophetnet": {"num_hidden_layers": ABSENT, "num_encoder_layers": 2, "num_decoder_layers": 2},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16]},
    "xlnet": {"max_position_embeddings": ABSENT, "d_head": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": _HYBRID,
    "zamba2": _HYBRID,
    "zaya": {"num_experts_per_tok": 1},
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "max_position_embeddings": 64,
}
"""Sizes of what makes inputs of pictures and sounds."""
_SETTINGS = {  # each family takes its own ones and leaves the others alone
    "pad_token_id": 0,
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
    "is_decoder": True,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}


def family_config(family: str, window: int | None = None, **changes: Any) -> PreTrainedConfig:
    """Return the config of a tiny model of any family, with further changes.

    Layers with windows have ``window`` where the family's own settings here do not say another.
    """
    common = {**_SETTINGS, "sliding_window": window}
    names = getattr(CONFIG_MAPPING[family], "sub_configs_defaults", {})
    text = {**SIZES, "head_dim": 8, **common, **_OWN.get(f"{family}_text", {})}
    parts = {name: text if name == "text_config" else _TOWER for name in names}
    own = {**common, **parts, **_OWN.get(family, {}), **changes}
    try:
        config = tiny_config(family, **own)
    except AttributeError:
        config = tiny_config(family, **own, head_dim=ABSENT)
    kinds = getattr(config, "layer_types", None) or ()
    if "layer_types" not in own and "sliding_attention" in kinds and len(set(kinds)) == 1:
        own["layer_types"] = _SLIDING["layer_types"]
        config = tiny_config(family, **own)
    return config


def build_family(family: str, **changes: Any) -> PreTrainedModel:
    """Build a tiny random model of any family, with further changes to its config."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(family, **changes)).eval()
    model.set_attn_implementation("eager")  # the only one of transformers' that caps scores
    return model
