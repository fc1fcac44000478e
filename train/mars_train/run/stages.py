"""Prepares a run's data on Ray, and trains its stages on Ray Train, one after the other."""

import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.checkpoint.files import settle
from mars_platform.checkpoint.manifest import Damaged
from mars_platform.checkpoint.metadata import read_metadata
from mars_platform.cli.progress import working
from mars_platform.cli.report import say
from mars_platform.cluster.ray_private import with_own_interrupts, without_data_sets
from mars_platform.cluster.session import ray_session
from mars_platform.errors import Interrupted, Stopped, UserError
from mars_train.data.encoding import check_vocabulary
from mars_train.data.pipeline import prepare
from mars_train.data.row_report import refuse_few_rows
from mars_train.data.token_store import TokenStore
from mars_train.method.batches import num_steps
from mars_train.recipe import GenerateStage, MarsStage, Recipe, Stage, TrainedStage
from mars_train.run.curves import write_curves
from mars_train.run.generation import STORE, Generation
from mars_train.run.notice_board import shown_progress
from mars_train.run.preparation import Start
from mars_train.run.run_directory import RunDirectory
from mars_train.run.tracking import Send
from mars_train.run.worker import run_worker
from mars_train.stage.held_out import HeldOutSet
from mars_train.stage.job import StageJob
from mars_train.stage.progress import Figures, StageResult
from mars_train.stage.responses import rows_to_answer
from mars_train.stage.trainer import MODEL
from mars_train.storage.directories import Storage, copy_into, share

_DATA, _RAY_RUNS = "data", "ray"
"""Names in the storage: the shared token store, and the files of Ray Train itself."""
_ENVIRONMENT = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
"""Ray Train takes one report of the workers at this interval, 2 s by default. A stage's last two
are taken before it ends, and at a step with a score and a checkpoint the workers wait for one."""


def train_stages(directory: RunDirectory, start: Start, console: Console, send: Send) -> None:
    """Prepare the data and train all stages that are not trained yet, from ``start`` on.

    The directory is cleared if the run is refused. ``send`` gets the figures of steps.

    Raises:
        UserError: the cluster, the data or a setting of a stage is unusable.
        Stopped: the process was told to terminate or interrupted; the run can be resumed.
    """
    recipe = directory.recipe
    storage = Storage(recipe.checkpoints.storage or str(directory.path / "checkpoints"))
    min_cpus = int(recipe.scaling.most_workers * recipe.scaling.cpus_per_worker) + 1
    with (
        # one CPU for Ray Data
        ray_session(recipe.cluster, min_cpus=min_cpus, environment=_ENVIRONMENT),
        _recorded(signal.SIGTERM) as terminated,  # second, because Ray's start installs a handler
    ):
        with directory.cleared_if_refused():
            _check_resources(recipe, console)
            _prepare_data(directory, start.checkpoint, console)
        run = _Run(directory, storage, start.checkpoint.path, start.held_out, console, send)
        for stage in recipe.stages:
            if isinstance(stage, GenerateStage):
                run.generate(stage, terminated)
            else:
                run.train(stage, terminated)
        run.tidy()


@contextmanager
def _recorded(number: signal.Signals) -> Iterator[Callable[[], bool]]:
    """Record SIGTERM or the first SIGINT instead of dying of it.

    Schedulers send SIGTERM before they take a machine; whoever presses Ctrl-C twice cannot wait.
    """
    received = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only that one handles signals
        yield received.is_set
        return

    def record(*_: object) -> None:
        if number == signal.SIGINT and received.is_set():
            raise KeyboardInterrupt
        received.set()

    before = signal.signal(number, record)
    try:
        yield received.is_set
    finally:
        signal.signal(number, before)


@dataclass
class _Run:
    """A run whose data is prepared."""

    directory: RunDirectory
    storage: Storage
    start: Path
    held_out: HeldOutSet | None
    console: Console
    send: Send

    @property
    def recipe(self) -> Recipe:
        return self.directory.recipe

    def generate(self, stage: GenerateStage, terminated: Callable[[], bool]) -> None:
        """Write responses of the model so far, unless they are there; the model stays."""
        self.directory.stages.mkdir(exist_ok=True)
        start = self.start

        def shared() -> tuple[str, str]:
            model = share(self.storage, _start_name(stage), start)
            return model, share(self.storage, _DATA, self.directory.data)

        generation = Generation(
            recipe=self.recipe,
            stage=stage,
            model=start,
            data=self.directory.data,
            share=shared,
            shards=Storage(self.storage.path(stage.name)),
            results=Storage(str(self.directory.stages)),
            console=self.console,
        )
        generation.run(terminated)
        self.storage.remove(stage.name)

    def train(self, stage: TrainedStage, terminated: Callable[[], bool]) -> None:
        """Train one stage unless it is trained already; the next stage starts from its model."""
        target = self.directory.trained(stage)
        if target.exists():
            say(self.console, f"stage {stage.name}: trained already")
        else:
            with _recorded(signal.SIGINT) as interrupted:
                result = self._fit(stage, lambda: terminated() or interrupted())
            if result.status == "refused":
                raise UserError(result.reason)
            if result.status == "stopped":
                raise (Interrupted if interrupted() else Stopped)(
                    f"stage {stage.name} is stopped after step {result.step}; the same command "
                    "resumes it"
                )
            self._take_out(stage, target)
            if interrupted():
                raise Interrupted(f"stopped after stage {stage.name}; the same command goes on")
        self.start = target

    def _fit(self, stage: TrainedStage, terminated: Callable[[], bool]) -> StageResult:
        """Run Ray Train's workers until the stage has ended."""
        if terminated():
            raise Stopped(f"stopped before stage {stage.name}; the same command resumes the run")
        job = StageJob(
            recipe=self.recipe,
            stage=stage,
            storage=self.storage.path(stage.name),
            start=share(self.storage, _start_name(stage), self.start),
            known_as=self._base(stage),
            data=share(self.storage, _DATA, self.directory.data),
            held_out=self.held_out,
            provenance=_provenance(self.recipe, stage),
            responses=self._shared_responses(stage),
        )
        to_come, send = self._to_come(stage), self._sender(stage)
        with shown_progress(self.console, terminated, to_come, send) as board:
            trainer = TorchTrainer(
                # as its configuration, Ray's controller would load the job with torch and all else
                partial(run_worker, job, board),
                scaling_config=_scaling_config(self.recipe),
                run_config=self._run_config(stage),
            )
            result = _fitted(without_data_sets(with_own_interrupts(trainer)), stage)
        assert isinstance(result.return_value, StageResult)
        return result.return_value

    def _sender(self, stage: TrainedStage) -> Send:
        """Return what sends figures of a stage under its name, with steps of the whole run."""
        stages, rows = self.recipe.trained_stages, len(TokenStore(self.directory.data))
        before = sum(num_steps(each, rows) for each in stages[: stages.index(stage)])
        name = stage.name

        def send(figures: Sequence[Figures]) -> None:
            self.send(
                [
                    Figures(before + f.step, {f"{name}/{key}": v for key, v in f.values.items()})
                    for f in figures
                ]
            )

        return send

    def _to_come(self, stage: TrainedStage) -> float:
        return work_to_come(self.recipe, stage, len(TokenStore(self.directory.data)))

    def _base(self, stage: TrainedStage) -> str:
        """Return the name of the model that a stage begins with; hub ids stay as they are."""
        given = self.recipe.model.base
        is_first = stage == self.recipe.trained_stages[0]
        return given if is_first and given and not Path(given).exists() else str(self.start)

    def _shared_responses(self, stage: TrainedStage) -> str | None:
        """Return the responses that a stage trains on, for `fetch_shared`; None if it has none."""
        if not isinstance(stage, MarsStage) or stage.responses is None:
            return None
        store = self.directory.stages / stage.responses / STORE
        return share(self.storage, _responses_name(stage), store)

    def _run_config(self, stage: TrainedStage) -> RunConfig:
        """Configure Ray Train with a new name, because it would resume a run of the same name."""
        storage = self.storage
        remote = None if storage.is_local else PyFileSystem(FSSpecHandler(storage.file_system))
        return RunConfig(
            name=f"{stage.name}-{uuid.uuid4().hex[:8]}",
            storage_path=storage.file_path(_RAY_RUNS),
            storage_filesystem=remote,
            failure_config=FailureConfig(max_failures=self.recipe.scaling.max_failures),
        )

    def _take_out(self, stage: TrainedStage, target: Path) -> None:
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
        settle(partial_target, target)
        self.storage.remove(stage.name)
        self._plot()
        is_draft = isinstance(stage, MarsStage) and stage.adapter is not None
        if is_draft or (stage.lora is not None and not stage.lora.merge):
            base = self._base(stage)
            say(self.console, f"stage {stage.name}: adapter in {target}, for the model {base}")
            return
        say(self.console, f"stage {stage.name}: checkpoint in {target}")
        metadata = read_metadata(target)
        if metadata is not None and metadata.provenance["embedding_grown"]:
            say(
                self.console,
                f"stage {stage.name}: the embedding had no spare row and was grown by one for the "
                f"mask token; the vocabulary is now {metadata.mask_token_id + 1}",
            )

    def tidy(self) -> None:
        """Remove everything from the storage that only an unfinished run needs."""
        names = [
            name
            for stage in self.recipe.stages
            for name in (stage.name, _start_name(stage), _responses_name(stage))
        ]
        for name in [_RAY_RUNS, _DATA, *names]:
            self.storage.remove(name)
        if self.recipe.checkpoints.storage is None:
            shutil.rmtree(self.storage.root)

    def _plot(self) -> None:
        write_curves(self.directory.histories(), self.directory.curves)


def work_to_come(recipe: Recipe, stage: Stage, num_rows: int) -> float:
    """Return the expected work of the stages after one, as a multiple of its own."""
    later = recipe.stages[recipe.stages.index(stage) + 1 :]
    return sum(_work(each, num_rows) for each in later) / _work(stage, num_rows)


def _work(stage: Stage, num_rows: int) -> int:
    """Return the expected work of a stage, in streams of tokens that go through the model.

    Writing a response takes about twice as long as training on one.
    """
    if isinstance(stage, GenerateStage):
        return 2 * len(rows_to_answer(stage, num_rows))
    conversations = num_steps(stage, num_rows) * stage.batch_size
    if not isinstance(stage, MarsStage):
        return conversations
    return conversations * (2 if stage.responses is None else 3)


def _start_name(stage: Stage) -> str:
    """Return the name in the storage of the checkpoint that a stage begins with."""
    return f"start-{stage.name}"


def _responses_name(stage: Stage) -> str:
    """Return the name in the storage of the responses that a stage trains on.

    No stage has a name with a dot.
    """
    return f"responses.{stage.name}"


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
        say(console, f"waiting for {scaling.least_workers} x {wanted}, which others use now")


def _prepare_data(directory: RunDirectory, checkpoint: Checkpoint, console: Console) -> None:
    """Tokenise the training data, unless that is done already."""
    if directory.data.exists():
        store = TokenStore(directory.data)
        text = f"{len(store):,} conversations, {store.num_tokens:,} tokens, prepared before"
        say(console, f"data: {text}")
        return
    recipe, started = directory.recipe, time.monotonic()
    with working("tokenising the training data", console):
        counts = prepare(recipe.data, checkpoint.path, directory.data)
    say(
        console,
        f"data: {counts.recognised}; {counts.num_examples:,} conversations, "
        f"{counts.num_tokens:,} tokens, {counts.num_supervised:,} of them supervised; "
        f"{counts.num_truncated:,} conversations cut to length, {counts.num_noted:,} with a note, "
        f"{counts.num_bad:,} bad rows skipped ({directory.report}); "
        f"{time.monotonic() - started:.0f} s",
    )
    check_vocabulary(counts.max_token_id, checkpoint.vocabulary_size)
    refuse_few_rows(counts.num_examples, recipe)


def _scaling_config(recipe: Recipe) -> ScalingConfig:
    scaling = recipe.scaling
    return ScalingConfig(
        num_workers=scaling.num_workers,
        use_gpu=scaling.use_gpu,
        resources_per_worker=scaling.worker_resources,
        placement_strategy=scaling.placement,
    )


def _fitted(trainer: TorchTrainer, stage: TrainedStage) -> Result:
    """Run the trainer."""
    try:
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
    content, base = recipe.model_dump(mode="json"), recipe.model.base
    if base and Path(base).exists() and not Path(base).is_absolute():
        content["model"]["base"] = f"./{base}"  # a directory "a/b" would look like a hub id
    return {
        "recipe": content,
        "stage": stage.name,
        "versions": {
            "marsray": __version__,
            "ray": ray.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
