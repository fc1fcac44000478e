"""Responses are written on Ray in shards, resumed, and bound to what they were made of."""

from __future__ import annotations

import io
import json
import shutil

import numpy as np
import pytest
from rich.console import Console

from mars_platform.checkpoint.directory import load_model
from mars_platform.errors import Stopped
from mars_train.data.token_store import TokenStore, TokenStoreWriter
from mars_train.recipe import GenerateStage, Recipe
from mars_train.run.generation import STORE, Generation
from mars_train.run.recipe_run import run_recipe
from mars_train.run.run_directory import RunDirectory
from mars_train.stage.responses import generate_responses
from mars_train.storage.directories import Storage

NUM_ROWS, SHARD = 20, 8
STAGE = {"objective": "generate", "temperature": 0.8, "max_tokens": 12, "shard_size": SHARD}


@pytest.fixture(scope="module")
def prompts(trained, tmp_path_factory) -> TokenStore:
    """The first conversations that the model was trained on."""
    store = TokenStore(RunDirectory(Recipe.model_construct(), trained.output).data)
    rows = [store[row] for row in range(NUM_ROWS)]
    with TokenStoreWriter(tmp_path_factory.mktemp("prompts") / "data") as writer:
        writer.append(
            keys=np.stack([np.zeros(NUM_ROWS, np.int64), np.arange(NUM_ROWS)], axis=1),
            lengths=np.array([len(ids) for ids, _ in rows], np.int32),
            tokens=np.concatenate([ids for ids, _ in rows]).astype(np.int32),
            supervised=np.concatenate([supervised for _, supervised in rows]),
        )
        return writer.finish()


@pytest.fixture(scope="module")
def expected(trained, prompts, tmp_path_factory) -> TokenStore:
    """The responses as one process writes them without Ray."""
    path = tmp_path_factory.mktemp("expected") / "responses"
    stage = GenerateStage.model_validate(STAGE)
    return generate_responses(trained.ar_model, prompts, stage, 64, path)


class Work:
    """A stage of objective generate in a directory of its own."""

    def __init__(self, path, model, prompts):
        self.path, self.model, self.prompts = path, model, prompts
        self.shards, self.results = path / "shards", path / "stages"

    def run(self, terminated=lambda: False, **changes):
        """Run the stage; return what it printed."""
        recipe = Recipe.model_validate(
            {
                "model": {"base": str(self.model)},
                "data": {"train": ["rows.jsonl"], "max_length": 64},
                "stages": [STAGE | changes, {"objective": "mars", "responses": "generate"}],
                "output": str(self.path),
                "scaling": {"threads_per_worker": 1},
            }
        )
        stage, printed = recipe.stages[0], io.StringIO()
        assert isinstance(stage, GenerateStage)
        Generation(
            recipe=recipe,
            stage=stage,
            model=self.model,
            shared_model=str(self.model),
            data=self.prompts.path,
            shared_data=str(self.prompts.path),
            shards=Storage(str(self.shards)),
            results=Storage(str(self.results)),
            console=Console(file=printed, width=200),
        ).run(terminated)
        return printed.getvalue()

    @property
    def store(self):
        return TokenStore(self.results / "generate" / STORE)

    @property
    def whole(self):
        """Inode of each whole shard, which tells it from one that was written again."""
        return {path.name: path.stat().st_ino for path in self.shards.glob("shard-*")}


@pytest.fixture
def work(trained, prompts, tmp_path):
    return Work(tmp_path, trained.ar_model, prompts)


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_stopped_stage_goes_on_and_writes_again_what_is_damaged_or_stale(work, expected):
    with pytest.raises(Stopped, match=r"stage generate is stopped with 2 of 3 shards; the same"):
        work.run(terminated=lambda: len(work.whole) >= 2)
    before = work.whole
    assert before.keys() == {"shard-000000", "shard-000001"}
    flip_bit(work.shards / "shard-000000" / "tokens.npy")
    printed = work.run()
    assert f"{work.shards}/shard-000000 is damaged and written again: tokens.npy" in printed
    assert "1 of 3 shards are there" in printed
    assert work.whole["shard-000001"] == before["shard-000001"]
    assert work.store.fingerprint == expected.fingerprint
    assert "stage generate: written already" in work.run()

    # The result of another setting or model is named and made again; so are shards.
    printed = work.run(seed=1)
    assert f"{work.results}/generate is of another seed and written again" in printed
    assert f"{work.shards}/shard-000001 is of another seed and written again" in printed
    assert work.store.fingerprint != expected.fingerprint
    flip_bit(work.results / "generate" / STORE / "tokens.bin")
    assert "generate is damaged and written again" in work.run(seed=1)


def test_responses_are_bound_to_the_weights_of_the_model(work, tmp_path):
    work.model = shutil.copytree(work.model, tmp_path / "model")
    work.run()
    model = load_model(work.model)
    model.get_input_embeddings().weight.data += 0.01
    model.save_pretrained(work.model)
    assert f"{work.results}/generate is of another model and written again" in work.run()


def test_a_recipe_trains_masks_on_responses_from_the_model_before(trained, tmp_path, recipe_file):
    mars = {"objective": "mars", "responses": "own", "batch_size": 8, "max_steps": 2, "epochs": 9}
    content = {
        "model": {"base": str(trained.ar_model)},
        "data": {"train": [str(tmp_path / "rows.jsonl")], "max_length": 64},
        "stages": [STAGE | {"name": "own"}, mars | {"learning_rate": 1e-12}],
        "scaling": {"threads_per_worker": 1},
        "output": str(tmp_path / "out"),
    }
    lines = (trained.data / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(lines[:NUM_ROWS]))
    printed = io.StringIO()
    model = run_recipe(Recipe.model_validate(content), Console(file=printed, width=200))
    text = printed.getvalue()
    assert text.index("stage own: 20 responses") < text.index("stage mars: checkpoint in")
    store = TokenStore(tmp_path / "out" / "stages" / "own" / STORE)
    data = TokenStore(tmp_path / "out" / "data")
    assert len(store) == len(data) == NUM_ROWS
    assert not (tmp_path / "out" / "checkpoints").exists()
    metadata = json.loads((model / "mars.json").read_text())
    mask_id = metadata["mask_token_id"]
    ours, before = load_model(model), load_model(trained.ar_model)
    for name, weight in before.named_parameters():  # the learning rate changes nothing
        ours_weight = ours.get_parameter(name)
        if weight.dim() == 2 and ours_weight.shape[0] > mask_id:
            weight, ours_weight = weight[:mask_id], ours_weight[:mask_id]
        np.testing.assert_allclose(ours_weight.detach(), weight.detach(), atol=1e-8)
