"""Checks the files, scores and printed lines of both stages on two gloo workers."""

from __future__ import annotations

import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.metadata import MASK_TOKEN
from mars_platform.checkpoint.weights import add_mask_token, load_model
from mars_platform.config import load_settings
from mars_platform.data.rendering import render_prompt
from mars_platform.method.mode import Mode
from mars_serve.cli.completion import generate_once
from mars_serve.cli.options import GenerateOptions
from mars_train.data.token_store import TokenStore
from mars_train.method.layout import collate, lay_out, pack
from mars_train.method.objective import Objective
from mars_train.recipe import Recipe
from mars_train.stage.history import read_history

EXPECTED_FILES = {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}


def test_the_last_stage_leaves_a_mars_checkpoint(trained):
    checkpoint = read_checkpoint(trained.model)
    assert EXPECTED_FILES.issubset(file.name for file in trained.model.iterdir())
    assert checkpoint.metadata.block_size == 4
    assert (
        checkpoint.tokenizer.convert_ids_to_tokens(checkpoint.metadata.mask_token_id) == MASK_TOKEN
    )
    assert checkpoint.metadata.provenance["stage"] == "mars"
    assert checkpoint.metadata.provenance["embedding_grown"] is False


def test_the_first_stage_leaves_a_plain_ar_checkpoint(trained):
    assert read_checkpoint(trained.ar_model).metadata is None


def test_the_kept_recipe_is_that_of_the_provenance(trained):
    kept = load_settings(trained.output / "recipe.yaml", Recipe)
    provenance = read_checkpoint(trained.model).metadata.provenance["recipe"]
    assert kept == Recipe.model_validate(provenance)


def test_every_row_is_stored_and_counted(trained):
    store = TokenStore(trained.output / "data")
    assert len(store) == 4000
    assert (trained.output / "report.jsonl").read_text() == ""
    assert (
        f"data: 1 file, 4,000 rows of messages; 4,000 conversations, {store.num_tokens:,} tokens"
        in trained.printed
    )


def test_the_run_leaves_its_curves_and_no_temporary_files(trained):
    assert (trained.output / "curves.png").read_bytes().startswith(b"\x89PNG")
    left = {item.name for item in trained.output.iterdir()}
    assert left == {
        *("model", "stages", "data", "report.jsonl", "recipe.yaml", "curves.png", ".lock"),
        *("tracking", "tracking.json"),
    }


def test_trackers_get_every_step_and_score(trained):
    state = json.loads((trained.output / "tracking.json").read_text())
    steps = {"ar/loss": 120, "ar/eval/accuracy_1": 120, "mars/loss": 180}
    assert steps.items() <= state["sent"].items()
    assert len(list((trained.output / "tracking" / "out").iterdir())) == 1


def test_every_step_and_score_is_in_the_history(trained):
    history = read_history(trained.model / "history.json")
    assert len(history.steps) == 60
    assert [score.step for score in history.scores] == [0, 60]
    start, end = history.scores
    assert [item.threshold for item in end.thresholds] == [1.0, 0.95, 0.7]
    assert len(end.loss_by_depth) == 5
    assert end.loss_by_depth[1] < 0.5 * start.loss_by_depth[1]


@torch.inference_mode()
def losses(trained, path):
    """Return clean and noisy loss per label, in nats, on some of the training data."""
    model, tokenizer = load_model(path), AutoTokenizer.from_pretrained(path)
    mask_id, _ = add_mask_token(model, tokenizer)
    store = TokenStore(trained.output / "data")
    layouts = [lay_out(*store[row], 4, mask_id) for row in range(64)]
    batch = collate(pack(layouts, 192), pad_token_id=0)
    sums = Objective(model, masked=True)(batch)
    return sums.clean / batch.num_clean, sums.noisy / batch.num_noisy


def test_each_stage_lowers_its_loss(trained):
    start = losses(trained, trained.output / "stages" / "start")
    first, last = losses(trained, trained.ar_model), losses(trained, trained.model)
    assert first[0] < 0.3 * start[0]
    assert last[1] < 0.5 * first[1]


def test_scores_are_shown(trained):
    assert "stage mars, step 60, held-out: AR loss" in trained.printed


def test_progress_is_shown_to_the_end_of_both_stages(trained):
    assert "stage ar: 120/120 loss" in trained.printed
    assert "stage mars: 60/60 loss" in trained.printed


def test_each_stage_starts_from_the_weights_of_the_one_before(trained):
    start, first, last = (
        load_model(path).state_dict()["model.layers.0.mlp.up_proj.weight"]
        for path in (trained.output / "stages" / "start", trained.ar_model, trained.model)
    )
    moved = (first - start).norm()
    assert moved > 0
    assert (last - first).norm() < (last - start).norm()


@torch.inference_mode()
def test_plain_transformers_generates_the_text_of_ar_mode(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained.model)
    model = AutoModelForCausalLM.from_pretrained(trained.model)
    rows = (trained.data / "eval.jsonl").read_text().splitlines()[:8]
    for row in rows:
        question = json.loads(row)["messages"][0]["content"]
        text = render_prompt(tokenizer, [{"role": "user", "content": question}])
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        theirs = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        ours = generate_once(
            GenerateOptions(model=str(trained.model), prompt=question, mode=Mode.AR, max_tokens=40)
        )
        assert "".join(ours.passes) == theirs
