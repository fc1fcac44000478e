import json
import math
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

from decoding.adapters import write_adapter
from decoding.engine_requests import make_request
from decoding.engines import output_of, run
from decoding.wrappers import WRAPPERS, build_wrapper
from mars_platform.checkpoint.adapted import read_model
from mars_platform.checkpoint.directory import SpecialTokens, read_checkpoint
from mars_platform.checkpoint.metadata import read_metadata
from mars_platform.checkpoint.weights import load_model
from mars_platform.method.mode import Mode
from mars_serve.cli.doctor.libraries import torch_findings
from mars_serve.engine.engine import Engine
from mars_serve.engine.settings import EngineSettings
from mars_train.data.token_store import TokenStore, TokenStoreWriter, block_offsets, step_rows
from mars_train.method.batches import num_steps
from mars_train.method.layout import collate, lay_out
from mars_train.method.objective import Objective
from mars_train.run.scratch import train_tokenizer
from mars_train.stage.trainer import MODEL
from mars_train.storage.directories import Storage
from stage_runs import PROBE, build_job, run_stage, write_rows, write_start

NUM_ROWS = 100


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return write_start(tmp_path_factory.mktemp("start") / "start")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "data", NUM_ROWS)


@pytest.fixture
def job_of(tmp_path, start, data):
    """Build jobs of 8 steps; jobs of the same name share their checkpoints."""

    def build(name="run", *, stage=(), start=start, data=data, **rest):
        stage = {"max_steps": 8, **dict(stage)}
        return build_job(tmp_path / name, start, data, stage=stage, **rest)

    return build


@pytest.fixture(scope="module")
def straight(tmp_path_factory, start, data):
    """Run jobs without interruption and return their outcomes."""

    @cache
    def run(workers=1, strategy="ddp", max_steps=8):
        path, stage = tmp_path_factory.mktemp("straight") / "run", {"max_steps": max_steps}
        job = build_job(path, start, data, stage=stage, workers=workers, strategy=strategy)
        return run_stage(job)

    return run


def test_a_model_that_packed_rows_change_is_refused_by_name(job_of, tmp_path):
    layers = {"attn_layer_offset": 1, "attn_layer_period": 2}
    start = write_start(tmp_path / "jamba", family="jamba", **layers)
    error = run_stage(job_of(start=start)).error
    assert error.startswith("model: it is of the family 'jamba', and something besides attention ")


def assert_equal(ours, expected):
    """Compare histories and weights bit for bit."""
    assert ours.error is None
    assert ours.finished
    assert ours.history == expected.history
    assert ours.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert torch.equal(ours.weights[name], weight), name


def assert_close(ours, expected, num_steps):
    assert ours.error is None
    assert len(ours.losses) == len(expected.losses) == num_steps
    np.testing.assert_allclose(ours.losses, expected.losses, rtol=0, atol=1e-5)


def assert_same_weights(ours, expected, atol):
    for name, weight in expected.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=0, atol=atol)


def state_of(job, name):
    directory = Storage(job.storage).fetch(name)
    return {k: v for file in directory.glob("shard-*") for k, v in load_file(file).items()}


def flip_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


# --- splitting a step -----------------------------------------------------------------------------


def test_workers_and_micro_batches_do_not_change_the_losses(straight):
    one, two = straight(1), straight(2)  # one worker accumulates 4 micro-batches
    three, sharded = straight(3), straight(2, "fsdp2")
    assert_close(two, one, 8)
    assert_close(three, one, 8)  # shares of 5, 5 and 6
    assert_close(sharded, two, 8)
    assert_same_weights(sharded, two, atol=1e-5)
    assert_same_weights(three, one, atol=1e-3)  # Adam enlarges rounding where gradients vanish
    assert one.losses[-1] < one.losses[0] - 0.3
    assert [s.num_tokens for s in three.history.steps] == [s.num_tokens for s in one.history.steps]


def test_the_first_step_is_the_mean_over_the_labels_of_its_conversations(job_of, start, data):
    stage = {"block_size": 3, "ar_weight": 0.7, "max_steps": 1, "max_grad_norm": 1e9}
    job = job_of(stage=stage, workers=2)
    outcome = run_stage(job)
    mask_id = read_metadata(Storage(job.storage).fetch(MODEL)).mask_token_id
    model = load_model(start).train()
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[mask_id] = weight[:mask_id].mean(dim=0)
    objective, store = Objective(model, masked=True), TokenStore(data)
    _, rows = step_rows(len(store), 16, job.recipe.seed, 0)
    offsets = block_offsets(rows, job.recipe.seed, 0, 3)
    clean = noisy = num_labels = num_tokens = 0
    for row, offset in zip(rows, offsets, strict=True):
        batch = collate([[lay_out(*store[int(row)], 3, mask_id, int(offset))]], 0)
        sums = objective(batch)
        clean, noisy = clean + sums.clean, noisy + sums.noisy
        num_labels, num_tokens = num_labels + batch.num_clean, num_tokens + batch.num_tokens
    loss = (noisy + 0.7 * clean) / num_labels
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    (step,) = outcome.history.steps
    assert step.loss == pytest.approx(loss.item(), abs=1e-5)
    assert step.clean_loss == pytest.approx(clean.item() / num_labels, abs=1e-5)
    assert step.noisy_loss == pytest.approx(noisy.item() / num_labels, abs=1e-5)
    assert step.gradient_norm == pytest.approx(norm.item(), rel=1e-4)
    assert step.num_tokens == num_tokens


def test_an_ar_stage_trains_the_clean_stream_alone(job_of):
    job = job_of(stage={"objective": "ar", "max_steps": 3})
    outcome = run_stage(job)
    assert all(s.noisy_loss == 0 and s.loss == s.clean_loss > 0 for s in outcome.history.steps)
    assert read_metadata(Storage(job.storage).fetch(MODEL)) is None


def test_the_incomplete_last_batch_of_an_epoch_is_dropped(job_of):
    stage = job_of(stage={"max_steps": None, "batch_size": 30, "epochs": 3}).stage
    assert num_steps(stage, NUM_ROWS) == 9
    assert num_steps(stage, 29) == 0
    assert num_steps(job_of(stage={"max_steps": 5}).stage, NUM_ROWS) == 5


# --- resuming -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "strategy"), [(3, "ddp"), (2, "fsdp2")])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(job_of, straight, workers, strategy):
    scaling = {"workers": workers, "strategy": strategy}
    stopped = run_stage(job_of("resumed", **scaling), stop_at=5)
    assert stopped.finished is False
    assert len(stopped.losses) == 5
    resumed = run_stage(job_of("resumed", **scaling))
    assert "resumed from " in resumed.reporter.said[0]
    assert "step-00000005" in resumed.reporter.said[0]
    assert_equal(resumed, straight(workers, strategy))


def test_stops_at_an_epochs_end_and_in_the_middle_of_one_change_nothing(job_of):
    epochs = {"max_steps": None, "epochs": 3, "batch_size": 25}  # 4 steps each
    expected = run_stage(job_of("straight", stage=epochs))
    for stop_at in (4, 6):
        stopped = run_stage(job_of("resumed", stage=epochs), stop_at=stop_at)
        assert len(stopped.losses) == stop_at
    resumed = run_stage(job_of("resumed", stage=epochs))
    assert "step-00000006" in resumed.reporter.said[0]
    assert_equal(resumed, expected)
    tokens = [step.num_tokens for step in resumed.history.steps]
    assert len(tokens) == 12
    per_epoch = [sum(tokens[i : i + 4]) for i in (0, 4, 8)]
    predicted = TokenStore(Path(job_of().data)).num_tokens - NUM_ROWS  # none behind the last token
    assert per_epoch == [predicted] * 3
    assert tokens[:4] != tokens[4:8]


def test_a_resumed_run_draws_the_same_dropout(job_of, straight, tmp_path):
    start = write_start(tmp_path / "start", attention_dropout=0.2)
    uninterrupted = run_stage(job_of("straight", start=start))
    run_stage(job_of("resumed", start=start), stop_at=5)
    assert_equal(run_stage(job_of("resumed", start=start)), uninterrupted)
    assert uninterrupted.losses[0] != straight().losses[0]


def test_a_run_resumes_with_another_number_of_workers(job_of, straight):
    run_stage(job_of("resumed", workers=2, strategy="fsdp2"), stop_at=3)
    stopped = run_stage(job_of("resumed", workers=3), stop_at=6)
    assert "step-00000003" in stopped.reporter.said[0]
    resumed = run_stage(job_of("resumed", workers=2, strategy="fsdp2"))
    assert "step-00000006, with 2 workers after 3; " in resumed.reporter.said[0]
    assert_close(resumed, straight(), 8)


def test_the_checkpoint_before_a_damaged_one_is_used(job_of, straight):
    job = job_of("resumed", workers=2, checkpoints={"every_steps": 3})
    run_stage(job, stop_at=7)
    storage = Storage(job.storage)
    assert storage.names() == ["step-00000006", "step-00000007"]
    flip_bit(storage.fetch("step-00000007") / "shard-00001-of-00002.safetensors")
    resumed = run_stage(job)
    (warning,) = resumed.reporter.warned
    assert f"{job.storage}/step-00000007 is damaged and not used: shard-00001-of-00002" in warning
    assert "step-00000006" in resumed.reporter.said[0]
    assert_equal(resumed, straight(workers=2))


def test_a_run_restarts_if_all_its_checkpoints_are_damaged_or_incomplete(job_of, straight):
    job = job_of("resumed", checkpoints={"every_steps": 3})
    run_stage(job, stop_at=7)
    storage = Storage(job.storage)
    for name in storage.names():
        (storage.fetch(name) / "history.json").unlink()
    incomplete = Path(storage.path(".partial-step-00000008-abc"))
    shutil.copytree(storage.path("step-00000007"), incomplete)
    resumed = run_stage(job)
    assert not incomplete.exists()
    assert [text.count("history.json is missing") for text in resumed.reporter.warned] == [1, 1]
    assert resumed.reporter.said == []
    assert_equal(resumed, straight())


def test_a_finished_run_is_not_trained_again(job_of):
    job = job_of()
    finished = run_stage(job)
    again = run_stage(job)
    assert "step-00000008" in again.reporter.said[0]
    assert_equal(again, finished)
    assert Storage(job.storage).names() == [MODEL, "step-00000008"]


def test_checkpoints_of_another_run_are_refused(job_of, tmp_path):
    run_stage(job_of(), stop_at=3)
    other = run_stage(job_of(stage={"learning_rate": 1e-3}, seed=1))
    assert "step-00000003 belongs to another run, which differs in stages, seed; " in other.error
    data = write_rows(tmp_path / "data", NUM_ROWS, seed=1)
    assert "differs in its data; name another storage" in run_stage(job_of(data=data)).error


# --- checkpoints ----------------------------------------------------------------------------------


def test_the_newest_checkpoints_are_kept_with_the_recipe(job_of):
    job = job_of(checkpoints={"every_steps": 2, "keep": 2}, stage={"max_steps": 7})
    outcome = run_stage(job, save_at=(3, 4))
    saved = [m["step"] for m in outcome.reporter.reported if "checkpoint" in m]
    assert saved == [2, 3, 4, 6, 7]
    storage = Storage(job.storage)
    assert storage.names() == [MODEL, "step-00000006", "step-00000007"]
    for name in storage.names():
        storage.verify(name)
    state = json.loads((storage.fetch("step-00000007") / "state.json").read_text())
    assert state["recipe"] == job.recipe.model_dump(mode="json")
    assert state["step"] == 7


def test_a_full_disk_skips_a_checkpoint_and_keeps_the_one_before(job_of, straight):
    job = job_of("full", workers=2, checkpoints={"every_steps": 3})
    outcome = run_stage(job, full_disk_at=(6,))
    (warning,) = outcome.reporter.warned
    assert warning.startswith("checkpoint skipped: ")
    assert "step-00000006 could not be written: " in warning
    assert_equal(outcome, straight(workers=2))
    storage = Storage(job.storage)
    assert storage.names() == [MODEL, "step-00000003", "step-00000008"]
    for name in storage.names():
        storage.verify(name)
    assert not list(storage.fetch(MODEL).parent.glob(".*"))


def test_a_full_disk_at_the_end_fails_a_run_that_can_be_resumed(job_of, straight):
    job = job_of("full", checkpoints={"every_steps": 3})
    outcome = run_stage(job, full_disk_at=(8,))
    assert "step-00000008 could not be written: " in outcome.error
    assert outcome.error.endswith("; make room and run again")
    assert_equal(run_stage(job), straight())


# --- non-finite steps -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A start model, and data with one conversation that makes the loss NaN."""
    path = tmp_path_factory.mktemp("poisoned")
    start = write_start(path / "start", tie_word_embeddings=False)
    weights = load_file(start / "model.safetensors")
    weights["model.embed_tokens.weight"][1] = math.nan
    save_file(weights, start / "model.safetensors", metadata={"format": "pt"})
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, 250, (24, 12)).astype(np.int32)
    tokens[7, 2] = 1
    with TokenStoreWriter(path / "data") as writer:
        keys = np.stack([np.zeros(24, np.int64), np.arange(24)], axis=1)
        supervised = np.tile(np.arange(12) >= 5, 24)
        writer.append(keys, np.full(24, 12, np.int32), tokens.flatten(), supervised)
        writer.finish()
    return {"start": start, "data": path / "data"}


SMALL = {"batch_size": 4, "micro_batch_size": 2}
POISONED_STAGE = {"objective": "ar", "epochs": 2, "max_steps": 12, **SMALL}


def poisoned_steps(seed):
    """Return the steps, from 0, whose batch holds the conversation; there is one in each epoch."""
    return [step for step in range(12) if 7 in step_rows(24, 4, seed, step)[1]]


def test_a_non_finite_step_is_skipped_and_counted(job_of, poisoned):
    job = job_of(
        stage=POISONED_STAGE,
        workers=2,
        strategy="fsdp2",
        checkpoints={"every_steps": 1, "keep": 99},
        **poisoned,
    )
    outcome = run_stage(job)
    bad = poisoned_steps(job.recipe.seed)
    assert len(bad) == 2
    assert [i for i, step in enumerate(outcome.history.steps) if step.skipped] == bad
    assert [math.isnan(loss) for loss in outcome.losses] == [i in bad for i in range(12)]
    assert [f"step {i + 1}: " in w for i, w in zip(bad, outcome.reporter.warned, strict=True)]
    for step in range(1, 12):
        before, after = (state_of(job, f"step-{i:08d}") for i in (step, step + 1))
        same = [torch.equal(before[k], after[k]) for k in after if "embed_tokens" not in k]
        assert all(same) == (step in bad), step


def test_too_many_non_finite_steps_fail_the_run(job_of, poisoned):
    job = job_of(stage=POISONED_STAGE, max_nonfinite_steps=1, **poisoned)
    outcome = run_stage(job)
    last = poisoned_steps(job.recipe.seed)[1] + 1
    assert outcome.error == (
        "stage ar: loss or gradient was not finite in 2 steps, the last of them step "
        f"{last}, and max_nonfinite_steps allows 1; lower learning_rate, or look for broken data"
    )
    assert len(outcome.losses) == last


def test_a_run_whose_steps_were_all_skipped_resumes(job_of, tmp_path, data):
    start = write_start(tmp_path / "start")
    weights = load_file(start / "model.safetensors")
    weights["model.norm.weight"][:] = math.nan
    save_file(weights, start / "model.safetensors", metadata={"format": "pt"})
    run_stage(job_of(start=start, max_nonfinite_steps=99), stop_at=2)
    resumed = run_stage(job_of(start=start, max_nonfinite_steps=99))
    assert resumed.finished
    assert resumed.history.num_skipped == 8


# --- models and precisions ------------------------------------------------------------------------


SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "llama": {},
    "mistral": {},
    "gpt_oss": {**SLIDING, "num_local_experts": 2, "num_experts_per_tok": 1},
    "gemma4_text": {
        **SLIDING,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_transformers_load_the_trained_model(job_of, tmp_path, family):
    settings = {"tie_word_embeddings": False, **FAMILIES[family]}
    start = write_start(tmp_path / "start", family=family, **settings)
    job = job_of(start=start, stage={"max_steps": 1})
    outcome = run_stage(job)
    path = Storage(job.storage).fetch(MODEL)
    model, loading = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(loading.values())
    assert model.config.model_type == family
    with torch.no_grad():
        torch.testing.assert_close(model(PROBE).logits, outcome.logits)
        assert not torch.allclose(load_model(start)(PROBE).logits, outcome.logits, atol=1e-3)
    metadata = read_metadata(path)
    assert metadata.block_size == job.stage.block_size
    assert metadata.provenance == {"embedding_grown": False}
    assert (path / "history.json").exists()


def test_gradient_checkpointing_does_not_change_the_losses(job_of, straight):
    plain = straight(max_steps=3)
    for strategy in ("ddp", "fsdp2"):
        scaling = {"workers": 2, "strategy": strategy, "gradient_checkpointing": True}
        assert_close(run_stage(job_of(strategy, stage={"max_steps": 3}, **scaling)), plain, 3)


def test_bf16_is_close_to_float32(job_of, straight):
    plain = straight(max_steps=3)
    for strategy in ("ddp", "fsdp2"):
        scaling = {"workers": 2, "strategy": strategy, "precision": "bf16"}
        rounded = run_stage(job_of(strategy, stage={"max_steps": 3}, **scaling))
        np.testing.assert_allclose(rounded.losses, plain.losses, rtol=0.01)
        assert rounded.losses != plain.losses
        assert all(weight.dtype == torch.float32 for weight in rounded.weights.values())


# --- multimodal models ----------------------------------------------------------------------------

QUICK = ("gemma3", "gemma4")
"""Wrappers that every run trains: names of tensors of old checkpoints, and two embeddings."""
ROWS = {"vocab_size": 320, "vocab_size_per_layer_input": 320}


def write_wrapper(path, family):
    """Write a checkpoint in bfloat16 and with the names of tensors of published ones."""
    model = build_wrapper(family, **ROWS)
    for parameter in model.parameters():  # no buffers: some are complex numbers
        parameter.data = parameter.data.bfloat16()
    model.save_pretrained(path)
    if family == "gemma3":
        old, new = "vision_tower.", "vision_tower.vision_model."
        weights = load_file(path / "model.safetensors")
        published = {name.replace(old, new): weight for name, weight in weights.items()}
        save_file(published, path / "model.safetensors", metadata={"format": "pt"})
    train_tokenizer(["1 2 3"], 264).save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps({"size": 28}))
    return path


def served(checkpoint, mode):
    """The output of an engine, and the number of its weights."""
    special = SpecialTokens(frozenset(), checkpoint.special.never_emitted)
    settings = EngineSettings(num_pages=40, page_size=4, max_num_seqs=2)
    engine = Engine(replace(checkpoint, special=special), settings)
    request = make_request("one", range(20, 40), 12, mode=mode)
    run(engine, [request])
    return output_of(request), engine.num_parameters


def generated(model, checkpoint):
    ids = torch.arange(20, 40)[None]
    banned = sorted(checkpoint.special.never_emitted)
    how = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), suppress_tokens=banned, **how)
    return output[0, 20:].tolist()


def text_model(path, family):
    """The model that transformers generates text with: Llama 4's wrapper fails in 5.24."""
    loader = AutoModelForCausalLM if family == "llama4" else AutoModelForMultimodalLM
    return loader.from_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize(
    "family",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.full) for each in WRAPPERS],
)
def test_the_text_part_is_trained_and_served_and_the_rest_is_kept(tmp_path, data, family):
    start = write_wrapper(tmp_path / "start", family)
    job = build_job(tmp_path / "run", start, data, stage={"max_steps": 2, "batch_size": 4})
    outcome = run_stage(job)
    assert outcome.error is None
    path = Storage(job.storage).fetch(MODEL)
    whole, loading = AutoModelForMultimodalLM.from_pretrained(path, output_loading_info=True)
    assert not any(loading.values())
    before, after = load_file(start / "model.safetensors"), load_file(path / "model.safetensors")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        is_equal = torch.equal(weight.float(), after[name].float())
        if "language_model" not in name:
            assert is_equal, name
            assert after[name].dtype == torch.bfloat16
        elif name.endswith("q_proj.weight"):
            assert not is_equal
    copied = "preprocessor_config.json"
    assert (path / copied).read_bytes() == (start / copied).read_bytes()

    checkpoint, model = read_checkpoint(path), text_model(path, family)
    torch.testing.assert_close(model(torch.arange(3, 40)[None]).logits, outcome.logits)
    expected = generated(model, checkpoint)
    for mode in (Mode.AR, Mode.EXACT):
        output, num_parameters = served(checkpoint, mode)
        assert output == expected
        assert num_parameters < whole.num_parameters()
    states = {finding.check: finding.state for finding in torch_findings(path)}
    assert states["checkpoint"] == "ok"


@pytest.mark.parametrize("family", ["gemma4", "llama4"])
def test_an_adapter_of_a_multimodal_model_is_served(tmp_path, family):
    start = write_wrapper(tmp_path / "start", family)
    adapted = read_model(start, write_adapter(start, tmp_path / "adapter"))
    assert served(adapted, Mode.EXACT)[0] == generated(text_model(start, family), adapted)
