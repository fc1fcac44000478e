"""aiperf runs to its end without errors and counts the server's tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("streaming", [True, False])
def test_a_short_run_ends_without_errors(served, offline, tmp_path, streaming):
    questions = tmp_path / "questions.jsonl"
    lines = served.data.read_text().splitlines()[:12]
    texts = [json.loads(line)["messages"][0]["content"] for line in lines]
    questions.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", "mars"]
    command += ["--url", served.address, "--api-key", served.key, "--endpoint-type", "chat"]
    command += ["--input-file", str(questions), "--custom-dataset-type", "single_turn"]
    command += ["--concurrency", "4", "--request-count", "12", "--ui", "none"]
    command += ["--tokenizer", str(served.model), "--extra-inputs", "temperature:0"]
    command += ["--output-artifact-dir", str(tmp_path / "out"), "--no-gpu-telemetry"]
    command += ["--use-server-token-count"] + ["--streaming"] * streaming
    environment = {**offline, "HF_HUB_OFFLINE": ""}  # else it accepts no folder as tokenizer
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((tmp_path / "out/profile_export_aiperf.json").read_text())
    assert summary["request_count"]["avg"] == 12
    assert summary.get("error_request_count", {"avg": 0})["avg"] == 0
    assert summary["output_token_count"]["avg"] > 1
