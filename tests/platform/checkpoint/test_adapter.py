"""Adapters: the base model's output stays as it is, peft reads the files, bad ones are refused."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from decoding.adapters import write_adapter
from decoding.families import build_family
from decoding.tiny_models import build_model
from mars_platform.checkpoint.adapted import adapt, check_fit, load_weights, read_model
from mars_platform.checkpoint.adapter.files import (
    identify_base,
    read_adapter,
    save_adapter,
)
from mars_platform.checkpoint.adapter.layers import (
    adapter_parameters,
    adapter_settings,
    attach_adapter,
    resolve_targets,
)
from mars_platform.checkpoint.adapter.settings import AdapterMetadata, AdapterSettings
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.checkpoint.manifest import MANIFEST, describe_all
from mars_platform.checkpoint.metadata import (
    ADAPTER_FILE,
    ADAPTER_WEIGHTS_FILE,
    METADATA_FILE,
)
from mars_platform.checkpoint.tokenizer import name_mask_token
from mars_platform.checkpoint.weights import add_mask_token, load_model
from mars_platform.errors import UserError
from mars_platform.method.reference import decode
from mars_train.recipe import ScratchModel
from mars_train.run.scratch import create_model

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TEXTS = ["Count a box of 12 apples", "There are 12 apples in the box."] * 5
PROMPT = [5, 6, 7, 8]


def make_base(path, *, spare_row=True, tied=True, seed=0):
    config = {**CONFIG, "tie_word_embeddings": tied}
    create_model(ScratchModel(config=config, vocabulary_size=300), TEXTS, 64, path, seed=seed)
    if not spare_row:
        model, tokenizer = load_model(path), read_checkpoint(path).tokenizer
        model.resize_token_embeddings(len(tokenizer))
        model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def base_path(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def adapter_path(base_path, tmp_path_factory):
    return write_adapter(base_path, tmp_path_factory.mktemp("adapter") / "adapter")


@pytest.fixture
def adapter_copy(adapter_path, tmp_path):
    return shutil.copytree(adapter_path, tmp_path / "adapter")


@pytest.mark.parametrize("name", ["README.md", ADAPTER_WEIGHTS_FILE, MANIFEST])
def test_an_adapter_with_a_link_out_of_its_directory_is_refused(adapter_copy, tmp_path, name):
    (adapter_copy / name).unlink(missing_ok=True)
    (adapter_copy / name).symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=rf"^adapter: {adapter_copy}: {name} is a link that leads"):
        read_adapter(adapter_copy)


def adapted(base_path, adapter_path, dtype=torch.float32):
    checkpoint = adapt(read_checkpoint(base_path), read_adapter(adapter_path))
    return checkpoint, load_weights(checkpoint, dtype=dtype)


@torch.inference_mode()
def logits_of(model, ids):
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


# --- outputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_without_a_mask_are_the_base_models_bit_for_bit(base_path, adapter_path, dtype):
    base = load_model(base_path, dtype=dtype)
    checkpoint, model = adapted(base_path, adapter_path, dtype)
    assert torch.equal(logits_of(model, PROMPT), logits_of(base, PROMPT))
    masked = [*PROMPT, *[checkpoint.metadata.mask_token_id] * 3]
    ours, theirs = logits_of(model, masked), logits_of(base, masked)
    assert torch.equal(ours[: len(PROMPT)], theirs[: len(PROMPT)])
    assert (ours[len(PROMPT) :] - theirs[len(PROMPT) :]).abs().amax(-1).gt(0.01).all()


def test_a_new_adapter_changes_no_more_than_the_row_of_the_mask(base_path):
    base, model = load_model(base_path), load_model(base_path)
    checkpoint = read_checkpoint(base_path)
    mask_id, _ = name_mask_token(checkpoint.tokenizer)
    attach_adapter(model, AdapterSettings(), mask_id)
    own = {id(parameter) for parameter in adapter_parameters(model).values()}
    assert {id(each) for each in model.parameters() if each.requires_grad} == own
    add_mask_token(base, read_checkpoint(base_path).tokenizer)  # takes the mean row, too
    masked = [*PROMPT, mask_id, mask_id]
    own = slice(0, mask_id)  # the base's output row of the mask has changed as well
    assert torch.equal(logits_of(model, masked)[:, own], logits_of(base, masked)[:, own])


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_families_without_a_list_called_layers_are_adapted_or_refused(family):
    model = build_model(family)
    if family == "opt":
        attach_adapter(model, AdapterSettings(), 3)
        names = adapter_settings(model).target_modules
        assert names == ["fc1", "fc2", "k_proj", "out_proj", "q_proj", "v_proj"]
    else:
        with pytest.raises(UserError, match=r"^adapter: .* 'gpt2' have no linear layers"):
            attach_adapter(model, AdapterSettings(), 3)


def test_the_gate_follows_each_pass(base_path, adapter_path):
    checkpoint, model = adapted(base_path, adapter_path)
    mask = checkpoint.metadata.mask_token_id
    first, second = [*PROMPT, mask], [5, mask, mask, 6, 7, 8]
    alone = logits_of(model, first), logits_of(model, second)
    padded = torch.tensor([[*first, 0], second])
    with torch.inference_mode():
        together = model(input_ids=padded, use_cache=False).logits
    assert torch.allclose(together[0, : len(first)], alone[0], atol=1e-5)
    assert torch.allclose(together[1], alone[1], atol=1e-5)


def test_a_pass_without_masks_gives_every_weight_a_gradient_of_zero(base_path):
    """Else workers without masks in a step would not take part in the sum of gradients."""
    model = load_model(base_path)
    mask_id, _ = name_mask_token(read_checkpoint(base_path).tokenizer)
    attach_adapter(model, AdapterSettings(rank=4), mask_id)
    model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits.sum().backward()
    gradients = [parameter.grad for parameter in adapter_parameters(model).values()]
    assert all(each is not None and not each.any() for each in gradients)


@pytest.mark.parametrize("tied", [True, False])
def test_a_mask_past_the_vocabulary_is_the_adapters_alone(tmp_path, tied):
    base_path = make_base(tmp_path / "base", spare_row=False, tied=tied)
    checkpoint, model = adapted(base_path, write_adapter(base_path, tmp_path / "adapter"))
    mask = checkpoint.metadata.mask_token_id
    assert mask == checkpoint.config.vocab_size
    assert mask not in checkpoint.special.never_emitted
    plain = decode(load_model(base_path), PROMPT, checkpoint.special, max_tokens=12)
    ours = decode(
        model,
        PROMPT,
        checkpoint.special,
        max_tokens=12,
        threshold=[0.001, 1.0] * 6,
        num_masks=3,
        mask_token_id=mask,
    )
    assert ours.tokens[0] == plain.tokens[0]
    assert any(len(tokens) > 1 for tokens in ours.passes)
    assert max(ours.tokens) < mask


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # of peft's use of transformers
@pytest.mark.parametrize("spare_row", [True, False])
def test_peft_loads_the_directory_and_computes_the_same_at_masks(tmp_path, spare_row):
    base_path = make_base(tmp_path / "base", spare_row=spare_row)
    path = write_adapter(base_path, tmp_path / "adapter")
    checkpoint, model = adapted(base_path, path)
    mask = checkpoint.metadata.mask_token_id
    base = load_model(base_path)
    if not spare_row:
        base.resize_token_embeddings(mask + 1)
    theirs = PeftModel.from_pretrained(base, path)
    assert {str(config.peft_type) for config in theirs.peft_config.values()} == {"PeftType.LORA"}
    masks, own = [mask] * 5, slice(0, mask)
    expected = logits_of(theirs, masks)[:, own]
    assert torch.allclose(logits_of(model, masks)[:, own], expected, atol=1e-5)


def test_an_adapter_holds_its_own_weights_only(base_path, adapter_path):
    adapter, (_, model) = read_adapter(adapter_path), adapted(base_path, adapter_path)
    assert adapter.settings == adapter_settings(model)
    assert adapter.settings.rank == 4
    assert adapter.settings.scale == 2.0
    assert len(adapter.settings.target_modules) == 7
    tensors = load_file(adapter_path / ADAPTER_WEIGHTS_FILE)
    assert len(tensors) == 1 + 2 * 7 * CONFIG["num_hidden_layers"]
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_any_rank_and_scale_are_stored(base_path, tmp_path):
    base, model = read_checkpoint(base_path), load_model(base_path)
    identity, (mask_id, _) = (
        identify_base(base.path, base.tokenizer, "base"),
        name_mask_token(base.tokenizer),
    )
    given = AdapterSettings(rank=3, alpha=5, target_modules=["v_proj", "q_proj", "v_proj"])
    attach_adapter(model, given, mask_id)
    metadata = AdapterMetadata(block_size=4, mask_token_id=mask_id, base=identity)
    save_adapter(tmp_path, model, base.tokenizer, metadata)
    settings = read_adapter(tmp_path).settings
    assert settings == given
    assert (settings.rank, settings.alpha) == (3, 5)
    assert settings.target_modules == ["q_proj", "v_proj"]
    assert settings.scale == 5 / 3


def test_the_sum_of_an_adapter_covers_its_model(adapter_path, adapter_copy):
    assert weights_fingerprint(adapter_copy) == weights_fingerprint(adapter_path)
    base = json.loads((adapter_copy / METADATA_FILE).read_text())["base"]
    changed(adapter_copy, METADATA_FILE, base={**base, "weights": "0" * 64})
    assert weights_fingerprint(adapter_copy) != weights_fingerprint(adapter_path)


def test_a_copied_base_is_the_same_model(base_path, adapter_path, tmp_path):
    copied = shutil.copytree(base_path, tmp_path / "elsewhere")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "transformers_version": "5.0"}))
    checkpoint, _ = adapted(copied, adapter_path)
    assert checkpoint.path == copied
    assert checkpoint.special.never_emitted >= {checkpoint.metadata.mask_token_id}


# --- refusals -------------------------------------------------------------------------------------


def check_fit_of(base_path, adapter_path):
    """Check an adapter as a server does before it starts anything."""
    check_fit(read_model(base_path, adapter_path))


def refusal(base_path, adapter_path, load=adapted):
    """The one line with which an adapter is refused, wherever in its reading."""
    with pytest.raises(UserError) as caught:
        load(base_path, adapter_path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def changed(path, name, **content):
    file = path / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **content}))


def test_other_weights_are_another_base(adapter_path, tmp_path):
    other = make_base(tmp_path / "other", seed=1)
    message = refusal(other, adapter_path)
    assert f"another model than {other}, which differs in weights; give the model" in message


def test_another_configuration_is_another_base(base_path, adapter_path, tmp_path):
    other = shutil.copytree(base_path, tmp_path / "other")
    changed(other, "config.json", rms_norm_eps=1e-3)
    assert "which differs in config.json; give the model" in refusal(other, adapter_path)


def test_another_vocabulary_is_another_base(base_path, adapter_path, tmp_path):
    other = shutil.copytree(base_path, tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 290, "content": "<|new|>"})
    (other / "tokenizer.json").write_text(json.dumps(content))
    assert "which differs in tokenizer; give the model" in refusal(other, adapter_path)


def test_an_adapter_with_another_tokenizer_is_refused(base_path, adapter_copy):
    content = json.loads((adapter_copy / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (adapter_copy / "tokenizer.json").write_text(json.dumps(content))
    assert "is not the one that the adapter was trained with" in refusal(base_path, adapter_copy)


def test_a_newer_format_is_refused(base_path, adapter_copy):
    changed(adapter_copy, METADATA_FILE, format_version=2, new_key=1)
    assert "format_version 2 is newer" in refusal(base_path, adapter_copy)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (ADAPTER_FILE, f"holds no {ADAPTER_FILE}, so it is no adapter"),
        (METADATA_FILE, f"holds no {METADATA_FILE}, so its weights are not for masks"),
        (ADAPTER_WEIGHTS_FILE, f"{ADAPTER_WEIGHTS_FILE} cannot be read"),
        ("tokenizer.json", "the tokenizer in"),
    ],
)
def test_a_missing_file_is_named(base_path, adapter_copy, name, problem):
    (adapter_copy / name).unlink()
    assert problem in refusal(base_path, adapter_copy)


def test_a_file_unlike_the_manifest_is_refused(base_path, adapter_copy):
    (adapter_copy / MANIFEST).write_text(describe_all(adapter_copy).text)
    changed(adapter_copy, ADAPTER_FILE, lora_alpha=64)
    assert f"is damaged: {ADAPTER_FILE} has" in refusal(base_path, adapter_copy)


def test_weights_of_another_rank_are_refused(base_path, adapter_copy):
    changed(adapter_copy, ADAPTER_FILE, r=8)
    message = refusal(base_path, adapter_copy)
    assert "has the shape (4, 32), and rank and model need (8, 32)" in message


def test_weights_that_are_missing_or_too_many_are_refused(base_path, adapter_copy):
    file = adapter_copy / ADAPTER_WEIGHTS_FILE
    tensors = load_file(file)
    name = min(tensors)
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    assert f"lacks {name}" in refusal(base_path, adapter_copy)
    save_file({**copy.deepcopy(tensors), "more": torch.zeros(1)}, file)
    assert "holds more" in refusal(base_path, adapter_copy)


def test_target_modules_that_the_model_lacks_are_refused(base_path, adapter_copy):
    changed(adapter_copy, ADAPTER_FILE, target_modules=["q_proj", "query"])
    message = refusal(base_path, adapter_copy)
    assert f"adapter: {adapter_copy / ADAPTER_FILE} does not fit the model" in message
    assert (
        "has no linear layer called 'query' that an adapter can change; it has down_proj, gate_proj"
        in message
    )


def test_no_adapter_changes_the_expansion_of_latents():
    """An engine attends to the latents themselves."""
    model = build_family("deepseek_v3")
    targets = resolve_targets(model, AdapterSettings())
    assert "kv_a_proj_with_mqa" in targets
    assert "kv_b_proj" not in targets
    with pytest.raises(UserError, match="'kv_b_proj' that an adapter can change; it has down_proj"):
        resolve_targets(model, AdapterSettings(target_modules=["kv_b_proj"]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOHA"),
        ("use_dora", True),
        ("use_rslora", True),
        ("fan_in_fan_out", True),
        ("lora_bias", True),
        ("bias", "all"),
        ("layers_to_transform", [0]),
        ("alpha_pattern", {"q_proj": 2}),
        ("task_type", "SEQ_CLS"),
        ("rank_pattern", {"q_proj": 2}),
        ("modules_to_save", ["lm_head"]),
    ],
)
def test_kinds_of_lora_that_are_not_implemented_are_refused(base_path, adapter_copy, key, value):
    changed(adapter_copy, ADAPTER_FILE, **{key: value})
    assert f"{ADAPTER_FILE}: {key}" in refusal(base_path, adapter_copy)


@pytest.mark.parametrize(
    ("key", "value"), [("r", 0), ("r", 5000), ("lora_alpha", float("inf")), ("lora_alpha", 10**400)]
)
def test_ranks_and_scales_out_of_range_are_refused(base_path, adapter_copy, key, value):
    changed(adapter_copy, ADAPTER_FILE, **{key: value})
    assert f"{ADAPTER_FILE}: {key}" in refusal(base_path, adapter_copy)


def with_first_weight(path, change):
    """Change the first of an adapter's weights; the file and the weight's name are returned."""
    tensors = load_file(path / ADAPTER_WEIGHTS_FILE)
    name = min(tensors)
    save_file({**tensors, name: change(tensors[name])}, path / ADAPTER_WEIGHTS_FILE)
    return name


@pytest.mark.parametrize(
    "spoil",
    [
        lambda weight: weight.index_fill(1, torch.tensor([3]), torch.nan),
        lambda weight: weight.double().index_fill(1, torch.tensor([3]), 1e300),
        lambda weight: weight.to(torch.int8),
    ],
)
@pytest.mark.parametrize("load", [adapted, check_fit_of])
def test_numbers_that_are_not_finite_are_refused(base_path, adapter_copy, spoil, load):
    name = with_first_weight(adapter_copy, spoil)
    message = refusal(base_path, adapter_copy, load)
    assert (
        f"{name} in {adapter_copy / ADAPTER_WEIGHTS_FILE} holds other numbers than finite"
        in message
    )


def test_a_header_of_absurd_size_is_refused(base_path, adapter_copy):
    (adapter_copy / ADAPTER_WEIGHTS_FILE).write_bytes((2**60).to_bytes(8, "little") + b"{}")
    assert f"{ADAPTER_WEIGHTS_FILE} cannot be read" in refusal(base_path, adapter_copy)


def test_a_row_for_another_token_is_refused(base_path, adapter_copy):
    changed(adapter_copy, ADAPTER_FILE, trainable_token_indices={"embed_tokens": [3]})
    assert "has to name the mask token" in refusal(base_path, adapter_copy)
