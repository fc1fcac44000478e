"""Runs the stages of a recipe on Ray Train, one after the other, and resumes an unfinished run."""

from __future__ import annotations

import shutil
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
import transformers
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.train import (
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    WorkerGroupError,
)
from ray.train.torch import TorchTrainer
from rich.console import Console

from mars_platform import __version__
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.manifest import Damaged
from mars_platform.checkpoint.metadata import locate_model, read_metadata
from mars_platform.cluster.ray_private import signal_handler_kept
from mars_platform.cluster.session import ray_session
from mars_platform.errors import Stopped, UserError
from mars_train.data.files import find_files
from mars_train.recipe import Recipe, Stage
from mars_train.run.curves import plot_curves
from mars_train.run.notice_board import shown_progress
from mars_train.run.preparation import prepare_run
from mars_train.run.run_directory import RunDirectory
from mars_train.run.worker import StageResult, run_worker
from mars_train.stage.held_out import HeldOutSet
from mars_train.stage.history import HISTORY_FILE, read_history
from mars_train.stage.job import StageJob
from mars_train.stage.trainer import MODEL
from mars_train.storage.directories import Storage, copy_into, share

_DATA, _RAY_RUNS = "data", "ray"
"""Names in the storage: the shared token store, and the files of Ray Train itself."""


def run_recipe(recipe: Recipe, console: Console) -> Path:
    """Run all stages that are not trained yet; the last one's model is ``output/model``.

    The recipe is kept in ``output/recipe.yaml``, earlier stages' checkpoints in
    ``output/stages/NAME``, the tokenised data and its report in ``output/data`` and
    ``output/report.jsonl``, the losses and scores in ``output/curves.png``.

    Returns:
        The directory of the final checkpoint.

    Raises:
        UserError: something the recipe names is missing, unusable or in the way.
        Stopped: the process was told to terminate; the run can be resumed.
    """
    directory = RunDirectory(recipe, recipe.output.resolve())
    base = _check_before_start(directory)
    storage = Storage(recipe.checkpoints.storage or str(directory.path / "checkpoints"))
    with directory.claimed():
        if directory.is_resumed():
            console.print(f"resuming the run in {directory.path}", highlight=False)
        min_cpus = int(recipe.scaling.most_workers * recipe.scaling.cpus_per_worker) + 1
        with (
            ray_session(recipe.cluster, min_cpus=min_cpus),  # one CPU for Ray Data
            _termination() as terminated,  # comes second, because Ray's start installs a handler
        ):
            _check_resources(recipe, console)
            start, held_out = prepare_run(directory, base, console)
            run = _Run(directory, storage, start, held_out, console)
            for stage in recipe.stages:
                run.train(stage, terminated)
            run.tidy()
    return directory.model


def _check_before_start(directory: RunDirectory) -> Path | None:
    """Refuse unusable output, model and data before anything is written or started.

    Returns:
        The model to start from; None for a new one.
    """
    recipe = directory.recipe
    directory.is_resumed()  # refuses a directory with other content
    base = None if recipe.model.base is None else locate_model(recipe.model.base)
    if base is not None:
        read_checkpoint(base)
    find_files(recipe.data.train)
    if recipe.evaluation is not None:
        find_files(recipe.evaluation.data, "evaluation.data")
    return base


@contextmanager
def _termination() -> Iterator[Callable[[], bool]]:
    """Record a SIGTERM instead of dying of it; schedulers send one before they take a machine."""
    received = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only that one handles signals
        yield received.is_set
        return
    before = signal.signal(signal.SIGTERM, lambda *_: received.set())
    try:
        yield received.is_set
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass
class _Run:
    """A run whose data is prepared."""

    directory: RunDirectory
    storage: Storage
    start: Path
    """Checkpoint that the next stage begins with."""
    held_out: HeldOutSet | None
    console: Console

    @property
    def recipe(self) -> Recipe:
        return self.directory.recipe

    def train(self, stage: Stage, terminated: Callable[[], bool]) -> None:
        """Train one stage unless it is trained already; the next stage starts from its model."""
        target = self.directory.trained(stage)
        if target.exists():
            self.console.print(f"stage {stage.name}: trained already", highlight=False)
        else:
            result = self._fit(stage, terminated)
            if result.status == "refused":
                raise UserError(result.reason)
            if result.status == "stopped":
                raise Stopped(
                    f"stage {stage.name} is stopped after step {result.step}; the same command "
                    "resumes it"
                )
            self._take_out(stage, target)
        self.start = target

    def _fit(self, stage: Stage, terminated: Callable[[], bool]) -> StageResult:
        """Run Ray Train's workers until the stage has ended."""
        if terminated():
            raise Stopped(f"stopped before stage {stage.name}; the same command resumes the run")
        job = StageJob(
            recipe=self.recipe,
            stage=stage,
            storage=self.storage.path(stage.name),
            start=share(self.storage, _start_name(stage), self.start),
            data=share(self.storage, _DATA, self.directory.data),
            held_out=self.held_out,
            provenance=_provenance(self.recipe, stage),
        )
        with shown_progress(self.console, terminated) as board:
            trainer = TorchTrainer(
                run_worker,
                train_loop_config={"job": job, "board": board},
                scaling_config=_scaling_config(self.recipe),
                run_config=self._run_config(stage),
            )
            result = _fitted(trainer, stage)
        assert isinstance(result.return_value, StageResult)
        return result.return_value

    def _run_config(self, stage: Stage) -> RunConfig:
        """Configure Ray Train with a new name, because it would resume a run of the same name."""
        storage = self.storage
        remote = None if storage.is_local else PyFileSystem(FSSpecHandler(storage.file_system))
        return RunConfig(
            name=f"{stage.name}-{uuid.uuid4().hex[:8]}",
            storage_path=storage.file_path(_RAY_RUNS),
            storage_filesystem=remote,
            failure_config=FailureConfig(max_failures=self.recipe.scaling.max_failures),
        )

    def _take_out(self, stage: Stage, target: Path) -> None:
        """Copy the trained model to its place, plot the curves, and clear the stage's storage."""
        storage = Storage(self.storage.path(stage.name))
        try:
            storage.verify(MODEL)
        except Damaged as error:
            storage.set_aside(MODEL)
            raise UserError(
                f"checkpoints.storage: the trained model in {storage.path(MODEL)} is damaged and "
                f"set aside ({error}); the same command stores it again"
            ) from error
        partial_target = target.with_name(f".partial-{target.name}")
        shutil.rmtree(partial_target, ignore_errors=True)
        copy_into(partial_target, storage.fetch(MODEL))
        target.parent.mkdir(parents=True, exist_ok=True)
        partial_target.rename(target)
        self.storage.remove(stage.name)
        self._plot()
        self.console.print(f"stage {stage.name}: checkpoint in {target}", highlight=False)
        metadata = read_metadata(target)
        if metadata is not None and metadata.provenance["embedding_grown"]:
            self.console.print(
                f"stage {stage.name}: the embedding had no spare row and was grown by one for the "
                f"mask token; the vocabulary is now {metadata.mask_token_id + 1}",
                highlight=False,
            )

    def tidy(self) -> None:
        """Remove everything from the storage that only an unfinished run needs."""
        names = [name for stage in self.recipe.stages for name in (stage.name, _start_name(stage))]
        for name in [_RAY_RUNS, _DATA, *names]:
            self.storage.remove(name)
        if self.recipe.checkpoints.storage is None:
            shutil.rmtree(self.storage.root)

    def _plot(self) -> None:
        """Plot the curves of the stages trained so far."""
        files = {
            stage.name: self.directory.trained(stage) / HISTORY_FILE for stage in self.recipe.stages
        }
        histories = {name: read_history(file) for name, file in files.items() if file.exists()}
        plot_curves(histories, self.directory.curves)


def _start_name(stage: Stage) -> str:
    """Return the name in the storage of the checkpoint that a stage begins with."""
    return f"start-{stage.name}"


def _check_resources(recipe: Recipe, console: Console) -> None:
    """Refuse workers that the cluster cannot hold, for which Ray Train would wait silently."""
    scaling, needed = recipe.scaling, recipe.scaling.worker_resources
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    num_fitting = sum(
        min(int(node.get(name, 0) / amount) for name, amount in needed.items() if amount)
        for node in nodes
    )
    wanted = " + ".join(f"{amount:g} {name}" for name, amount in needed.items())
    if num_fitting < scaling.least_workers and not recipe.cluster.autoscales:
        raise UserError(
            f"scaling.num_workers: {scaling.least_workers} workers of {wanted} each do not fit the "
            f"cluster, whose {len(nodes)} nodes hold {num_fitting}; lower it, add nodes, or set "
            "cluster.autoscales if nodes come when asked for"
        )
    free = ray.available_resources()
    if any(free.get(n, 0) < amount * scaling.least_workers for n, amount in needed.items()):
        console.print(f"waiting for {scaling.least_workers} x {wanted}, which others use now")


def _scaling_config(recipe: Recipe) -> ScalingConfig:
    scaling = recipe.scaling
    return ScalingConfig(
        num_workers=scaling.num_workers,
        use_gpu=scaling.use_gpu,
        resources_per_worker=scaling.worker_resources,
        placement_strategy=scaling.placement,
    )


def _fitted(trainer: TorchTrainer, stage: Stage) -> Result:
    """Run the trainer.

    Raises:
        RuntimeError: the workers failed too often; the message has the first failure's reason.
    """
    try:
        with signal_handler_kept(signal.SIGINT):
            result: Result = trainer.fit()
    except TrainingFailedError as error:
        reason: Exception = error
        if isinstance(error, WorkerGroupError) and error.worker_failures:
            reason = error.worker_failures[min(error.worker_failures)]
        lines = str(reason).strip().splitlines() or [type(reason).__name__]
        raise RuntimeError(
            f"stage {stage.name} failed ({lines[-1]}); the same command resumes it"
        ) from error
    return result


def _provenance(recipe: Recipe, stage: Stage) -> dict[str, Any]:
    return {
        "recipe": recipe.model_dump(mode="json"),
        "stage": stage.name,
        "versions": {
            "marsray": __version__,
            "ray": ray.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
