"""Compares what the probe sees of tiny models of many families, and what it refuses."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoding.families import LATENT
from decoding.tiny_models import build_model
from mars_platform.errors import UserError
from mars_platform.mixing import probe as probe_module
from mars_platform.mixing.head import Head, decoder_of, drop_towers
from mars_platform.mixing.probe import Probe, record

SLIDING = ["sliding_attention", "full_attention"]
PLAIN = {"heads": 4, "kv_heads": 2, "key_dim": 8, "value_dim": 8}
WINDOW = {**PLAIN, "window": 8}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
EXPERTS_AND_LATENT = {**EXPERTS, **LATENT}
EXPANDED = {"heads": 4, "kv_heads": 4, "key_dim": 16, "value_dim": 8}
LAYERS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "llama": ({}, [PLAIN, PLAIN]),
    "qwen3_moe": (EXPERTS, [PLAIN, PLAIN]),
    "gpt2": ({}, [{**PLAIN, "kv_heads": 4}] * 2),
    "mistral": ({"sliding_window": 8}, [WINDOW, WINDOW]),
    "phi3": ({"sliding_window": 8}, [WINDOW, WINDOW]),
    "qwen2": (
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        [PLAIN, WINDOW],
    ),
    "gemma2": (
        {"sliding_window": 8, "layer_types": SLIDING, "attn_logit_softcapping": 5.0},
        [{**WINDOW, "softcap": 5.0}, {**PLAIN, "softcap": 5.0}],
    ),
    "gemma3_text": ({"sliding_window": 8, "layer_types": SLIDING}, [WINDOW, PLAIN]),
    "cohere2": ({"sliding_window": 8, "layer_types": SLIDING}, [WINDOW, PLAIN]),
    "olmo3": ({"sliding_window": 8, "layer_types": SLIDING}, [WINDOW, PLAIN]),
    "exaone4": ({"sliding_window": 8, "layer_types": SLIDING}, [WINDOW, PLAIN]),
    "gpt_oss": (
        {**EXPERTS, "sliding_window": 8, "layer_types": SLIDING},
        [{**WINDOW, "has_sinks": True}, {**PLAIN, "has_sinks": True}],
    ),
    "llama4_text": (
        {
            **EXPERTS,
            "attention_chunk_size": 8,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "floor_scale": 4,
            "attn_scale": 0.5,
            "intermediate_size_mlp": 64,
        },
        [{**PLAIN, "chunk": 8}, {**PLAIN, "temperature": (4.0, 0.5)}],
    ),
    "deepseek_v2": (EXPERTS_AND_LATENT, [EXPANDED, EXPANDED]),
    "deepseek_v3": (EXPERTS_AND_LATENT, [EXPANDED, EXPANDED]),
}


def build(family: str, **changes: Any) -> Any:
    return build_model(family, pad_token_id=0, **changes)


def ids() -> Tensor:
    return torch.arange(4, 28)[None]


@pytest.mark.parametrize("family", LAYERS)
def test_what_layers_ask_for_is_recorded(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding aside, their outputs are permuted with the positions."""
    monkeypatch.setattr(probe_module, "_TOLERANCE", 1e-5)
    changes, layers = LAYERS[family]
    found = [
        {name: value for name, value in asdict(spec).items() if value is not None}
        for spec in record(build(family, **changes), ids()).attention
    ]
    off = {"has_sinks": False, "value_in_key": False}
    assert found == [{"layer": index, **off, **layer} for index, layer in enumerate(layers)]


def test_layers_that_share_keys_say_whose() -> None:
    changes = {
        "num_hidden_layers": 3,
        "layer_types": [*SLIDING, "full_attention"],
        "num_kv_shared_layers": 1,
        "sliding_window": 8,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
    }
    specs = record(build("gemma4_text", head_dim=8, **changes), ids()).attention
    assert [(spec.key_dim, spec.window, spec.shares) for spec in specs] == [
        (8, 8, None),
        (16, None, None),
        (16, None, 1),
    ]


def test_a_layer_that_attends_twice_is_refused() -> None:
    model = build("llama")
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(UserError, match="and it attends more than once a pass in layers 0; "):
        Probe.of(model)


def test_attention_that_does_not_say_in_which_layer_it_is_is_refused() -> None:
    model = build("llama")
    model.model.layers[1].self_attn.layer_idx = None
    with pytest.raises(UserError, match="and its attention does not say in which layer it is; "):
        Probe.of(model)


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
def test_a_model_without_numbers_is_recorded_as_well(family: str) -> None:
    changes, _ = LAYERS[family]
    model = build(family, **changes)
    expected = record(model, ids())
    assert record(model.to("meta", torch.bfloat16), ids().to("meta")) == expected


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("jamba", {"attn_layer_offset": 1, "attn_layer_period": 2, **EXPERTS}, "besides attention"),
        ("minimax", {"layer_types": ["linear_attention", "full_attention"], **EXPERTS}, "besides"),
        ("mamba", {}, "no layer calls transformers' attention interface"),
        ("rwkv", {"attention_hidden_size": 32}, "no layer calls"),
        ("bloom", {}, "no layer calls"),
        ("bert", {"num_key_value_heads": 4}, "mask is neither causal nor of windows or chunks"),
    ],
)
def test_other_mixers_are_refused_by_name(family: str, changes: Any, words: str) -> None:
    with pytest.raises(UserError, match=f"^model: it is of the family '{family}', and .*{words}"):
        Probe.of(build(family, **changes))


class Shifted(nn.Module):
    """A module whose output at each position is that of the position before."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor) -> Tensor:
        return self.module(inputs).roll(1, dims=1)


def test_a_module_that_reads_the_position_before_is_refused() -> None:
    model = build("llama")
    model.model.layers[1].mlp = Shifted(model.model.layers[1].mlp)
    with pytest.raises(UserError, match=r"if they are permuted, .* differ by \d\d"):
        Probe.of(model)


def test_broken_weights_are_no_matter_of_the_family() -> None:
    model = build("llama")
    model.model.norm.weight.data.fill_(torch.nan)
    probe = Probe.of(model)
    probe.check("again", lambda: model(torch.tensor([probe.tokens])).logits[0])


def test_an_attention_of_the_wrong_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = probe_module._Recorder.attend
    monkeypatch.setattr(
        probe_module._Recorder, "attend", lambda *given: attend(*given).roll(1, dims=1)
    )
    with pytest.raises(UserError, match="if they are permuted"):
        Probe.of(build("llama"))


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.1), (torch.bfloat16, 1.5)])
@pytest.mark.parametrize("begin", [0, 16])
def test_logits_of_another_way_have_to_agree(begin: int, dtype: torch.dtype, factor: float) -> None:
    model = build("llama").to(dtype)
    probe = Probe.of(model, avoided={5})
    assert 5 not in probe.tokens
    assert len(probe.tokens) == 24
    model.set_attn_implementation("sdpa")
    logits = model(torch.tensor([probe.tokens])).logits[0].detach()
    probe.check("by sdpa", lambda: logits)
    probe.check("by sdpa", lambda: logits[:7])
    off = logits.clone()
    off[begin:] *= factor
    with pytest.raises(
        UserError, match=rf"^model: .*'llama', .* by sdpa .* token {begin + 1} of 24"
    ):
        probe.check("by sdpa", lambda: off)
    with pytest.raises(UserError, match=r"its forward pass fails by sdpa \(ZeroDivisionError"):
        probe.check("by sdpa", lambda: logits * (1 // 0))
    with pytest.raises(UserError, match=r"its forward pass fails by sdpa \(ValueError: invalid"):
        probe.check("by sdpa", lambda: logits * int("no number"))


def test_deep_models_may_round() -> None:
    """In bfloat16, another order of summation changes the logits of 40 layers by some percent."""
    model = build("llama", num_hidden_layers=40).to(torch.bfloat16)
    probe = Probe.of(model)
    model.set_attn_implementation("sdpa")
    probe.check("by sdpa", lambda: model(torch.tensor([probe.tokens])).logits[0])


class Banning(nn.Module):
    """An output layer that lets one token never follow, as some families do."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.layer(hidden)
        return logits.index_fill(-1, torch.tensor([3]), torch.finfo(logits.dtype).min)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.1), (torch.bfloat16, 1.5)])
def test_a_token_that_may_not_follow_hides_no_difference(dtype: torch.dtype, factor: float) -> None:
    model = build("llama").to(dtype)
    model.lm_head = Banning(model.lm_head)
    probe = Probe.of(model)
    logits = model(torch.tensor([probe.tokens])).logits[0].detach()
    probe.check("again", lambda: logits)
    off = torch.where(logits > torch.finfo(dtype).min, logits * factor, logits)
    with pytest.raises(UserError, match="its logits again differ"):
        probe.check("again", lambda: off)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("gemma2", {"final_logit_softcapping": 2.0}),
        ("cohere", {"logit_scale": 0.3}),
        ("granite", {"logits_scaling": 5.0}),
        ("hyperclovax", {"logits_scaling": 5.0}),  # multiplies where the one above divides
        ("phi", {}),  # its output layer has a bias
        ("llama4_text", LAYERS["llama4_text"][0]),  # its base model is the whole model
    ],
)
def test_a_head_gives_the_models_logits(family: str, changes: dict[str, Any]) -> None:
    model = build(family, **changes)
    with torch.no_grad():
        expected = model(ids()).logits[0]
        hidden = decoder_of(model)(input_ids=ids()).last_hidden_state[0]
        head, written = Head(model), torch.empty_like(expected)
        head.write(hidden, written)
        torch.testing.assert_close(head(hidden), expected)
    torch.testing.assert_close(written, expected)


def test_a_text_model_whose_output_layer_comes_first_keeps_its_decoder() -> None:
    """Camembert names it before the decoder; it is refused by its logits, not for lack of parts."""
    model = build("camembert", is_decoder=True)
    num_weights = model.num_parameters()
    drop_towers(model)
    assert model.num_parameters() == num_weights
