"""Families whose layers attend each in a way of their own, in packed rows of both streams."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import mars_train.method.attention as attention_module
from decoding.families import HYBRIDS, build_family
from decoding.tiny_models import build_model
from mars_platform.method.rules import oldest_visible
from mars_platform.mixing.bind import AttentionCall, read_call
from mars_platform.mixing.head import layers_of
from mars_platform.mixing.probe import Probe
from mars_train.method import trees
from mars_train.method.attention import FLEX_MULTIPLE
from mars_train.method.layout import PADDING_DOCUMENT, collate
from mars_train.method.objective import Objective
from packed import MASK, PAD, checkpoint_layers
from plain_paths import LENGTHS, expected_losses, layouts, losses, packed_rows
from routing import routed_experts

WINDOW = 6  # more than a block, and less than a document
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {**SLIDING, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": SLIDING,
    "gemma4_text": {
        **SLIDING,
        "layer_types": [*SLIDING["layer_types"], *SLIDING["layer_types"]],
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
    },
    "gpt_oss": {**SLIDING, **EXPERTS},
    "cohere2": {**SLIDING, "logit_scale": 0.3},
    "olmo3": SLIDING,
    "llama4_text": {
        **EXPERTS,
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "floor_scale": 4,
        "attn_scale": 1.0,
        "intermediate_size_mlp": 64,
    },
    "mimo_v2_flash": {**SLIDING, **EXPERTS, "v_head_dim": 4},
}


def build(family: str) -> PreTrainedModel:
    if family in HYBRIDS:
        return build_family(family)
    model = build_model(family, pad_token_id=PAD, **FAMILIES[family])
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_each_slot_is_as_in_a_pass_over_its_path(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "_CHUNK", 8)  # so that texts have several
    monkeypatch.setattr(trees, "_CHANNEL_CHUNK", 4)
    model, batch = build(family), packed_rows(MASK)
    expected = expected_losses(model, batch)
    Probe.of(copy.deepcopy(model), avoided={MASK})
    objective = Objective(model, masked=True)
    torch.testing.assert_close(losses(objective, batch), expected, rtol=1e-4, atol=1e-4)
    alone = collate([[layout] for layout in layouts(MASK)], PAD)
    torch.testing.assert_close(losses(objective, alone), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["kimi_linear", "nemotron_h"])
@pytest.mark.filterwarnings("ignore")  # torch's own warnings
def test_recomputed_and_compiled_states_have_the_same_gradients(family: str) -> None:
    model, batch = build(family).train(), packed_rows(MASK)

    def gradients() -> list[Tensor]:
        sums = Objective(model, masked=True)(batch)
        return list(torch.autograd.grad(sums.clean + sums.noisy, list(model.parameters())))

    expected = gradients()
    assert all(each.any() for each in expected)
    checkpoint_layers(model)
    torch.testing.assert_close(gradients(), expected)
    for layer in layers_of(model):
        layer.compile(backend="eager", dynamic=True)
    torch.testing.assert_close(gradients(), expected)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_masks_change_no_tokens_experts(family: str) -> None:
    """Tokens of packed rows go to the experts of a plain pass over their document."""
    model = build_model(family, pad_token_id=PAD, num_experts=4, **EXPERTS)
    batch = packed_rows(MASK)
    with routed_experts(model) as chosen:
        losses(Objective(model, masked=True), batch)
        beside = torch.stack(chosen, dim=1)[: batch.tokens.numel()]
    is_token = (~batch.noisy & (batch.documents != PADDING_DOCUMENT)).flatten()
    assert int((batch.tokens == MASK).sum()) > 20
    with routed_experts(model) as chosen:
        alone = []
        for document in range(len(LENGTHS)):
            chosen.clear()
            tokens = batch.tokens.flatten()[is_token & (batch.documents == document).flatten()]
            model(tokens[None], use_cache=False)
            alone.append(torch.stack(chosen, dim=1))
    assert beside[is_token].equal(torch.cat(alone))
    expected = expected_losses(model, batch)
    torch.testing.assert_close(losses(Objective(model, masked=True), batch), expected)


@pytest.mark.parametrize("family", ["gemma2", "gemma4_text", "llama4_text", "mimo_v2_flash"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_the_same_losses(family: str) -> None:
    model, batch = build(family), packed_rows(MASK, FLEX_MULTIPLE)
    expected = losses(Objective(model, masked=True), batch)
    ours = losses(Objective(model, masked=True, attention="flex"), batch)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def wider(position: Tensor, window: int | None, chunk: int | None) -> Tensor | None:
    return oldest_visible(position, window and window + 1, chunk and chunk + 1)


def without(*fields: str) -> Callable[..., AttentionCall]:
    def read(*given: Any, **others: Any) -> AttentionCall:
        return read_call(*given, **others)._replace(**dict.fromkeys(fields))

    return read


MUTANTS = {
    "window off by one": ("gemma3_text", "oldest_visible", wider),
    "chunk off by one": ("llama4_text", "oldest_visible", wider),
    "no sinks": ("gpt_oss", "read_call", without("sinks")),
    "no cap": ("gemma2", "read_call", without("softcap")),
    "scaled by place": ("llama4_text", "read_call", without("temperature")),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_losses_show_what_a_layer_leaves_out(
    mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, name, changed = MUTANTS[mutant]
    model, batch = build(family), packed_rows(MASK)
    expected = expected_losses(model, batch)
    monkeypatch.setattr(attention_module, name, changed)
    difference = (losses(Objective(model, masked=True), batch) - expected).abs().max()
    assert difference > 1e-2
