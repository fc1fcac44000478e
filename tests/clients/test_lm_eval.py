"""The LM evaluation harness, over the server, finds the scores of `marsray eval` and transformers.

All decode the same prompts greedily with the same limit, so the scores must be equal numbers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

TASKS = Path(__file__).parent / "tasks"
MAX_TOKENS = 64
NUM_ITEMS = 100


@pytest.fixture
def harness(served, offline, tmp_path):
    """A function that runs a task and returns its results and each document's samples."""

    def run(kind, task, path, limit, *options, concurrent=8):
        served_at = {"model": "mars", "base_url": f"{served.api}/{path}"}
        served_at |= {"tokenizer": served.model, "num_concurrent": concurrent}
        command = [sys.executable, "-m", "lm_eval", "run", "--model", kind, "--tasks", task]
        command += ["--model_args", ",".join(f"{key}={value}" for key, value in served_at.items())]
        command += ["--include_path", str(TASKS), "--output_path", str(tmp_path / "out")]
        command += ["--log_samples", "--apply_chat_template", "--limit", str(limit), *options]
        environment = {**offline, "HF_HOME": str(tmp_path / "cache")}
        result = subprocess.run(
            command, cwd=served.data.parent, env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout + result.stderr
        (results,) = (tmp_path / "out").rglob("results_*.json")
        (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
        rows = [json.loads(line) for line in samples.read_text().splitlines()]
        rows.sort(key=lambda row: row["doc_id"])
        return json.loads(results.read_text())["results"][task], rows

    return run


@pytest.fixture(scope="module")
def own(served, python):
    """Accuracy by mode on the first items, as ``marsray eval`` prints it."""
    command = [python, "-m", "mars_platform", "eval", str(served.model), "--json"]
    command += ["--data", str(served.data), "--max-items", str(NUM_ITEMS)]
    command += ["--threshold", "0.95", "--max-tokens", str(MAX_TOKENS)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    return {row["mode"]: row["accuracy"]["value"] for row in rows}


@pytest.mark.parametrize("mode", ["ar", "threshold"])
@pytest.mark.parametrize(
    ("kind", "path"),
    [("local-completions", "completions"), ("local-chat-completions", "chat/completions")],
)
def test_accuracy_is_that_of_the_projects_own_evaluation(harness, own, kind, path, mode):
    options = ["--gen_kwargs", f"mode={mode},confidence_threshold=0.95"]
    if mode == "ar":
        options = ["--gen_kwargs", "mode=ar"]
    results, _ = harness(kind, "marsray_demo", path, NUM_ITEMS, *options)
    assert results["exact_match,answer"] == own[mode]


def test_scores_are_those_of_transformers(harness, served, python, tmp_path):
    limit = 20
    task, options = ("local-completions", "marsray_choice", "completions"), ["--batch_size", "4"]
    results, rows = harness(*task, limit, *options, concurrent=1)
    found = [[float(score) for ((score, _),) in row["resps"]] for row in rows]
    greedy = [[is_greedy in (True, "True") for ((_, is_greedy),) in row["resps"]] for row in rows]
    pairs = tmp_path / "pairs.json"
    pairs.write_text(json.dumps([[_pair(each) for each in _arguments(row)] for row in rows]))
    script = Path(__file__).parent / "reference_scores.py"
    command = [python, str(script), str(served.model), str(pairs)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    expected = json.loads(result.stdout)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx([score for score, _ in theirs], abs=1e-3)
    assert greedy == [[is_greedy for _, is_greedy in each] for each in expected]
    right = [max(range(len(each)), key=lambda i: each[i][0]) == 0 for each in expected]
    assert results["acc,none"] == pytest.approx(sum(right) / limit)


def _arguments(row):
    """Return the context and continuation of each choice."""
    return [row["arguments"][name] for name in sorted(row["arguments"])]


def _pair(argument):
    return [argument["arg_0"], argument["arg_1"]]


def test_the_tasks_answers_are_found_as_the_project_finds_them():
    """The task's pattern finds the last answer, as `mars_platform.data.conversations` does."""
    pattern = re.search(r"regex_pattern: '(.*?)'", (TASKS / "demo.yaml").read_text()).group(1)
    found = re.findall(pattern, "Answer: 3\nso 4. Answer: 5 \n")
    assert found == ["5"]
