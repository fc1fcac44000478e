"""A trained model, its engine and prompts, for tests of the engine."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from mars_autoscale.model.step_times import StepTimes
from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.checkpoint.weights import load_model
from mars_serve.engine.engine import Engine
from mars_serve.engine.settings import EngineSettings
from mars_serve.measure.evaluation.items import read_items

NUM_PROMPTS = 64
TIMES = StepTimes((1, 256), (0,), ((10.0,), (20.0,)))
"""Times far above those of real steps, so that the engine's own measurements change no window."""


@pytest.fixture(scope="module")
def checkpoint(trained) -> Checkpoint:
    return read_checkpoint(trained.model)


@pytest.fixture(scope="module")
def prompts(trained, checkpoint: Checkpoint) -> list[list[int]]:
    file = trained.data / "eval.jsonl"
    items = read_items(
        [file], checkpoint.tokenizer, max_length=checkpoint.max_length, max_items=NUM_PROMPTS
    )
    return [list(item.prompt) for item in items]


@pytest.fixture(scope="module")
def model(trained) -> PreTrainedModel:
    return load_model(trained.model).eval()


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint) -> Engine:
    engine = Engine(checkpoint, EngineSettings(max_num_seqs=24, num_pages=400))
    engine.adapt_windows(TIMES)
    return engine
