"""Runs the demo as a user does, which takes minutes and belongs to the full suite only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    work = tmp_path_factory.mktemp("demo")
    scratch = work / "tmp"
    scratch.mkdir()
    command = [sys.executable, "-m", "mars_platform", "demo", "--items", "500"]
    command += ["--keep", str(work / "kept"), "--json", str(work / "figures.json")]
    subprocess.run(command, check=True, timeout=1700, env={"TMPDIR": str(scratch), "PATH": "/bin"})
    return work


@pytest.mark.full
def test_the_table_shows_the_trade_off_of_speed_and_accuracy(demo):
    figures = json.loads((demo / "figures.json").read_text())
    rows = {(row["mode"], row["threshold"]): row for row in figures["rows"]}
    one_token, careful, hasty = rows["ar", 1.0], rows["threshold", 0.95], rows["threshold", 0.5]
    assert all(row["items"] == 500 for row in rows.values())
    assert figures["ar_sft_accuracy"] >= 0.90
    assert one_token["accuracy"] >= figures["ar_sft_accuracy"] - 0.02
    assert one_token["tokens_per_forward"] == 1.0
    assert careful["tokens_per_forward"] >= 1.5
    assert careful["accuracy"] >= one_token["accuracy"] - 0.04
    assert hasty["accuracy"] <= careful["accuracy"] - 0.05


@pytest.mark.full
def test_the_kept_checkpoint_is_an_ordinary_one(demo):
    assert (demo / "kept" / "data" / "eval.jsonl").is_file()
    AutoModelForCausalLM.from_pretrained(demo / "kept" / "model")


@pytest.mark.full
def test_nothing_is_left_behind(demo):
    assert list((demo / "tmp").iterdir()) == []
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [command for command in commands if str(demo).encode() in command]
