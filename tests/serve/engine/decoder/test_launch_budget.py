"""A captured step keeps a budget of launches, at the sizes of real models.

Nothing is computed: the tensors have shapes only.
"""

from __future__ import annotations

from typing import Any

import pytest

from decoding.families import HYBRIDS, family_config
from decoding.launches import captured_launches, launches_of

LAYER_BUDGET, NORMED_HEADS, OUTSIDE_BUDGET = 42, 16, 24
"""Launches of a layer, those of its norms of queries and keys, and of all else."""
ADAPTER_LAUNCHES = 14
"""Launches of an adapter in a layer: two for each of the seven products."""
SIZES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7B": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "70B": {
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}


@pytest.mark.parametrize("num_positions", [1, 256])
@pytest.mark.parametrize(
    ("family", "size"), [("qwen2", "0.5B"), ("qwen3", "7B"), ("mistral", "7B"), ("llama", "70B")]
)
def test_a_step_keeps_its_budget_of_launches(family: str, size: str, num_positions: int) -> None:
    few, many = (
        captured_launches(family, SIZES[size], count, num_positions)[0].total() for count in (1, 2)
    )
    a_layer = many - few
    assert 0 < a_layer <= LAYER_BUDGET + NORMED_HEADS * (family == "qwen3")
    assert 0 < few - a_layer <= OUTSIDE_BUDGET


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_an_adapter_costs_launches_only_where_there_are_masks(family: str) -> None:
    found = {
        count: (
            captured_launches(family, SIZES["7B"], count, 32)[0],
            *captured_launches(family, SIZES["7B"], count, 32, adapter=True),
        )
        for count in (1, 2)
    }
    assert all(alone == without_masks for alone, without_masks, _ in found.values())
    alone, _, with_masks = (found[2][i].total() - found[1][i].total() for i in range(3))
    assert with_masks == alone + ADAPTER_LAUNCHES


@pytest.mark.parametrize("family", HYBRIDS)
def test_steps_with_states_are_captured(family: str) -> None:
    """The host cannot wait for tensors without numbers, nor may it in a capture."""
    launches, _ = launches_of(family_config(family, logits_scaling=1.0, logit_scale=1.0), 8)
    num_states = launches["marsray.scan.default"], launches["marsray.convolve.default"]
    assert num_states[0] >= 2 or family == "lfm2"
    assert num_states[1] >= 2
