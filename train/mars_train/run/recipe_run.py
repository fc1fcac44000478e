"""Runs the stages of a recipe on Ray Train, one after the other, and resumes an unfinished run.

What is done is on disk under the run's output directory: the recipe, the token store, and one
checkpoint directory for each finished stage. Everything there is complete or absent.
"""

from __future__ import annotations

import fcntl
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray
import torch
import transformers
import yaml
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
from mars_platform.checkpoint.directory import (
    Checkpoint,
    locate_model,
    read_checkpoint,
    read_metadata,
)
from mars_platform.checkpoint.manifest import Damaged
from mars_platform.cluster.ray_private import interrupt_handler_kept
from mars_platform.cluster.session import ray_session
from mars_platform.config import load_settings
from mars_platform.errors import Stopped, UserError
from mars_train.data.pipeline import check_vocabulary, find_files, prepare, read_conversations
from mars_train.data.token_store import TokenStore
from mars_train.method.batches import num_steps
from mars_train.recipe import Recipe, Stage
from mars_train.run.curves import plot_curves
from mars_train.run.scratch import create_model
from mars_train.run.worker import StageResult, run_worker
from mars_train.stage.held_out import HeldOutSet, read_held_out
from mars_train.stage.history import HISTORY_FILE, read_history
from mars_train.stage.job import StageJob
from mars_train.stage.progress import shown_progress
from mars_train.stage.trainer import MODEL
from mars_train.storage.directories import Storage, copy_into, share

RECIPE_FILE, CURVES_FILE = "recipe.yaml", "curves.png"
_DATA, _STAGES, _LOCK, _RUNS = "data", "stages", ".lock", "ray"
_LEFT_BY_REFUSALS = {"report.jsonl", _LOCK}


def run_recipe(recipe: Recipe, console: Console) -> Path:
    """Run every stage, or what is left of them; the last one's model ends up in ``output/model``.

    The recipe is kept in ``output/recipe.yaml``, earlier stages' checkpoints in
    ``output/stages/NAME``, the tokenised data and its report in ``output/data`` and
    ``output/report.jsonl``, the losses and scores in ``output/curves.png``.

    Returns:
        The directory of the final checkpoint.

    Raises:
        UserError: something the recipe names is missing, unusable or already there.
        Stopped: the process was told to terminate; the run can be resumed.
    """
    output = recipe.output.resolve()
    # what can be refused is refused before anything is written or started
    _is_resumed(recipe, output)
    base = None if recipe.model.base is None else locate_model(recipe.model.base)
    if base is not None:
        read_checkpoint(base)
    find_files(recipe.data.train)
    if recipe.evaluation is not None:
        find_files(recipe.evaluation.data, "evaluation.data")
    storage = recipe.checkpoints.storage or str(output / "checkpoints")
    Storage(storage)
    with _claimed(output):
        if _is_resumed(recipe, output):
            console.print(f"resuming the run in {output}", highlight=False)
        min_cpus = int(recipe.scaling.most_workers * recipe.scaling.cpus_per_worker) + 1
        with (
            ray_session(recipe.cluster, min_cpus=min_cpus),  # one CPU for Ray Data
            _termination() as terminated,  # within: Ray's start puts a handler of its own in place
        ):
            _check_resources(recipe, console)
            run = _Run(recipe, output, storage, *_prepare(recipe, output, base, console), console)
            for stage in recipe.stages:
                run.train(stage, terminated)
            run.tidy()
    return output / MODEL


@dataclass
class _Run:
    """A run whose data is ready."""

    recipe: Recipe
    output: Path
    storage: str
    start: Path
    """Checkpoint that the next stage begins with."""
    held_out: HeldOutSet | None
    console: Console

    def train(self, stage: Stage, terminated: Callable[[], bool]) -> None:
        """Train one stage, unless it is trained already; the next one starts from its model."""
        target = _target(self.recipe, self.output, stage)
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
        if terminated():
            raise Stopped(f"stopped before stage {stage.name}; the same command resumes the run")
        shared = Storage(self.storage)
        job = StageJob(
            recipe=self.recipe,
            stage=stage,
            storage=shared.path(stage.name),
            start=share(shared, _start_name(stage), self.start),
            data=share(shared, _DATA, self.output / _DATA),
            held_out=self.held_out,
            provenance=_provenance(self.recipe, stage),
        )
        with shown_progress(self.console, terminated) as board:
            trainer = TorchTrainer(
                run_worker,
                train_loop_config={"job": job, "board": board},
                scaling_config=_scaling_config(self.recipe),
                run_config=self._run_config(stage, shared),
            )
            result = _fitted(trainer, stage)
        assert isinstance(result.return_value, StageResult)
        return result.return_value

    def _run_config(self, stage: Stage, shared: Storage) -> RunConfig:
        """Names differ from start to start: Ray Train would take an old run up by itself."""
        return RunConfig(
            name=f"{stage.name}-{uuid.uuid4().hex[:8]}",
            storage_path=shared.file_path(_RUNS),
            storage_filesystem=None if shared.is_local else _arrow_file_system(shared),
            failure_config=FailureConfig(max_failures=self.recipe.scaling.max_failures),
        )

    def _take_out(self, stage: Stage, target: Path) -> None:
        """Move the trained model to its place, draw the curves, drop what resuming needed."""
        storage = Storage(Storage(self.storage).path(stage.name))
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
        Storage(self.storage).remove_all(stage.name)
        self._draw()
        self.console.print(f"stage {stage.name}: checkpoint in {target}", highlight=False)
        metadata = read_metadata(target)
        if metadata is not None and metadata.provenance["embedding_grown"]:
            self.console.print(
                f"stage {stage.name}: the embedding had no spare row and was grown by one for the "
                f"mask token; the vocabulary is now {metadata.mask_token_id + 1}",
                highlight=False,
            )

    def tidy(self) -> None:
        """Remove what only a run in progress needs from the storage."""
        storage = Storage(self.storage)
        starts = [_start_name(stage) for stage in self.recipe.stages]
        for name in [_RUNS, _DATA, *starts, *(stage.name for stage in self.recipe.stages)]:
            storage.remove_all(name)
        if self.recipe.checkpoints.storage is None:
            shutil.rmtree(self.storage)

    def _draw(self) -> None:
        """Draw the curves of the stages trained so far."""
        targets = {s.name: _target(self.recipe, self.output, s) for s in self.recipe.stages}
        histories = {
            name: read_history(target / HISTORY_FILE)
            for name, target in targets.items()
            if (target / HISTORY_FILE).exists()
        }
        plot_curves(histories, self.output / CURVES_FILE)


# --- the output directory -------------------------------------------------------------------------


@contextmanager
def _claimed(output: Path) -> Iterator[None]:
    """Keep a second run out of the directory; the claim ends with this process at the latest."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"output: another run works in {output} at this moment; wait for it, or name "
                "another directory"
            ) from error
        yield


def _is_resumed(recipe: Recipe, output: Path) -> bool:
    """Whether the directory holds a part of this very run.

    Raises:
        UserError: it holds a finished run, another one, or something else.
    """
    kept = output / RECIPE_FILE
    if not kept.exists():
        if output.exists() and {item.name for item in output.iterdir()} - _LEFT_BY_REFUSALS:
            raise UserError(f"output: {output} is not empty; name a new directory or remove it")
        return False
    if (output / MODEL).exists():
        raise UserError(
            f"output: the run in {output} is finished; its model is {output / MODEL}. Name a new "
            "directory for another run"
        )
    changed = recipe.differences(load_settings(kept, Recipe))
    if changed:
        raise UserError(
            f"output: {output} holds an unfinished run of another recipe, which differs in "
            f"{', '.join(changed)}; name a new directory, or take the recipe in {kept}"
        )
    return True


def _start_name(stage: Stage) -> str:
    return f"start-{stage.name}"


def _target(recipe: Recipe, output: Path, stage: Stage) -> Path:
    return output / MODEL if stage == recipe.stages[-1] else output / _STAGES / stage.name


@contextmanager
def _termination() -> Iterator[Callable[[], bool]]:
    """Note a SIGTERM, as schedulers send it before they take a machine, instead of dying of it."""
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals are the main one's
        yield noted.is_set
        return
    before = signal.signal(signal.SIGTERM, lambda *_: noted.set())
    try:
        yield noted.is_set
    finally:
        signal.signal(signal.SIGTERM, before)


# --- preparation ----------------------------------------------------------------------------------


def _prepare(
    recipe: Recipe, output: Path, base: Path | None, console: Console
) -> tuple[Path, HeldOutSet | None]:
    """Start model, data and held-out set; on a refusal the output directory is left free."""
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
    resumed = (output / _DATA).exists()
    (output / RECIPE_FILE).write_text(text, encoding="utf-8")
    try:
        start = base or _new_model(recipe, output, console)
        checkpoint = read_checkpoint(start)
        _check_length(recipe, checkpoint)
        if resumed:
            _describe_store(TokenStore(output / _DATA), console)
        else:
            _prepare_data(recipe, checkpoint, output, console)
        held_out = None
        if recipe.evaluation is not None:
            held_out = read_held_out(recipe.evaluation, recipe.data, checkpoint)
    except UserError:
        if not resumed:
            _clear(output)
        raise
    return start, held_out


def _new_model(recipe: Recipe, output: Path, console: Console) -> Path:
    assert recipe.model.scratch is not None
    path = output / _STAGES / "start"
    if path.exists():
        return path
    texts = (
        message.content
        for conversation in read_conversations(recipe.data.train)
        for message in conversation.messages
    )
    unfinished = path.with_name(".partial-start")
    shutil.rmtree(unfinished, ignore_errors=True)
    create_model(recipe.model.scratch, texts, recipe.data.max_length, unfinished, recipe.seed)
    unfinished.rename(path)
    console.print(f"new model and tokenizer in {path}", highlight=False)
    return path


def _check_length(recipe: Recipe, checkpoint: Checkpoint) -> None:
    if recipe.data.max_length > checkpoint.max_length:
        raise UserError(
            f"data.max_length: {recipe.data.max_length} exceeds the {checkpoint.max_length} tokens "
            "that the model's context holds; lower it"
        )


def _prepare_data(recipe: Recipe, checkpoint: Checkpoint, output: Path, console: Console) -> None:
    started = time.monotonic()
    with console.status("tokenising the training data"):
        prepared = prepare(recipe.data, checkpoint.path, output / _DATA)
    console.print(
        f"data: {prepared.num_examples:,} conversations, {prepared.num_tokens:,} tokens, "
        f"{prepared.num_supervised:,} of them supervised; {prepared.num_truncated:,} conversations "
        f"cut to length, {prepared.num_bad:,} bad rows skipped ({prepared.report}); "
        f"{time.monotonic() - started:.0f} s",
        highlight=False,
    )
    check_vocabulary(prepared, checkpoint.config.vocab_size)
    for stage in recipe.stages:
        if num_steps(stage, prepared.num_examples) == 0:
            raise UserError(
                f"data.train: {prepared.num_examples} conversations do not fill one batch of "
                f"stages.{stage.name}.batch_size = {stage.batch_size}; lower it or add data"
            )


def _describe_store(store: TokenStore, console: Console) -> None:
    text = f"data: {len(store):,} conversations, {store.num_tokens:,} tokens, prepared before"
    console.print(text, highlight=False)


def _clear(output: Path) -> None:
    """Remove what a refused run has written, but for the report on its data."""
    for item in output.iterdir():
        if item.is_dir():
            shutil.rmtree(item)
        elif item.name not in _LEFT_BY_REFUSALS:
            item.unlink()


# --- Ray Train ------------------------------------------------------------------------------------


def _check_resources(recipe: Recipe, console: Console) -> None:
    """Refuse workers that the cluster cannot hold: Ray Train would wait for them without a word."""
    scaling, needed = recipe.scaling, recipe.scaling.worker_resources
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    places = sum(
        min(int(node.get(name, 0) / amount) for name, amount in needed.items() if amount)
        for node in nodes
    )
    wanted = " + ".join(f"{amount:g} {name}" for name, amount in needed.items())
    if places < scaling.least_workers and not recipe.cluster.autoscales:
        raise UserError(
            f"scaling.num_workers: {scaling.least_workers} workers of {wanted} each do not fit the "
            f"cluster, whose {len(nodes)} nodes hold {places}; lower it, add nodes, or set "
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
        RuntimeError: the workers failed for good, with the first one's reason.
    """
    try:
        with interrupt_handler_kept():
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


def _arrow_file_system(storage: Storage) -> pyarrow.fs.FileSystem:
    """Ray's storage takes file systems of Arrow's."""
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(storage.file_system))


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
