"""Stages that train a LoRA adapter: merged or separate, the result is what was trained."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from decoding.families import build_family
from decoding.tiny_models import build_model
from decoding.wrappers import build_wrapper
from mars_platform.checkpoint.adapter.layers import adaptable_layers
from mars_platform.checkpoint.adapter.lora import merge_lora, read_lora
from mars_platform.checkpoint.adapter.settings import LoraSettings
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.checkpoint.metadata import METADATA_FILE
from mars_platform.checkpoint.weights import add_mask_token, load_model
from mars_train.stage.lora import add_lora, narrow_frozen
from mars_train.stage.trainer import MODEL
from mars_train.storage.directories import Storage
from stage_runs import PROBE, STATES, build_job, run_stage, write_rows, write_start

LORA = {"rank": 4, "alpha": 6}
SCALE = 1.5


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "data", 60)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Write a model with tied embeddings, without a spare row for the mask."""
    path = write_start(tmp_path_factory.mktemp("start") / "start")
    model, tokenizer = load_model(path), read_checkpoint(path).tokenizer
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(path)
    return path


def lora_job(path, start, data, *, objective="mars", workers=1, strategy="ddp", **lora):
    stage = {"objective": objective, "max_steps": 4, "learning_rate": 0.02, "lora": LORA | lora}
    return build_job(path, start, data, stage=stage, workers=workers, strategy=strategy)


def trained(job, **events):
    """Run a job; its outcome and the directory of its result are returned."""
    outcome = run_stage(job, **events)
    assert outcome.error is None
    return outcome, Storage(job.storage).fetch(MODEL)


@torch.inference_mode()
def logits_of(model, ids):
    return model.eval()(input_ids=ids, use_cache=False).logits


@pytest.fixture(scope="module")
def merged(start, data, tmp_path_factory):
    return trained(lora_job(tmp_path_factory.mktemp("merged") / "run", start, data))


@pytest.fixture(scope="module")
def separate(start, data, tmp_path_factory):
    path = tmp_path_factory.mktemp("separate") / "run"
    return trained(lora_job(path, start, data, merge=False))


def test_a_merged_model_with_a_grown_embedding_is_the_one_that_was_trained(start, merged):
    """Tied embeddings once came apart on the way (huggingface/transformers#45127)."""
    outcome, path = merged
    model, checkpoint = AutoModelForCausalLM.from_pretrained(path), read_checkpoint(path)
    mask = checkpoint.metadata.mask_token_id
    assert mask == read_checkpoint(start).vocabulary_size
    assert model.config.tie_word_embeddings
    assert model.config.vocab_size == mask + 1
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(logits_of(model, PROBE), outcome.logits, rtol=0, atol=1e-5)
    row = outcome.weights["model.embed_tokens.mask_row"]
    assert torch.equal(model.model.embed_tokens.weight[mask:], row)


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # of peft's use of transformers
def test_a_separate_adapter_opens_with_peft_and_is_the_merged_model(start, merged, separate):
    outcome, path = separate
    adapter = read_lora(path)
    assert outcome.losses == merged[0].losses
    assert adapter.metadata.scope == "all"
    assert adapter.metadata.base.weights == weights_fingerprint(start)
    base, mask = load_model(start), adapter.metadata.mask_token_id
    base.resize_token_embeddings(mask + 1)
    theirs = PeftModel.from_pretrained(base, path)
    model = load_model(merged[1])
    ids = torch.cat([PROBE, torch.full((1, 3), mask)], dim=1)
    expected = logits_of(model, ids)
    torch.testing.assert_close(logits_of(theirs, ids), expected, rtol=0, atol=1e-5)
    how = {"do_sample": False, "max_new_tokens": 20, "suppress_tokens": [mask]}
    assert torch.equal(theirs.generate(input_ids=PROBE, **how), model.generate(PROBE, **how))

    ours = load_model(start)
    add_mask_token(ours, read_checkpoint(start).tokenizer)
    merge_lora(ours, adapter.weights(ours), mask)
    torch.testing.assert_close(logits_of(ours, ids), expected, rtol=0, atol=1e-5)


def test_sharded_weights_are_merged_and_rounded_once(data, tmp_path):
    start = write_start(tmp_path / "start", tie_word_embeddings=False)
    load_model(start, dtype=torch.bfloat16).save_pretrained(start)
    job = lora_job(tmp_path / "run", start, data, workers=2, strategy="fsdp2")
    outcome, path = trained(job)
    before, after = (load_file(each / "model.safetensors") for each in (start, path))
    assert before.keys() == after.keys()
    num_changed = 0
    for name, weight in before.items():
        part = name.removesuffix(".weight")
        expected = weight.float()
        if (first := outcome.weights.get(f"{part}.lora_A.default.weight")) is not None:
            expected += SCALE * (outcome.weights[f"{part}.lora_B.default.weight"] @ first)
            num_changed += 1
        if name in ("model.embed_tokens.weight", "lm_head.weight"):  # have a row for the mask
            mask = read_checkpoint(path).metadata.mask_token_id
            expected, after[name] = expected[:mask], after[name][:mask]
        assert torch.equal(after[name], expected.bfloat16()), name
    assert num_changed == 2 * 7


def test_a_resumed_stage_ar_equals_an_uninterrupted_one_bit_for_bit(start, data, tmp_path):
    one, two = (
        lora_job(tmp_path / name, start, data, objective="ar", dropout=0.2, merge=False)
        for name in ("one", "two")
    )
    assert run_stage(one, stop_at=2).finished is False
    (name,) = Storage(one.storage).names()
    for file in Storage(one.storage).fetch(name).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            assert all("lora_" in key for key in tensors.keys())  # noqa: SIM118 - no dictionary
    resumed, path = trained(one)
    uninterrupted, other = trained(two)
    assert resumed.history == uninterrupted.history
    ours, theirs = (load_file(each / "adapter_model.safetensors") for each in (path, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert not (path / METADATA_FILE).exists()  # it drafts by its model's masks
    assert read_lora(path).weights(load_model(start)).mask_row is None


@pytest.mark.parametrize("family", ["deepseek_v3", "falcon_h1"])
def test_every_layer_is_changed_also_where_peft_would_refuse_it_or_mean_experts(family):
    model = build_family(family)
    expected = set(adaptable_layers(model))
    config = add_lora(model, LoraSettings(), None)
    changed = {name for name, part in model.named_modules() if isinstance(part, LoraLayer)}
    assert changed == expected
    assert config.target_modules == sorted({name.rpartition(".")[2] for name in expected})
    assert all(".lora_" in name for name, each in model.named_parameters() if each.requires_grad)


def test_weights_that_bfloat16_holds_are_kept_in_it_and_logits_stay_bit_for_bit():
    model = build_model().bfloat16().float()
    exact, wide = (model.model.layers[n].mlp.up_proj for n in (0, 1))
    wide.weight.data[0, 0] = 1 + 2**-20
    add_lora(model, LoraSettings(), None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = logits_of(model, PROBE)
        narrow_frozen(model)
        assert torch.equal(logits_of(model, PROBE), before)
    assert (exact.weight.dtype, wide.weight.dtype) == (torch.bfloat16, torch.float32)
    assert {each.dtype for each in model.parameters() if each.requires_grad} == {torch.float32}


def test_a_tower_for_images_stays_as_it_is():
    model = build_wrapper("gemma3")
    config = add_lora(model, LoraSettings(target_modules=["q_proj"], dropout=0.25), None)
    changed = [name for name, part in model.named_modules() if isinstance(part, LoraLayer)]
    assert model.get_submodule(changed[0]).lora_dropout["default"].p == 0.25
    assert changed == [f"model.language_model.layers.{n}.self_attn.q_proj" for n in (0, 1)]
    assert config.target_modules == changed


def test_an_output_layer_is_refused_rather_than_left_out(start, data, tmp_path):
    outcome = run_stage(lora_job(tmp_path / "run", start, data, target_modules=["lm_head"]))
    said = "lora.target_modules: the model has no linear layer called 'lm_head' that an adapter"
    assert said in outcome.error


def test_weights_that_the_trained_model_will_lack_are_said(data, tmp_path):
    start = write_start(tmp_path / "start", **STATES)
    file = start / "model.safetensors"
    weights = load_file(file) | {"mtp.fc.weight": torch.zeros(2, 2)}
    save_file(weights, file, metadata={"format": "pt"})
    outcome = run_stage(lora_job(tmp_path / "run", start, data, objective="ar"), stop_at=1)
    (warning,) = outcome.reporter.warned
    assert "does not load 1 weights of" in warning
    assert "such as mtp.fc.weight; the trained model is stored without them" in warning
