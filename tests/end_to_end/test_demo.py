"""Runs the demo as a user does, which takes minutes and belongs to the full suite only."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from transformers import AutoModelForCausalLM

_TIMEOUT_S = 1700


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Run the demo with its server kept up, ask it the suggested question, and interrupt it."""
    work = tmp_path_factory.mktemp("demo")
    (work / "tmp").mkdir()
    options = ["--items", "200", "--keep", str(work / "kept"), "--json", str(work / "figures.json")]
    process = start(work, *options, "--serve")
    printed = (work / "printed.txt").read_text
    wait_for(process, lambda: "\ntime: " in printed())
    url = re.search(r"curl (\S+)/v1/chat/completions", printed())[1]
    body = json.loads(re.search(r"-d '(.*)'", printed())[1])
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    (work / "answer.json").write_text(answer.text)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 0
    return work


def start(work, *options):
    command = [sys.executable, "-m", "mars_platform", "demo", *options]
    environment = {"TMPDIR": str(work / "tmp"), "PATH": "/bin"}
    with (work / "printed.txt").open("w") as printed:
        return subprocess.Popen(command, env=environment, stdout=printed, stderr=printed)


def wait_for(process, is_reached):
    deadline = time.monotonic() + _TIMEOUT_S
    while not is_reached():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.5)


def assert_nothing_is_left(work):
    assert list((work / "tmp").iterdir()) == []
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [command for command in commands if str(work).encode() in command]


@pytest.mark.full
def test_the_table_shows_the_trade_off_of_speed_and_accuracy(demo):
    figures = json.loads((demo / "figures.json").read_text())
    rows = {(row["mode"], row["threshold"]): row for row in figures["rows"]}
    one_token, exact = rows["ar", 1.0], rows["exact", 1.0]
    careful, hasty = rows["threshold", 0.95], rows["threshold", 0.5]
    assert all(row["items"] == 200 for row in rows.values())
    assert figures["ar_sft_accuracy"] >= 0.90
    assert one_token["accuracy"] >= figures["ar_sft_accuracy"] - 0.03
    assert exact["accuracy"] == pytest.approx(one_token["accuracy"], abs=0.01)
    assert one_token["tokens_per_forward"] == 1.0
    assert min(exact["tokens_per_forward"], careful["tokens_per_forward"]) >= 2.5
    assert careful["accuracy"] >= one_token["accuracy"] - 0.05
    assert hasty["accuracy"] <= careful["accuracy"] - 0.05


@pytest.mark.full
def test_the_suggested_question_is_answered_while_the_demo_serves(demo):
    answer = json.loads((demo / "answer.json").read_text())
    assert re.search(r"Answer: \d\d$", answer["choices"][0]["message"]["content"])


@pytest.mark.full
def test_the_kept_checkpoint_is_an_ordinary_one(demo):
    assert (demo / "kept" / "data" / "eval.jsonl").is_file()
    AutoModelForCausalLM.from_pretrained(demo / "kept" / "model")


@pytest.mark.full
def test_nothing_is_left_behind(demo):
    assert_nothing_is_left(demo)


@pytest.mark.full
def test_termination_ends_whatever_the_demo_has_started(tmp_path):
    (tmp_path / "tmp").mkdir()
    process = start(tmp_path)
    printed = (tmp_path / "printed.txt").read_text
    wait_for(process, lambda: "stage ar: " in printed())
    process.terminate()
    assert process.wait(120) == 143
    assert "error: terminated" in printed()
    assert_nothing_is_left(tmp_path)
