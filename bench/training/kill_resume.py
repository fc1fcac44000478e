"""Kills a training run again and again, and compares its end with an uninterrupted run's.

    python -m bench.training.kill_resume --kills 20 --json result.json

Both runs use the same recipe: float32, two CPU workers, both stages. One run is left alone. The
other is interrupted at random moments: a worker is killed, the command is killed together with its
Ray cluster, a worker is killed while a checkpoint is being saved, or the command gets SIGTERM. A
command that ended is started again. At the end every loss, gradient norm and held-out score, and
the weights of both stages, must be equal to the last bit; otherwise the exit status is 1.

The benchmark sees the run as a user does: by its files, its output and its processes.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from os import environ
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
import yaml
from bench.servers import own_ray_cluster
from rich.console import Console
from rich.table import Table

_STAGES = ("ar", "mars")
_EVERY_STEPS = 5
_TERMINATED = 143
"""Exit status of a command that ended after SIGTERM."""
_TIMEOUT_S = 900.0
_SETTLE_S = 0.3
"""Seconds in which a worker that survives finishes a save that it can finish."""
_WEIGHTS = "model.safetensors"
_RESUMED = re.compile(r"stage (\w+): resumed from .*/step-(\d+)")
_MODEL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
    "max_position_embeddings": 16384,
}


class Failed(Exception):
    """The run did not resume or end as it should."""


@dataclass(frozen=True)
class Position:
    """Progress of a run, as its stored checkpoints show it."""

    stage: str
    step: int
    """Step of the stage's newest checkpoint; 0 if it has none."""
    total: int
    """Steps of the finished stages and of that checkpoint."""


@dataclass(frozen=True)
class Kill:
    """One interruption, and how the run resumed."""

    kind: str
    stage: str
    step: int
    """Step of the stage's newest checkpoint after the kill; 0 if it has none."""
    resumed_stage: str
    resumed_from: int
    """Step of the checkpoint from which the run resumed; 0 for the stage's start."""
    seconds: float
    """Seconds from the kill until training resumed."""
    left_over: list[str]
    """Processes that outlived the command by half a minute and had to be killed."""


class Training:
    """An output directory, and the command ``marsray train`` that works in it."""

    def __init__(self, recipe: Path, output: Path, num_steps: int, environment: dict[str, str]):
        self._recipe, self.output, self.num_steps = recipe, output, num_steps
        self._environment = environment
        self._log = output.with_suffix(".log")
        self._stale: set[int] = set()
        self.start()

    def start(self) -> None:
        """Start the command, for the first time or again."""
        command = [sys.executable, "-m", "mars_platform", "train", str(self._recipe)]
        with self._log.open("a") as log:
            self.command = psutil.Popen(
                [*command, "--set", f"output={self.output}"],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environ, **self._environment},
                start_new_session=True,
            )

    def finish(self) -> None:
        """Wait for the end of the run."""
        self.wait_until(lambda: self.command.poll() is not None)
        if self.command.returncode != 0:
            raise Failed(f"the run ended with status {self.command.returncode}\n{self.printed()}")

    def end(self) -> list[str]:
        """Kill the command; returns the names of processes that did not end with it in time."""
        processes = self._descendants()
        if self.command.poll() is None:
            self.command.kill()
            self.command.wait()
        _, alive = psutil.wait_procs(processes, timeout=30)
        names = [_name(process) for process in alive]
        for process in alive:
            process.kill()
        return names

    def printed(self) -> str:
        """Return everything that the commands of this run have printed so far."""
        return self._log.read_text(errors="replace")

    def position(self) -> Position:
        """Return the progress of the run."""
        for index, stage in enumerate(_STAGES):
            if not model_directory(self.output, stage).exists():
                names = [path.name for path in self._checkpoints(stage).glob("step-*")]
                step = max((int(name.removeprefix("step-")) for name in names), default=0)
                return Position(stage, step, index * self.num_steps + step)
        return Position(_STAGES[-1], self.num_steps, len(_STAGES) * self.num_steps)

    def partial_directories(self) -> list[Path]:
        """Return directories of checkpoints whose saving is running or was interrupted."""
        return list((self.output / "checkpoints").glob("*/.partial-*"))

    def workers(self) -> list[psutil.Process]:
        """Wait for the processes of the current worker group and return them."""
        found: list[psutil.Process] = []

        def find() -> bool:
            workers = [process for process in self._descendants() if _is_worker(process)]
            found[:] = [worker for worker in workers if worker.pid not in self._stale]
            return bool(found)

        self.wait_until(find)
        return found

    def forget_workers(self, workers: list[psutil.Process]) -> None:
        """Ignore a worker group from now on; Ray Train ends the rest of it."""
        self._stale.update(worker.pid for worker in workers)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds.

        Raises:
            Failed: The command ended first, or the wait took too long.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while not condition():
            if self.command.poll() is not None and not condition():
                raise Failed(
                    f"the run ended early with status {self.command.returncode}\n{self.printed()}"
                )
            if time.monotonic() > deadline:
                raise Failed(f"the run is stuck\n{self.printed()}")
            time.sleep(0.02)

    def _checkpoints(self, stage: str) -> Path:
        return self.output / "checkpoints" / stage

    def _descendants(self) -> list[psutil.Process]:
        try:
            processes: list[psutil.Process] = self.command.children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return processes


def _is_worker(process: psutil.Process) -> bool:
    return _name(process).startswith("ray::RayTrainWorker")


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:  # it has ended meanwhile
        return ""


def model_directory(output: Path, stage: str) -> Path:
    """Return the directory of a stage's trained model."""
    return output / "model" if stage == _STAGES[-1] else output / "stages" / stage


# --- ways to interrupt; each returns the processes that were left over ----------------------------


def kill_worker(training: Training, rng: random.Random) -> list[str]:
    """Kill a worker; Ray Train has to replace the worker group."""
    workers = training.workers()
    rng.choice(workers).kill()
    training.forget_workers(workers)
    time.sleep(_SETTLE_S)
    return []


def kill_command(training: Training, rng: random.Random) -> list[str]:
    """Kill the command; its local Ray cluster has to end by itself."""
    del rng
    left_over = training.end()
    training.start()
    return left_over


def kill_in_save(training: Training, rng: random.Random) -> list[str]:
    """Kill a worker in the middle of a save, until an unfinished directory proves it."""
    while True:
        workers = training.workers()
        if not _stop_in_save(training, workers):
            continue
        rng.choice(workers).kill()
        _resume(workers)
        training.forget_workers(workers)
        time.sleep(_SETTLE_S)
        if training.partial_directories():
            return []


def _stop_in_save(training: Training, workers: list[psutil.Process]) -> bool:
    """Suspend the workers inside a save; returns False if no save was caught."""
    deadline = time.monotonic() + 2.0
    while not training.partial_directories():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.suspend()
    if training.partial_directories():
        return True
    _resume(workers)
    return False


def _resume(workers: list[psutil.Process]) -> None:
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.resume()


def terminate_command(training: Training, rng: random.Random) -> list[str]:
    """Send SIGTERM; the command has to save a checkpoint and exit with the status for it."""
    del rng
    training.command.terminate()
    status = training.command.wait(_TIMEOUT_S)
    if status != _TERMINATED:
        raise Failed(f"SIGTERM gave status {status}\n{training.printed()}")
    training.start()
    return []


_KINDS: dict[str, Callable[[Training, random.Random], list[str]]] = {
    "worker": kill_worker,
    "command": kill_command,
    "worker in a save": kill_in_save,
    "SIGTERM": terminate_command,
}


# --- the experiment -------------------------------------------------------------------------------


def choose_targets(num_kills: int, last: int, rng: random.Random) -> list[int]:
    """Draw one step in each of ``num_kills`` equal parts of the run."""
    borders = [last * index // num_kills for index in range(num_kills + 1)]
    return [rng.randrange(*borders[index : index + 2]) for index in range(num_kills)]


def kill_and_resume(
    training: Training, num_kills: int, last: int, rng: random.Random
) -> Iterator[Kill]:
    """Interrupt the run ``num_kills`` times until about step ``last``; yields each interruption."""
    kinds = list(islice(cycle(_KINDS), num_kills))
    rng.shuffle(kinds)
    earliest = 0
    for kind, target in zip(kinds, choose_targets(num_kills, last, rng), strict=True):
        due = max(target, earliest)
        training.wait_until(lambda due=due: training.position().total >= due)  # type: ignore[misc]
        training.workers()
        time.sleep(rng.uniform(0, 0.5))  # so that kills fall anywhere between two checkpoints
        kill = _kill(training, kind, rng)
        earliest = training.position().total + _EVERY_STEPS
        yield kill


def _kill(training: Training, kind: str, rng: random.Random) -> Kill:
    left_over = _KINDS[kind](training, rng)
    started, position, printed = time.monotonic(), training.position(), len(training.printed())

    def resumed() -> re.Match[str] | None:
        return _RESUMED.search(training.printed(), printed)

    training.wait_until(lambda: bool(resumed()) or training.position().total > position.total)
    if 0 < position.step < training.num_steps:  # then it prints so, maybe a moment later
        training.wait_until(lambda: bool(resumed()))
    match = resumed()
    stage, step = (match[1], int(match[2])) if match else (position.stage, 0)
    seconds = round(time.monotonic() - started, 1)
    return Kill(kind, position.stage, position.step, stage, step, seconds, left_over)


def differences(reference: Path, other: Path) -> list[str]:
    """Return descriptions of the differences of two finished runs."""
    found = []
    for stage in _STAGES:
        ours, theirs = (model_directory(output, stage) for output in (reference, other))
        if _history(ours) != _history(theirs):
            found.append(f"{stage}: {_first_difference(_history(ours), _history(theirs))}")
        if _sha256(ours / _WEIGHTS) != _sha256(theirs / _WEIGHTS):
            found.append(f"{stage}: {_WEIGHTS}")
    return found


def _history(model: Path) -> dict[str, Any]:
    """Read a stage's steps and scores; the file holds every float exactly."""
    content: dict[str, Any] = json.loads((model / "history.json").read_text())
    return content


def _first_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    for number, (a, b) in enumerate(zip(ours["steps"], theirs["steps"], strict=False), start=1):
        if a != b:
            return f"step {number}, {a} against {b}"
    return "number of steps, or scores"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_recipe(work: Path, num_steps: int) -> Path:
    """Write the data and the recipe of both runs."""
    command = [sys.executable, "-m", "mars_platform", "data", "demo", "--out", str(work / "data")]
    command += ["--task", "short", "--examples", "1000", "--eval-examples", "8"]
    subprocess.run(command, check=True)  # noqa: S603 - our own command, no shell
    stage: dict[str, Any] = {"epochs": 1000, "max_steps": num_steps, "batch_size": 16}
    stage |= {"micro_batch_size": 4, "learning_rate": 3e-3, "row_slots": 192}
    content = {
        "model": {"scratch": {"vocabulary_size": 320, "config": _MODEL}},
        "data": {"train": [str(work / "data" / "train.jsonl")], "max_length": 128},
        "stages": [{"objective": "ar", **stage}, {"objective": "mars", "block_size": 4, **stage}],
        "evaluation": {
            "data": [str(work / "data" / "eval.jsonl")],
            "every_steps": 50,
            "max_tokens": 32,
        },
        "checkpoints": {"every_steps": _EVERY_STEPS},
        "scaling": {"num_workers": 2, "threads_per_worker": 1, "max_failures": -1},
        "precision": "no",
        "output": str(work / "out"),
    }
    path = work / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@contextmanager
def training_of(
    recipe: Path, output: Path, num_steps: int, environment: dict[str, str]
) -> Iterator[Training]:
    """Run a training for the length of the block, and end it afterwards."""
    training = Training(recipe, output, num_steps, environment)
    try:
        yield training
    finally:
        training.end()


def experiment(console: Console, num_kills: int, seed: int) -> dict[str, Any]:
    """Run both trainings and return the results as JSON."""
    started, num_steps = time.monotonic(), max(120, 15 * num_kills)
    with (
        tempfile.TemporaryDirectory(prefix="marsray-kills-") as directory,
        tempfile.TemporaryDirectory(prefix="mr-", ignore_cleanup_errors=True) as ray_directory,
    ):
        work = Path(directory)
        # Ray Train takes reports from the workers at this interval; they save faster than its
        # default.
        environment = {
            **own_ray_cluster(ray_directory),
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        }
        recipe = write_recipe(work, num_steps)
        with training_of(recipe, work / "reference", num_steps, environment) as reference:
            reference.finish()
        reference_s = time.monotonic() - started
        console.print(f"uninterrupted run: {reference_s:.0f} s", highlight=False)
        kills = []
        with training_of(recipe, work / "killed", num_steps, environment) as training:
            last = len(_STAGES) * num_steps - 60  # SIGTERM takes effect after some steps
            for kill in kill_and_resume(training, num_kills, last, random.Random(seed)):
                kills.append(kill)
                console.print(f"{len(kills)}/{num_kills}: {kill.kind}", highlight=False)
            training.finish()
        different = differences(reference.output, training.output)
    return {
        "different": different,
        "kills": [asdict(kill) for kill in kills],
        "num_steps": num_steps,
        "seed": seed,
        "reference_s": round(reference_s),
        "total_s": round(time.monotonic() - started),
    }


def show(console: Console, result: dict[str, Any]) -> None:
    """Print the kills and the verdict."""
    table = Table("", "kill", "newest checkpoint", "resumed from", "back after", "left over")
    for number, kill in enumerate(result["kills"], start=1):
        where = f"{kill['stage']} {kill['step']}"
        resumed = f"{kill['resumed_stage']} {kill['resumed_from']}"
        rest = (f"{kill['seconds']:.0f} s", str(len(kill["left_over"])))
        table.add_row(str(number), kill["kind"], where, resumed, *rest)
    console.print(table)
    different = ", ".join(result["different"])
    console.print(
        f"{result['num_steps']} steps a stage, {result['total_s']} s in all: "
        + (f"DIFFERENT in {different}" if different else "losses, norms and weights are identical"),
        highlight=False,
    )


def main(
    kills: Annotated[int, typer.Option(min=1, help="Number of interruptions.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of their kinds and moments.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="JSON file for the result.")
    ] = None,
) -> None:
    """Kill a training run again and again; it has to end like an uninterrupted one."""
    console = Console()
    try:
        result = experiment(console, kills, seed)
    except Failed as error:
        console.print(f"FAILED: {error}", markup=False, highlight=False)
        raise typer.Exit(1) from error
    show(console, result)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if result["different"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
