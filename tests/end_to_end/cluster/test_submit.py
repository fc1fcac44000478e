"""Runs `marsray submit` against a cluster that asks for a token, as a user does."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from clusters.ray_heads import BIN, SHELL, new_token, ray_head
from mars_platform.checkpoint.directory import read_checkpoint
from waiting import wait_until

WITH_TOKEN = {**SHELL, **new_token()}
TOKEN = WITH_TOKEN["RAY_AUTH_TOKEN"]
_WAIT_S = 240


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The dashboard's address of a Ray cluster of this module."""
    with ray_head(WITH_TOKEN, num_cpus=4) as found:
        yield found


@pytest.fixture(scope="module")
def work(write_recipe, tmp_path_factory) -> Path:
    """A user's directory with a recipe, and with data that git ignores."""
    directory = tmp_path_factory.mktemp("work")
    write_recipe(
        directory,
        stage=0,
        every_steps=10,
        scaling={"num_workers": 1},
        num_train=1000,
        train="data/train.jsonl",
        max_steps=100,
    )
    (directory / ".gitignore").write_text("data/\n")
    return directory


def call(work, *words, environment=WITH_TOKEN):
    """Run one command; returns its status, stdout and stderr."""
    ended = subprocess.run(
        [BIN / words[0], *map(str, words[1:])],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_WAIT_S,
    )
    assert TOKEN not in ended.stdout + ended.stderr
    return ended.returncode, ended.stdout, ended.stderr


def submit(work, *arguments, environment=WITH_TOKEN):
    return call(work, "marsray", "submit", "recipe.yaml", *arguments, environment=environment)


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({**SHELL, "RAY_AUTH_MODE": "disabled"}, id="without", marks=pytest.mark.full),
        pytest.param({**WITH_TOKEN, "RAY_AUTH_TOKEN": "wrong" * 8}, id="wrong"),
    ],
)
def test_without_the_token_nothing_is_submitted(address, work, environment):
    output = f"output={work / 'refused'}"
    status, out, error = submit(
        work, "--address", address, "--set", output, environment=environment
    )
    assert (status, out) == (2, "")
    assert error.startswith("error: --address: the cluster refuses the token, or its absence; set")
    assert len(error.splitlines()) == 1


def test_a_job_that_fails_is_status_1(address, work):
    nowhere = "data.train=[/no/such/file.jsonl]"
    status, out, error = submit(work, "--follow", "--address", address, "--set", nowhere)
    assert "error: data.train: there is no file or directory /no/such/file.jsonl" in out
    assert "submitted again, the run is resumed" in error
    assert status == 1


def test_the_token_is_not_in_what_the_cluster_tells_of_its_jobs(address, work):
    status, out, _ = call(work, "ray", "job", "list", "--address", address)  # looks for the token
    assert status == 0
    assert "marsray train recipe.yaml" in out


@pytest.fixture(scope="module")
def stopped(address, work):
    """The job of a run that was stopped by the command that was printed, and its log."""
    environment = {**WITH_TOKEN, "RAY_ADDRESS": address}
    status, out, error = submit(work, "--json", environment=environment)
    assert status == 0, error
    job = json.loads(out)
    commands = {each.split()[2]: each.split() for each in error.splitlines() if "ray job " in each}

    def log():
        return call(work, *(word for word in commands["logs"] if word != "--follow"))[1]

    storage = Path(job["output"]) / "checkpoints" / "ar"
    wait_until(lambda: list(storage.glob("step-*")), _WAIT_S, log)
    assert call(work, *commands["stop"])[0] == 0
    return SimpleNamespace(
        output=Path(job["output"]),
        status=call(work, *commands["status"])[1],
        log=log(),
        steps=[int(path.name.rsplit("-", 1)[1]) for path in storage.glob("step-*")],
    )


@pytest.mark.full
def test_a_stopped_job_saves_a_checkpoint_first(stopped):
    assert "was stopped" in stopped.status
    step = int(re.search(r"stage ar is stopped after step (\d+)", stopped.log)[1])
    assert step in stopped.steps


@pytest.mark.full
def test_a_run_that_is_submitted_again_is_resumed(address, work, stopped):
    status, out, error = submit(work, "--follow", "--address", address)
    assert status == 0, out + error
    assert f"resuming the run in {stopped.output}" in out
    assert "stage ar: 100/100 loss" in out
    assert read_checkpoint(stopped.output / "model").metadata is None
