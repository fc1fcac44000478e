"""Responses are written on Ray in shards, resumed, and bound to what they were made of."""

from __future__ import annotations

import io
import shutil

import numpy as np
import psutil
import pytest
from rich.console import Console

from mars_platform.checkpoint.weights import load_model
from mars_platform.errors import Stopped
from mars_train.data.token_store import TokenStore, TokenStoreWriter
from mars_train.recipe import GenerateStage, Recipe
from mars_train.run.generation import STORE, Generation
from mars_train.run.run_directory import RunDirectory
from mars_train.storage.directories import Storage
from responses import generate_responses

NUM_ROWS, NUM_RESPONSES, SHARD = 30, 20, 8
STAGE = {
    "objective": "generate",
    "temperature": [0.0, 0.8],
    "max_responses": NUM_RESPONSES,
    "max_tokens": 12,
    "shard_size": SHARD,
}


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
        self.model, self.prompts = model, prompts
        self.shards, self.results = path / "shards", path / "stages"
        self.printed = ""

    def run(self, terminated=lambda: False, **changes):
        """Run the stage, and keep what it printed."""
        recipe = Recipe.model_validate(
            {
                "model": {"base": str(self.model)},
                "data": {"train": ["rows.jsonl"], "max_length": 64},
                "stages": [STAGE | changes, {"objective": "mars", "responses": "generate"}],
                "output": "unused",
                "scaling": {"threads_per_worker": 1},
            }
        )
        stage, printed = recipe.stages[0], io.StringIO()
        assert isinstance(stage, GenerateStage)
        generation = Generation(
            recipe=recipe,
            stage=stage,
            model=self.model,
            data=self.prompts.path,
            share=lambda: (str(self.model), str(self.prompts.path)),
            shards=Storage(str(self.shards)),
            results=Storage(str(self.results)),
            console=Console(file=printed, width=200),
        )
        try:
            generation.run(terminated)
        finally:
            self.printed = printed.getvalue()

    @property
    def store(self):
        return TokenStore(self.results / "generate" / STORE)

    @property
    def whole(self):
        """Inode of each whole shard, which tells it from one that was written again."""
        return {path.name: path.stat().st_ino for path in self.shards.glob("shard-*")}


def kill_writers():
    """Kill the processes that write; return their number."""
    found = [
        process
        for process in psutil.Process().children(recursive=True)
        if "ray::_Writer" in " ".join(process.cmdline())
    ]
    for process in found:
        process.kill()
    return len(found)


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def finished(trained, prompts, tmp_path_factory):
    """A stage that was stopped, then resumed."""
    return Work(tmp_path_factory.mktemp("finished"), trained.ar_model, prompts)


@pytest.fixture
def work(finished, prompts, tmp_path):
    """A copy of the finished stage with its shards."""
    for path in (finished.shards, finished.results):
        shutil.copytree(path, tmp_path / path.name)
    return Work(tmp_path, finished.model, prompts)


def test_a_stage_survives_its_writer_and_goes_on_after_a_stop(finished, expected):
    killed = []

    def stop_at_2():
        if finished.whole and not killed:
            killed.append(kill_writers())
        return len(finished.whole) >= 2

    with pytest.raises(Stopped, match=r"stage generate is stopped with [12] of 3 shards; the same"):
        finished.run(terminated=stop_at_2)
    before = finished.whole
    assert killed == [1]
    assert before.keys() == {"shard-000000", "shard-000001"}
    flip_bit(finished.shards / "shard-000000" / "tokens.npy")
    for path in (finished.shards / "shard-000002", finished.results / "generate"):
        path.mkdir(parents=True)
        (path / "rest").touch()  # its manifest was lost
    finished.run()
    path = finished.shards / "shard-000000"
    assert f"warning: stage generate: {path} is damaged and written again" in finished.printed
    assert "1 of 3 shards are there" in finished.printed
    assert finished.whole["shard-000001"] == before["shard-000001"]
    assert finished.whole["shard-000000"] != before["shard-000000"]
    assert finished.store.fingerprint == expected.fingerprint
    finished.run()
    assert "stage generate: written already" in finished.printed


def rejected(work, **changes):
    """Return what is said about the responses that are there, by a run that is stopped at once."""
    with pytest.raises(Stopped):
        work.run(terminated=lambda: True, **changes)
    assert not work.whole
    assert not (work.results / "generate").exists()
    return work.printed


def test_responses_of_another_setting_are_named_and_removed(work):
    printed = rejected(work, seed=1, max_responses=19, temperature=[0.8])
    for path in (work.results / "generate", work.shards / "shard-000002"):
        expected = f"{path} is of another temperatures, max_responses, seed and written again"
        assert expected in printed


def test_responses_of_another_model_are_named_and_removed(work, tmp_path):
    work.model = shutil.copytree(work.model, tmp_path / "model")
    model = load_model(work.model)
    model.get_input_embeddings().weight.data += 0.01
    model.save_pretrained(work.model)
    assert f"{work.results}/generate is of another model and written again" in rejected(work)


def test_a_damaged_result_is_named_and_removed(work):
    shutil.rmtree(work.shards)  # as a run does once the result is there
    flip_bit(work.results / "generate" / STORE / "tokens.bin")
    printed = rejected(work)
    assert f"{work.results}/generate is damaged and written again: store/tokens.bin" in printed
