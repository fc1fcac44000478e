"""Stages that train a draft head: alone, with an adapter and with the whole model."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from peft import PeftModel

from mars_platform.checkpoint.adapted import load_weights, read_model
from mars_platform.checkpoint.adapter.draft_head import draft_head_of
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.metadata import DraftHeadSettings, MarsMetadata
from mars_platform.checkpoint.weights import add_mask_token, load_model, save_checkpoint
from mars_train.data.token_store import TokenStoreWriter
from mars_train.method.layout import collate, lay_out
from mars_train.method.objective import Objective
from mars_train.recipe import MarsStage
from mars_train.stage.trainer import MODEL, plain_share_of
from mars_train.storage.directories import Storage
from stage_runs import PROBE, build_job, run_stage, write_start

HEAD = {"rank": 8, "kind": "gated", "learning_rate": 0.1}
LENGTH, PROMPT = 32, 4


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return write_start(tmp_path_factory.mktemp("start") / "start")


@pytest.fixture(scope="module")
def masked_start(start, tmp_path_factory):
    """A MARS checkpoint whose masks predict nothing."""
    model, tokenizer = load_model(start), read_checkpoint(start).tokenizer
    mask_id, _ = add_mask_token(model, tokenizer)
    path = tmp_path_factory.mktemp("masked") / "start"
    save_checkpoint(path, model, tokenizer, MarsMetadata(block_size=4, mask_token_id=mask_id))
    return path


def pairs(num, seed=0):
    """Rows of pairs, such as (11, 21) (13, 23): one of four tokens at random, and its partner."""
    first = np.random.default_rng(seed).integers(10, 14, (num, LENGTH // 2))
    return np.stack([first, first + 10], axis=2).reshape(num, LENGTH)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path, num = tmp_path_factory.mktemp("data") / "data", 160
    with TokenStoreWriter(path) as writer:
        writer.append(
            keys=np.stack([np.zeros(num, np.int64), np.arange(num)], axis=1),
            lengths=np.full(num, LENGTH, np.int32),
            tokens=pairs(num).flatten().astype(np.int32),
            supervised=np.tile(np.arange(LENGTH) >= PROMPT, num),
        )
        writer.finish()
    return path


@torch.inference_mode()
def logits_of(model):
    return model(input_ids=PROBE, use_cache=False).logits


@torch.no_grad()
def losses_on_new_pairs(model, mask_id):
    """Return the mean clean and noisy loss of labels on rows that nothing was trained on."""
    supervised = np.arange(LENGTH) >= PROMPT
    layouts = [lay_out(row, supervised, 4, mask_id) for row in pairs(8, seed=1)]
    losses = Objective(model, masked=True).label_losses(collate([layouts], 0))
    return [each.mean() for each in losses]


def stored(job):
    return Storage(job.storage).fetch(MODEL)


def test_a_head_alone_learns_what_masks_cannot_know(masked_start, data, tmp_path):
    stage = {"draft_head": HEAD, "train": "head", "distillation": None, "max_steps": 40}
    job = build_job(tmp_path / "run", masked_start, data, stage=stage)
    outcome = run_stage(job)
    assert outcome.error is None
    # Half of the tokens are drawn from four. Their partners are predicted by masks in the very
    # places of these, so that masks alone cannot know any token better than by one in four.
    assert np.mean(outcome.losses[-5:]) < 0.8 * math.log(4)
    model = load_weights(read_checkpoint(stored(job)), dtype=torch.float32)
    start = load_model(masked_start)
    for name, weight in start.named_parameters():
        assert torch.equal(model.get_parameter(name), weight), name
    mask_id = read_checkpoint(masked_start).metadata.mask_token_id
    clean, noisy = losses_on_new_pairs(model, mask_id)
    clean_before, noisy_before = losses_on_new_pairs(start, mask_id)
    assert torch.equal(clean, clean_before)
    assert noisy < noisy_before - 1
    ours = draft_head_of(model)
    assert torch.equal(ours.following, outcome.weights["draft_head.following"])
    assert ours.following.any()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # in peft
def test_a_resumed_run_with_adapter_and_head_equals_an_uninterrupted_one(start, data, tmp_path):
    stage = {"adapter": {"rank": 4}, "draft_head": HEAD, "learning_rate": 0.01, "max_steps": 6}
    jobs = [
        build_job(tmp_path / name, start, data, stage=stage, workers=2, strategy="fsdp2")
        for name in ("straight", "resumed")
    ]
    straight = run_stage(jobs[0])
    assert straight.error is None
    assert run_stage(jobs[1], stop_at=4).finished is False
    resumed = run_stage(jobs[1])
    assert resumed.history == straight.history
    for name, weight in straight.weights.items():
        assert torch.equal(resumed.weights[name], weight), name
    checkpoint = read_model(start, stored(jobs[0]))
    assert checkpoint.metadata.draft_head == DraftHeadSettings(rank=8)
    model = load_weights(checkpoint, dtype=torch.float32)
    assert draft_head_of(model).gate.any()
    assert torch.equal(logits_of(model), logits_of(load_model(start)))
    assert PeftModel.from_pretrained(load_model(start), stored(jobs[0])).peft_config


def test_the_loss_moves_from_plain_masks_to_the_head_over_the_first_half():
    def shares(**values):
        stage = MarsStage.model_validate({"objective": "mars", **values})
        return [plain_share_of(stage, progress) for progress in (0, 0.25, 0.5, 0.75)]

    assert shares(draft_head=HEAD) == shares(draft_head=HEAD, adapter={}) == [1.0, 0.5, 0.0, 0.0]
    assert shares(draft_head=HEAD, train="head") == shares() == [0.0] * 4


def test_a_head_is_trained_with_the_whole_model(start, data, tmp_path):
    losses = []
    for workers in (1, 2):
        stage = {"draft_head": {**HEAD, "kind": "static"}, "max_steps": 3}
        job = build_job(tmp_path / str(workers), start, data, stage=stage, workers=workers)
        outcome = run_stage(job)
        assert outcome.error is None
        losses.append(outcome.losses)
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-4)
    assert json.loads((stored(job) / "mars.json").read_text())["draft_head"] == {
        "rank": 8,
        "kind": "static",
    }
    model = load_weights(read_checkpoint(stored(job)), dtype=torch.float32)
    assert draft_head_of(model).following.any()
    assert torch.equal(logits_of(model), outcome.logits)


def test_a_stage_without_masks_leaves_a_head_out(masked_start, data, tmp_path):
    stage = {"draft_head": HEAD, "train": "head", "distillation": None, "max_steps": 1}
    first = build_job(tmp_path / "first", masked_start, data, stage=stage)
    assert run_stage(first).error is None
    job = build_job(tmp_path / "ar", stored(first), data, stage={"objective": "ar", "max_steps": 1})
    assert run_stage(job).error is None
    checkpoint = read_checkpoint(stored(job))
    assert checkpoint.metadata.draft_head is None
    assert draft_head_of(load_weights(checkpoint, dtype=torch.float32)) is None
