"""A run that is killed, corrupted and stopped ends like an uninterrupted one, bit for bit.

The commands here join one Ray cluster, which saves their own clusters' starts.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from mars_platform.config import load_settings
from mars_platform.errors import UserError
from mars_train.recipe import Recipe
from mars_train.run.recipe_run import run_recipe
from mars_train.stage.history import read_history

EVERY_STEPS = 5  # as in the recipe
TIMEOUT_S = 900


def run_here(recipe_file, output, *overrides):
    """Run the recipe in this process and return the printed text."""
    recipe = load_settings(recipe_file, Recipe, [f"output={output}", *overrides])
    with (recipe_file.parent / f"{output.name}-here.txt").open("w+") as printed:
        run_recipe(recipe, Console(file=printed, width=200))
        printed.seek(0)
        return printed.read()


def refusal(recipe_file, output, *overrides):
    with pytest.raises(UserError) as caught:
        run_here(recipe_file, output, *overrides)
    return str(caught.value)


class Command:
    """``marsray train`` as a child process."""

    def __init__(self, recipe_file, output, address):
        self._log = output.with_name(f"{output.name}-{time.monotonic_ns()}.txt")
        self._checkpoints = output / "checkpoints" / "mars"
        command = [sys.executable, "-m", "mars_platform", "train", str(recipe_file)]
        command += ["--set", f"output={output}", "--set", f"cluster.address={address}"]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def printed(self):
        return self._log.read_text()

    def wait_for(self, condition):
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None, self.printed
            assert time.monotonic() < deadline, self.printed
            time.sleep(0.02)

    def wait_for_checkpoint(self, step):
        self.wait_for(lambda: newest_step(self._checkpoints) >= step)

    def wait_for_text(self, text):
        self.wait_for(lambda: text in self.printed)


def checkpoints(directory):
    return sorted(directory.glob("step-*"))


def newest_step(directory):
    return max((int(path.name[5:]) for path in checkpoints(directory)), default=0)


def find_workers():
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "ray::RayTrainWorker" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:  # it has ended meanwhile
            continue
    return found


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@dataclass
class Story:
    """Everything that happened to a run in one output directory."""

    output: Path
    printed_before_kill: str
    num_workers_left: int
    flipped: Path
    other_recipe: str
    second_run: str
    printed_until_stop: str
    status: int
    truncated: Path
    printed_to_the_end: str


@pytest.fixture(scope="module")
def story(address, recipe_file):
    output = recipe_file.parent / "interrupted"
    directory = output / "checkpoints" / "mars"
    with Command(recipe_file, output, address) as command:
        command.wait_for_checkpoint(2 * EVERY_STEPS)
        find_workers()[0].kill()
        command.wait_for_text("resumed from")
        command.wait_for_checkpoint(newest_step(directory) + EVERY_STEPS)
        command.process.kill()
        command.process.wait()
        before_kill = command.printed
    _, alive = psutil.wait_procs(find_workers(), timeout=30)
    flipped = checkpoints(directory)[-1]
    flip_bit(flipped / "shard-00000-of-00001.safetensors")
    other_recipe = refusal(recipe_file, output, "seed=7")
    with Command(recipe_file, output, address) as command:
        command.wait_for_text("resumed from")
        second_run = refusal(recipe_file, output)
        command.process.terminate()
        status = command.process.wait(TIMEOUT_S)
        until_stop = command.printed
    truncated = checkpoints(directory)[-1]
    content = (truncated / "history.json").read_bytes()
    (truncated / "history.json").write_bytes(content[:-1])
    to_the_end = run_here(recipe_file, output)
    return Story(
        output=output,
        printed_before_kill=before_kill,
        num_workers_left=len(alive),
        flipped=flipped,
        other_recipe=other_recipe,
        second_run=second_run,
        printed_until_stop=until_stop,
        status=status,
        truncated=truncated,
        printed_to_the_end=to_the_end,
    )


def resumed_step(printed):
    return int(re.search(r"resumed from .*/step-(\d+)", printed)[1])


def step_of(checkpoint):
    return int(checkpoint.name[5:])


def test_an_interrupted_run_ends_like_an_uninterrupted_one(story, uninterrupted):
    ours, theirs = (
        read_history(out / "model" / "history.json") for out in (story.output, uninterrupted)
    )
    assert len(theirs.steps) == 80
    assert ours == theirs
    weights = [
        (out / "model" / "model.safetensors").read_bytes() for out in (story.output, uninterrupted)
    ]
    assert weights[0] == weights[1]


def test_a_killed_worker_is_replaced(story):
    assert resumed_step(story.printed_before_kill) >= 2 * EVERY_STEPS


def test_the_workers_of_a_killed_command_end(story):
    assert story.num_workers_left == 0


def test_a_flipped_bit_is_refused_and_the_checkpoint_before_is_used(story):
    printed = story.printed_until_stop
    assert (
        f"{story.flipped} is damaged and not used: shard-00000-of-00001.safetensors does" in printed
    )
    assert resumed_step(printed) == step_of(story.flipped) - EVERY_STEPS


def test_a_truncated_file_is_refused_and_the_checkpoint_before_is_used(story):
    printed = story.printed_to_the_end
    assert f"{story.truncated} is damaged and not used: history.json has" in printed
    assert (
        step_of(story.truncated) > resumed_step(printed) >= step_of(story.truncated) - EVERY_STEPS
    )


def test_sigterm_saves_a_checkpoint_and_exits_with_its_status(story):
    assert story.status == 143
    stopped = re.search(r"error: stage mars is stopped after step (\d+)", story.printed_until_stop)
    assert int(stopped[1]) == step_of(story.truncated)


def test_another_recipe_is_refused_and_its_difference_named(story):
    assert "unfinished run of another recipe, which differs in seed" in story.other_recipe


def test_a_second_run_in_the_same_directory_is_refused(story):
    assert f"output: another run works in {story.output}" in story.second_run


def test_a_finished_run_is_not_entered_again(story, recipe_file):
    printed = run_here(recipe_file, story.output)
    assert printed == f"the run in {story.output} is finished; its model is {story.output}/model\n"
