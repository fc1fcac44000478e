"""Trains as a user does: an existing model, flawed data, one worker, mixed precision."""

from __future__ import annotations

import json
import signal

import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml
from rich.console import Console

from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.config import load_settings
from mars_platform.errors import UserError
from mars_train.data.token_store import TokenStore
from mars_train.recipe import Recipe
from mars_train.run.recipe_run import run_recipe

pytestmark = pytest.mark.timeout(900)  # a busy machine trains slowly


@pytest.fixture(scope="module")
def recipe(trained, tmp_path_factory):
    """A recipe whose data is a JSONL file with two bad rows, and a Parquet file."""
    work = tmp_path_factory.mktemp("own")
    rows = (trained.data / "train.jsonl").read_text().splitlines()[:64]
    lines = [*rows[:10], '{"messages": []}', *rows[10:32], "not JSON"]
    (work / "data").mkdir()
    (work / "data" / "a.jsonl").write_text("\n".join(lines) + "\n")
    table = pa.Table.from_pylist([json.loads(row) for row in rows[32:]])
    pa.parquet.write_table(table, work / "data" / "b.parquet")
    content = {
        "model": {"base": str(trained.ar_model)},
        "data": {"train": [str(work / "data")], "max_length": 128, "max_bad_rows": 2},
        "stages": [{"objective": "mars", "block_size": 8, "epochs": 2, "batch_size": 32}],
        "output": str(work / "out"),
    }
    (work / "recipe.yaml").write_text(yaml.safe_dump(content))
    return work / "recipe.yaml"


@pytest.fixture(scope="module")
def output(recipe):
    settings = load_settings(recipe, Recipe)
    assert settings.precision == "bf16"
    assert settings.scaling.num_workers == 1
    run_recipe(settings, Console(quiet=True))
    return settings.output


def test_an_existing_model_becomes_a_mars_model(output):
    assert read_checkpoint(output / "model").metadata.block_size == 8


def test_bad_rows_are_reported_by_file_and_line(output, recipe):
    rows = [json.loads(line) for line in (output / "report.jsonl").read_text().splitlines()]
    file = str(recipe.parent / "data" / "a.jsonl")
    assert len(TokenStore(output / "data")) == 64
    assert [(row["file"], row["line"], row["what"]) for row in rows] == [
        (file, 11, "dropped"),
        (file, 34, "dropped"),
    ]


def test_the_run_restores_the_handler_of_ctrl_c(output):
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_more_bad_rows_than_allowed_stop_the_run(output, recipe):
    settings = load_settings(
        recipe, Recipe, ["data.max_bad_rows=1", f"output={recipe.parent / 'other'}"]
    )
    with pytest.raises(
        UserError, match=r"2 bad rows, and data.max_bad_rows allows 1: .*a.jsonl:11"
    ):
        run_recipe(settings, Console(quiet=True))
    left = {item.name for item in settings.output.iterdir()}
    assert left == {"report.jsonl", ".lock"}  # a corrected run may use the directory
