"""Stages that train an adapter: the model that it belongs to stays as it is, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from safetensors import safe_open

from mars_platform.checkpoint.adapted import adapt, load_weights
from mars_platform.checkpoint.adapter.files import read_adapter
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.checkpoint.weights import add_mask_token, load_model, save_checkpoint
from mars_train.data.token_store import TokenStoreWriter
from mars_train.recipe import DataSettings, EvaluationSettings
from mars_train.stage.held_out import read_held_out
from mars_train.stage.trainer import MODEL
from mars_train.storage.directories import Storage
from stage_runs import MAX_LENGTH, PROBE, STATES, build_job, run_stage, write_start

ADAPTER = {"rank": 4}
SCALINGS = [(1, "ddp"), (2, "ddp"), (2, "fsdp2")]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return write_start(tmp_path_factory.mktemp("start") / "start")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A store of conversations whose responses are drawn from four tokens."""
    path, rng = tmp_path_factory.mktemp("data") / "data", np.random.default_rng(0)
    lengths = rng.integers(8, MAX_LENGTH, 100).astype(np.int32)
    begins = rng.integers(1, lengths)
    supervised = [np.arange(n) >= b for n, b in zip(lengths, begins, strict=True)]
    is_label = np.concatenate(supervised)
    questions, answers = (rng.integers(*ends, len(is_label)) for ends in [(3, 250), (10, 14)])
    with TokenStoreWriter(path) as writer:
        writer.append(
            keys=np.stack([np.zeros(100, np.int64), np.arange(100)], axis=1),
            lengths=lengths,
            tokens=np.where(is_label, answers, questions).astype(np.int32),
            supervised=is_label,
        )
        writer.finish()
    return path


def adapter_job(path, start, data, *, stage=(), **rest):
    own = {"max_steps": 8, "learning_rate": 0.03, "adapter": ADAPTER, "distillation": None}
    return build_job(path, start, data, stage=own | dict(stage), **rest)


@pytest.fixture
def job_of(tmp_path, start, data):
    """Build jobs of 8 steps; jobs of the same name share their checkpoints."""

    def build(name="run", *, start=start, **settings):
        return adapter_job(tmp_path / name, start, data, **settings)

    return build


@pytest.fixture(scope="module")
def straight(tmp_path_factory, start, data):
    """Run jobs without interruption and return them with their outcomes."""

    @cache
    def run(workers=1, strategy="ddp", max_steps=8):
        path, stage = tmp_path_factory.mktemp("straight") / "run", {"max_steps": max_steps}
        job = adapter_job(path, start, data, stage=stage, workers=workers, strategy=strategy)
        return job, run_stage(job)

    return run


def trained_adapter(job):
    return read_adapter(Storage(job.storage).fetch(MODEL))


@torch.inference_mode()
def logits_of(model, ids=PROBE):
    return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize(("workers", "strategy"), SCALINGS)
def test_the_mask_loss_falls_and_the_base_stays_bit_for_bit(start, straight, workers, strategy):
    job, outcome = straight(workers, strategy)
    assert outcome.error is None
    assert outcome.finished
    assert np.mean(outcome.losses[-2:]) < np.mean(outcome.losses[:2]) - 0.5
    assert {step.clean_loss for step in outcome.history.steps} == {0.0}
    base = dict(load_model(start).named_parameters())
    trained = [name for name in outcome.weights if "lora_" in name or "mask_row" in name]
    for name, weight in outcome.weights.items():
        if name not in trained:
            assert torch.equal(weight, base.pop(name.replace("base_layer.", ""))), name
    assert not base
    adapter = trained_adapter(job)
    assert adapter.metadata.base.name == str(start)
    assert adapter.metadata.block_size == job.stage.block_size
    model = load_weights(adapt(read_checkpoint(start), adapter), dtype=torch.float32)
    assert torch.equal(logits_of(model), logits_of(load_model(start)))
    for name in trained:
        assert torch.equal(model.get_parameter(name), outcome.weights[name]), name


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(job_of, straight):
    scaling = {"workers": 2, "strategy": "fsdp2"}
    assert run_stage(job_of(**scaling), stop_at=5).finished is False
    resumed = run_stage(job_of(**scaling))
    assert "step-00000005" in resumed.reporter.said[0]
    _, uninterrupted = straight(**scaling)
    assert resumed.history == uninterrupted.history
    for name, weight in uninterrupted.weights.items():
        assert torch.equal(resumed.weights[name], weight), name


def test_workers_and_recomputed_activations_do_not_change_the_losses(job_of, straight):
    _, expected = straight()
    for workers, strategy in SCALINGS[1:]:
        _, ours = straight(workers, strategy)
        np.testing.assert_allclose(ours.losses, expected.losses, rtol=0, atol=1e-5)
    recomputed = run_stage(job_of(stage={"max_steps": 3}, gradient_checkpointing=True))
    _, plain = straight(max_steps=3)
    np.testing.assert_allclose(recomputed.losses, plain.losses, rtol=0, atol=1e-5)


def test_bf16_is_close_to_float32(job_of, straight):
    _, plain = straight(max_steps=3)
    rounded = run_stage(job_of(stage={"max_steps": 3}, precision="bf16"))
    np.testing.assert_allclose(rounded.losses, plain.losses, rtol=0.01)
    assert rounded.losses != plain.losses


def test_checkpoints_hold_what_is_trained_and_no_more(job_of):
    job = job_of(checkpoints={"every_steps": 2})
    run_stage(job, stop_at=2)
    (name,) = Storage(job.storage).names()
    names = set()
    for file in Storage(job.storage).fetch(name).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names |= set(tensors.keys())
    weights = {name for name in names if name.startswith("model.")}
    assert len(weights) == 1 + 2 * 2 * 7
    assert len(names) == 4 * len(weights)
    assert all("lora_" in name or "mask_row" in name for name in names)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_other_families_are_trained(job_of, tmp_path, family):
    start = write_start(tmp_path / "start", family=family, tie_word_embeddings=False)
    adapter = {**ADAPTER, "target_modules": ["o_proj", "down_proj"]}
    job = job_of(start=start, stage={"max_steps": 2, "adapter": adapter, "block_size": [3, 6]})
    outcome = run_stage(replace(job, known_as="some/model"))
    assert outcome.finished, outcome.error
    trained = trained_adapter(job)
    assert trained.settings.target_modules == ["down_proj", "o_proj"]
    assert trained.metadata.block_size == 6
    assert trained.metadata.base.name == "some/model"


def test_masks_of_a_model_with_states_learn_and_its_tokens_do_not(job_of, tmp_path):
    start = write_start(tmp_path / "start", **STATES)
    job = job_of(start=start, precision="bf16", gradient_checkpointing=True)
    outcome = run_stage(job)
    assert outcome.error is None
    assert np.mean(outcome.losses[-2:]) < np.mean(outcome.losses[:2]) - 0.5
    model = load_weights(adapt(read_checkpoint(start), trained_adapter(job)), dtype=torch.float32)
    assert torch.equal(logits_of(model), logits_of(load_model(start)))


def test_the_mask_starts_as_the_row_of_a_model_that_knows_it(job_of, start, tmp_path):
    checkpoint, model = read_checkpoint(start), load_model(start)
    mask_id, _ = add_mask_token(model, checkpoint.tokenizer)
    with torch.no_grad():
        model.get_input_embeddings().weight[mask_id] = 0.25
    metadata = MarsMetadata(block_size=4, mask_token_id=mask_id)
    known = tmp_path / "known"
    save_checkpoint(known, model, checkpoint.tokenizer, metadata)
    job = job_of(start=known, stage={"max_steps": 1, "learning_rate": 1e-6})
    assert run_stage(job).finished
    adapter = trained_adapter(job)
    adapted = load_weights(adapt(read_checkpoint(known), adapter), dtype=torch.float32)
    row = adapted.get_input_embeddings().mask_row
    torch.testing.assert_close(row, torch.full_like(row, 0.25), rtol=0, atol=1e-4)


@pytest.mark.parametrize("spare_row", [True, False])
def test_the_engine_scores_the_model_with_its_adapter(job_of, start, tmp_path, spare_row):
    checkpoint, model = read_checkpoint(start), load_model(start)
    if not spare_row:
        model.resize_token_embeddings(len(checkpoint.tokenizer))
    path = tmp_path / "start"
    save_checkpoint(path, model, checkpoint.tokenizer, None)
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "1 2 3 3 2 1"}]
    file = tmp_path / "held-out.jsonl"
    file.write_text(json.dumps({"messages": turns, "answer": "1"}) + "\n")
    settings = EvaluationSettings(data=[str(file)], max_tokens=8, thresholds=(0.01,), every_steps=4)
    held_out = read_held_out(settings, DataSettings(train=["-"], max_length=48), checkpoint)
    evaluation = settings.model_dump(mode="json")
    outcome = run_stage(
        job_of(start=path, held_out=held_out, stage={"max_steps": 8}, evaluation=evaluation)
    )
    assert outcome.error is None
    assert not outcome.reporter.warned
    first, *_, last = outcome.history.scores
    assert last.loss_by_depth[0] == first.loss_by_depth[0]  # the AR loss
    assert last.loss_by_depth[1:] != first.loss_by_depth[1:]
    assert last.thresholds[1].tokens_per_forward > 1.5


def test_a_target_module_that_the_model_lacks_is_refused(job_of):
    job = job_of(stage={"adapter": {"target_modules": ["query"]}})
    assert "the model has no linear layer called 'query'" in run_stage(job).error
