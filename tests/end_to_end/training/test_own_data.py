"""Trains as a user does: an existing model, flawed data, one worker, mixed precision."""

from __future__ import annotations

import json
import signal

import pytest
from rich.console import Console

from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.config import load_settings
from mars_platform.errors import UserError
from mars_train.data.token_store import TokenStore
from mars_train.recipe import Recipe
from mars_train.run.recipe_run import run_recipe


def test_an_existing_model_becomes_a_mars_model(uninterrupted):
    assert read_checkpoint(uninterrupted / "model").metadata.block_size == 8
    kept = load_settings(uninterrupted / "recipe.yaml", Recipe)
    assert (kept.precision, kept.scaling.num_workers) == ("bf16", 1)  # the defaults


def test_bad_rows_are_reported_by_file_and_line(uninterrupted, recipe_file):
    rows = [json.loads(line) for line in (uninterrupted / "report.jsonl").read_text().splitlines()]
    file = str(recipe_file.parent / "data" / "a.jsonl")
    assert len(TokenStore(uninterrupted / "data")) == 64
    assert [(row["file"], row["line"], row["what"]) for row in rows] == [
        (file, 11, "dropped"),
        (file, 34, "dropped"),
    ]


def test_the_run_restores_the_handler_of_ctrl_c(uninterrupted):
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_more_bad_rows_than_allowed_stop_the_run(uninterrupted, recipe_file):
    rows = (recipe_file.parent / "data" / "a.jsonl").read_text().splitlines()
    late = recipe_file.parent / "late.jsonl"  # bad rows that are not among the first
    late.write_text("\n".join([*rows[:10] * 60, rows[10], rows[10]]) + "\n")
    settings = load_settings(
        recipe_file,
        Recipe,
        [
            f"data.train=[{late}]",
            "data.max_bad_rows=1",
            f"output={recipe_file.parent / 'other'}",
        ],
    )
    with pytest.raises(
        UserError, match=r"2 bad rows, and data.max_bad_rows allows 1: .*late.jsonl:601"
    ):
        run_recipe(settings, Console(quiet=True))
    left = {item.name for item in settings.output.iterdir()}
    assert left == {"report.jsonl", ".lock"}  # a corrected run may use the directory
