"""LoRA adapters of other trainers: peft's own files are read and merged, bad ones are refused."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load, load_file, save_file

from decoding.tiny_models import build_model
from decoding.wrappers import build_wrapper
from mars_platform.checkpoint.adapter.layers import adaptable_layers, read_tensors
from mars_platform.checkpoint.adapter.lora import merge_lora, read_lora
from mars_platform.checkpoint.adapter.settings import AdapterMetadata, BaseIdentity
from mars_platform.checkpoint.metadata import (
    ADAPTER_FILE,
    ADAPTER_WEIGHTS_FILE,
    DRAFT_HEAD_FILE,
    DraftHeadSettings,
)
from mars_platform.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # of peft's calls
IDS = torch.tensor([[5, 6, 7, 8, 9]])


@torch.inference_mode()
def logits_of(model):
    return model(input_ids=IDS, use_cache=False).logits


def written(model, path, **settings):
    """Write a LoRA adapter of random weights by peft, and return peft's model."""
    given = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    theirs = get_peft_model(copy.deepcopy(model), LoraConfig(**(given | settings)))
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.3)
    theirs.save_pretrained(path)
    return theirs.eval()


def merged(model, path):
    ours = copy.deepcopy(model)
    merge_lora(ours, read_lora(path).weights(ours))
    return ours


@pytest.fixture(scope="module")
def base():
    return build_model()


@pytest.fixture(scope="module")
def lora_path(base, tmp_path_factory):
    path = tmp_path_factory.mktemp("lora") / "lora"
    written(base, path)
    return path


@pytest.fixture
def lora_copy(lora_path, tmp_path):
    return shutil.copytree(lora_path, tmp_path / "lora")


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True, "target_modules": ["q_proj"]}])
def test_a_merged_adapter_is_the_model_with_it(base, tmp_path, settings):
    theirs = written(base, tmp_path, **settings)
    ours = logits_of(merged(base, tmp_path))
    torch.testing.assert_close(ours, logits_of(theirs), rtol=0, atol=1e-4)
    assert (ours - logits_of(base)).abs().max() > 0.1


def test_a_merged_weight_is_rounded_once(base, lora_path):
    rounded = copy.deepcopy(base).bfloat16()
    exact = merged(rounded.float(), lora_path)
    ours = merged(copy.deepcopy(base).bfloat16(), lora_path)
    for name, weight in ours.named_parameters():
        assert torch.equal(weight, exact.get_parameter(name).bfloat16()), name


@pytest.mark.parametrize("is_adapter_multimodal", [True, False])
def test_layers_of_a_multimodal_model_are_found(base, tmp_path, is_adapter_multimodal):
    """Some trainers load the model of text alone, so that layers have other names."""
    whole = build_wrapper("gemma3")
    assert all(".language_model." in name for name in adaptable_layers(whole))
    written(whole, tmp_path, target_modules=r".*language_model.*(q|down)_proj")
    tensors, file = load_file(tmp_path / ADAPTER_WEIGHTS_FILE), tmp_path / ADAPTER_WEIGHTS_FILE
    if not is_adapter_multimodal:
        save_file({key.replace("language_model.", ""): tensors[key] for key in tensors}, file)
    ours = read_lora(tmp_path).weights(whole)
    assert len(ours.products) * 2 == len(tensors)
    assert (logits_of(merged(whole, tmp_path)) - logits_of(whole)).abs().max() > 0.01


# --- refusals -------------------------------------------------------------------------------------


def refusal(base, path):
    with pytest.raises(UserError) as caught:
        read_lora(path).weights(base)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOHA"),
        ("task_type", "SEQ_CLS"),
        ("use_dora", True),
        ("lora_bias", True),
        ("bias", "lora_only"),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2}),
        ("modules_to_save", ["lm_head"]),
        ("init_lora_weights", "pissa"),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("alora_invocation_tokens", [3]),
        ("r", 5000),
        ("trainable_token_indices", {"embed_tokens": [3]}),
    ],
)
def test_kinds_that_are_not_implemented_are_refused(base, lora_copy, key, value):
    file = lora_copy / ADAPTER_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    assert f"{ADAPTER_FILE}: {key}" in refusal(base, lora_copy)


@pytest.mark.parametrize("part", ["mars.json", DRAFT_HEAD_FILE])
def test_a_draft_head_is_refused(base, lora_copy, part):
    identity = BaseIdentity(name="base", weights="", config="", tokenizer="")
    metadata = AdapterMetadata(
        block_size=4, mask_token_id=3, base=identity, scope="all", draft_head=DraftHeadSettings()
    )
    file = lora_copy / part
    file.parent.mkdir(exist_ok=True)
    file.write_text(metadata.model_dump_json())
    assert refusal(base, lora_copy).startswith(f"adapter: {lora_copy} has a draft head, by which ")


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda all_: {}, "it holds no weights for"),
        (lambda all_: {f"x{key}": all_[key] for key in all_}, "is for no layer that a LoRA"),
        (
            lambda all_: all_ | {"lm_head.lora_A.weight": all_[Q] + 1},
            "lm_head.lora_A.weight is for no",
        ),
        (lambda all_: {k: all_[k] for k in all_ if k != Q}, "it lacks model.layers.0.self_attn.q"),
        (
            lambda all_: {k: all_[k] for k in all_ if "up_" not in k},
            "it holds no weights for model.layers.",
        ),
        (lambda all_: all_ | {Q: all_[Q][1:]}, "lora_A has the shape (3, 32), and rank and model"),
        (lambda all_: all_ | {Q: all_[Q] * torch.nan}, "lora_A holds other numbers than finite"),
        (lambda all_: all_ | {Q: all_[Q].double() * 1e300}, "lora_A holds other numbers"),
        (
            lambda all_: all_ | {Q: (all_[Q] * torch.nan).to(torch.float8_e4m3fn)},
            "lora_A holds other numbers than finite",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(base, lora_copy, change, problem):
    """None of them may leave the model as it is without a word (vllm-project/vllm#34186)."""
    save_file(change(load_file(lora_copy / ADAPTER_WEIGHTS_FILE)), lora_copy / ADAPTER_WEIGHTS_FILE)
    assert problem in refusal(base, lora_copy)


def test_an_output_layer_without_its_weights_is_refused(base, lora_copy):
    """Files that lack what their trainer trained would act otherwise (unslothai/unsloth#4098)."""
    file = lora_copy / ADAPTER_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "target_modules": ["lm_head"]}))
    assert "it holds no weights for lm_head, which" in refusal(base, lora_copy)


def test_weights_in_use_do_not_change_with_their_file(lora_copy):
    file = lora_copy / ADAPTER_WEIGHTS_FILE
    tensors, expected = read_tensors(file), load(file.read_bytes())
    with file.open("r+b") as stream:  # in place, which a mapping would show
        stream.seek(-64, 2)
        stream.write(bytes(64))
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert any(not torch.equal(expected[name], each) for name, each in load_file(file).items())
