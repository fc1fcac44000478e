"""A recipe that trains an adapter on the model's own responses: it leaves the model alone."""

from __future__ import annotations

import io
import json

from rich.console import Console

from mars_platform.checkpoint.adapted import check_fit, read_model
from mars_platform.checkpoint.manifest import describe_all
from mars_train.data.token_store import TokenStore
from mars_train.recipe import Recipe
from mars_train.run.generation import STORE
from mars_train.run.recipe_run import run_recipe
from mars_train.stage.history import read_history

NUM_ROWS, NUM_RESPONSES = 64, 20


def test_a_recipe_leaves_the_model_and_an_adapter_for_it(trained, tmp_path):
    lines = (trained.data / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(lines[:NUM_ROWS]))
    responses = {"objective": "generate", "max_tokens": 12, "max_responses": NUM_RESPONSES}
    stage = {"objective": "mars", "adapter": {"rank": 8}, "batch_size": 8, "max_steps": 3}
    content = {
        "model": {"base": str(trained.ar_model)},
        "data": {"train": [str(tmp_path / "rows.jsonl")], "max_length": 128},
        "stages": [
            responses | {"name": "own"},
            stage | {"responses": "own", "epochs": 9, "learning_rate": 3e-3},
        ],
        "evaluation": {"data": [str(trained.data / "eval.jsonl")], "max_items": 4},
        "scaling": {"threads_per_worker": 1},
        "precision": "no",
        "output": str(tmp_path / "out"),
    }
    before, console = describe_all(trained.ar_model), io.StringIO()
    adapter = run_recipe(Recipe.model_validate(content), Console(file=console, width=300))
    assert describe_all(trained.ar_model) == before
    printed = console.getvalue()
    expected = f"stage mars: adapter in {adapter}, for the model {trained.ar_model}"
    assert printed.index(f"stage own: {NUM_RESPONSES} responses") < printed.index(expected)
    store = TokenStore(tmp_path / "out" / "stages" / "own" / STORE)
    data = TokenStore(tmp_path / "out" / "data")
    assert (len(store), len(data)) == (NUM_RESPONSES, NUM_ROWS)
    assert not (tmp_path / "out" / "checkpoints").exists()
    assert not (adapter / "model.safetensors").exists()
    metadata = json.loads((adapter / "mars.json").read_text())
    assert metadata["base"]["name"] == str(trained.ar_model)
    assert metadata["provenance"]["stage"] == "mars"
    start, end = read_history(adapter / "history.json").scores
    assert start.one_token == end.one_token
    assert start.loss_by_depth[0] == end.loss_by_depth[0]
    checkpoint = read_model(trained.ar_model, adapter)
    assert checkpoint.metadata.block_size == 4
    check_fit(checkpoint)
