"""The loss of an adapter's stage: two streams computed apart, against those of one pass."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from decoding.families import HYBRIDS
from mars_platform.checkpoint.adapter.layers import (
    GatedLinear,
    adapter_parameters,
    attach_adapter,
)
from mars_platform.checkpoint.adapter.settings import AdapterSettings
from mars_train.method.adapted import AdapterObjective
from mars_train.method.attention import FLEX_MULTIPLE
from mars_train.method.layout import PADDING_DOCUMENT, collate
from mars_train.method.objective import MaskLoss, Objective
from packed import MASK, PAD, build_batch, build_model, checkpoint_layers, silent_layout

LOSSES = {
    "labels": MaskLoss(),
    "teacher": MaskLoss(teacher_weight=1.0),
    "mixed": MaskLoss(teacher_weight=0.5, target="argmax"),
}


def adapted_model(family="qwen2", **settings):
    model = build_model(family, **settings)
    attach_adapter(model, AdapterSettings(rank=4), MASK)
    for parameter in adapter_parameters(model).values():
        nn.init.normal_(parameter, std=0.2)
    return model


def masks_only(batch):
    """Return the batch as a stage with an adapter makes it: no label is of the clean loss."""
    return replace(batch, in_clean_loss=torch.zeros_like(batch.in_clean_loss))


def result_of(objective, batch):
    """Return the sum of losses, and the gradients of what is trained, by name."""
    objective.zero_grad()
    sums = objective(batch)
    assert float(sums.clean.detach()) == 0.0
    sums.noisy.backward()
    trained = [(name, p) for name, p in objective.named_parameters() if p.requires_grad]
    assert all(p.grad is None for p in objective.parameters() if not p.requires_grad)
    return sums.noisy.detach(), {name: p.grad.clone() for name, p in trained}


def assert_same(ours, expected):
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-5, atol=0)
    for name, gradient in expected[1].items():
        scale = float(gradient.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("kind", LOSSES)
def test_streams_apart_give_the_loss_and_gradients_of_one_pass(kind):
    model, batch = adapted_model(), masks_only(build_batch())
    together = Objective(copy.deepcopy(model), masked=True, mask_loss=LOSSES[kind])
    apart = AdapterObjective(model, mask_loss=LOSSES[kind])
    expected = result_of(together, batch)
    assert_same(result_of(apart, batch), expected)


SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
SETTINGS = {
    "qwen3": {},
    "llama": {},
    "gptj": {"rotary_dim": 8},
    "mistral": {"sliding_window": 6},
    "gemma2": {**SLIDING, "attn_logit_softcapping": 2.0},
    "gpt_oss": {**SLIDING, "num_local_experts": 2, "num_experts_per_tok": 1},
    "falcon_h1": HYBRIDS["falcon_h1"],
    "gemma4_text": {  # the last layer reads the keys of the one before
        "layer_types": ["full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 50,  # the mask has no row
    },
}


@pytest.mark.parametrize("family", SETTINGS)
def test_families_and_recomputed_activations_change_nothing(family):
    model = adapted_model(family, **SETTINGS[family]).train()
    batch = masks_only(build_batch())
    if "vocab_size_per_layer_input" in SETTINGS[family]:
        batch = replace(batch, tokens=torch.where(batch.tokens == MASK, MASK, batch.tokens % 50))
    together = Objective(copy.deepcopy(model), masked=True)
    expected = result_of(together, batch)
    apart = AdapterObjective(model)
    assert_same(result_of(apart, batch), expected)
    checkpoint_layers(apart.model)
    assert_same(result_of(apart, batch), expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without")  # it is slow on a CPU
def test_flex_attention_gives_the_same_loss():
    batch = masks_only(build_batch(row_slots=256, multiple_of=FLEX_MULTIPLE))
    model = adapted_model()
    with torch.no_grad():
        expected = AdapterObjective(copy.deepcopy(model))(batch)
        ours = AdapterObjective(model, attention="flex")(batch)
    torch.testing.assert_close(ours.noisy, expected.noisy, rtol=1e-5, atol=0)


def test_the_backward_pass_goes_through_the_noisy_stream_alone():
    objective, batch = AdapterObjective(adapted_model()), masks_only(build_batch())
    passes = []
    layer = next(item for item in objective.model.modules() if isinstance(item, GatedLinear))
    layer.base_layer.register_forward_hook(
        lambda _, inputs, output: passes.append((inputs[0].shape[:-1].numel(), output.grad_fn))
    )
    objective(batch)
    (num_clean, of_clean), (num_noisy, _) = passes
    assert of_clean is None
    assert num_clean + num_noisy < 1.5 * batch.tokens.numel()
    is_used = batch.documents != PADDING_DOCUMENT
    for num, stream in ((num_clean, ~batch.noisy), (num_noisy, batch.noisy)):
        assert num == len(is_used) * int((is_used & stream).sum(dim=1).max())


def test_logits_are_computed_behind_masks_alone():
    objective, batch = AdapterObjective(adapted_model()), masks_only(build_batch())
    sizes = []
    objective.model.lm_head.register_forward_hook(lambda *call: sizes.append(len(call[2])))
    objective(batch)
    assert sum(sizes) == int((batch.depths > 0).sum())


def test_a_batch_without_labels_gives_zero_gradients():
    objective = AdapterObjective(adapted_model())
    batch = collate([[silent_layout()], [silent_layout(), silent_layout()]], PAD)
    loss, gradients = result_of(objective, batch)
    assert float(loss) == 0.0
    assert len(gradients) == 1 + 2 * 2 * 7
    assert not any(gradient.any() for gradient in gradients.values())
