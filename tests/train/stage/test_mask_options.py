"""Options of a MARS stage in the trainer: resumed, shared by workers, and on written responses."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mars_platform.checkpoint.metadata import read_metadata
from mars_platform.checkpoint.weights import load_model
from mars_train.data.token_store import TokenStore, block_offsets, block_sizes, step_rows
from mars_train.method.batches import StageBatches
from mars_train.method.layout import collate, lay_out
from mars_train.method.objective import MaskLoss, Objective
from mars_train.stage.trainer import MODEL
from mars_train.storage.directories import Storage
from stage_runs import STATES, build_job, run_stage, write_rows, write_start

ALL = {
    "block_size": [2, 3, 8],
    "distillation": {"weight": 0.5, "target": "argmax"},
    "max_steps": 4,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A start model, data, and fewer responses than data."""
    path = tmp_path_factory.mktemp("made")
    start = write_start(path / "start")
    return start, write_rows(path / "data", 100), write_rows(path / "responses", 60, seed=1)


@pytest.fixture
def job_of(made, tmp_path):
    start, data, responses = made

    def build(name="run", *, stage=(), on_responses=True, **rest):
        job = build_job(tmp_path / name, start, data, stage=ALL | dict(stage), **rest)
        return replace(job, responses=str(responses) if on_responses else None)

    return build


def test_a_run_with_all_options_resumes_bit_for_bit_and_scales(job_of):
    straight = run_stage(job_of("straight"))
    stopped = run_stage(job_of(), stop_at=3)
    assert (stopped.error, stopped.finished) == (None, False)
    resumed = run_stage(job_of())
    assert resumed.history == straight.history
    for name, weight in straight.weights.items():
        assert torch.equal(resumed.weights[name], weight), name
    sharded = run_stage(job_of("sharded", workers=2, strategy="fsdp2"))
    np.testing.assert_allclose(sharded.losses, straight.losses, rtol=0, atol=1e-4)


def test_a_model_with_states_learns_and_scales(job_of, tmp_path):
    start = write_start(tmp_path / "start", **STATES)
    stage = {"max_steps": 8, "learning_rate": 0.02, "micro_batch_size": 16}
    jobs = [
        replace(job_of(name, stage=stage, **rest), start=str(start))
        for name, rest in [
            ("straight", {}),
            ("sharded", {"workers": 2, "strategy": "fsdp2", "gradient_checkpointing": True}),
        ]
    ]
    straight, sharded = (run_stage(job) for job in jobs)
    assert straight.error is None
    first, *_, last = straight.history.steps
    assert last.noisy_loss < first.noisy_loss - 0.3
    assert last.clean_loss < first.clean_loss - 0.3
    np.testing.assert_allclose(sharded.losses, straight.losses, rtol=0, atol=1e-4)


def test_other_responses_are_other_data(job_of, made, tmp_path):
    assert run_stage(job_of(), stop_at=2).finished is False
    other = replace(job_of(), responses=str(write_rows(tmp_path / "other", 60, seed=2)))
    assert "belongs to another run, which differs in its data" in run_stage(other).error


def mean_losses(job):
    """Return the clean and noisy loss of the first step, one conversation at a time."""
    mask_id = read_metadata(Storage(job.storage).fetch(MODEL)).mask_token_id
    model = load_model(job.start).train()
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[mask_id] = weight[:mask_id].mean(dim=0)
    objective = Objective(model, masked=True, mask_loss=MaskLoss(0.5, "argmax"))
    data = TokenStore(Path(job.data))
    written = data if job.responses is None else TokenStore(Path(job.responses))
    epoch, rows = step_rows(len(data), 16, job.recipe.seed, 0)
    sizes = block_sizes(rows, job.recipe.seed, epoch, (2, 3, 8))
    assert set(sizes) == {2, 3, 8}
    offsets = block_offsets(rows, job.recipe.seed, epoch, sizes)
    sums, counts = np.zeros(2), np.zeros(2)
    for row, size, offset in zip(rows.tolist(), sizes.tolist(), offsets.tolist(), strict=True):
        masked = lay_out(*written[row % len(written)], size, mask_id, offset)
        if job.responses is None:
            batch = collate([[masked]], 0)
            clean, noisy = objective(batch)
            counts += len(batch.labels)
        else:
            plain = collate([[lay_out(*data[row], None, mask_id)]], 0)
            clean = objective(plain).clean
            noisy = objective(collate([[masked]], 0)).noisy
            at_0 = masked.depths == 0  # the clean loss of a text that the model wrote
            losses, _ = objective.label_losses(collate([[masked]], 0))
            noisy = noisy - losses[torch.from_numpy(at_0)].sum()
            counts += len(plain.labels), len(masked.labels)
        sums += clean.item(), noisy.item()
    return sums / counts


@pytest.mark.parametrize("on_responses", [False, True])
def test_a_step_takes_each_loss_on_its_own_conversations(job_of, on_responses):
    job = job_of(stage={"max_steps": 1}, on_responses=on_responses)
    (record,) = run_stage(job).history.steps
    clean, noisy = mean_losses(job)
    assert record.clean_loss == pytest.approx(clean, abs=1e-5)
    assert record.noisy_loss == pytest.approx(noisy, abs=1e-5)
    assert read_metadata(Storage(job.storage).fetch(MODEL)).block_size == 8


@pytest.mark.parametrize("on_responses", [False, True])
def test_a_stage_with_an_adapter_has_no_clean_loss(job_of, on_responses):
    job = job_of(on_responses=on_responses)
    responses = None if job.responses is None else TokenStore(Path(job.responses))
    batches = StageBatches(
        data=TokenStore(Path(job.data)),
        stage=job.stage,
        seed=0,
        rank=0,
        num_workers=1,
        block_sizes=(4,),
        mask_token_id=251,
        pad_token_id=0,
        multiple_of=1,
        clean_loss=False,
        responses=responses,
    )
    step = next(batches.from_step(0))
    assert sum(batch.num_clean for batch in step) == 0
    assert all(batch.num_noisy == len(batch.labels) > 0 for batch in step)
