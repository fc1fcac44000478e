"""Runs a stage of objective generate: Ray actors write responses in shards, which are kept.

A run that was stopped goes on with the missing shards. Each shard, and the token store that they
make up, records what it was made from: one of another model, data or setting is written again.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from rich.console import Console

from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.checkpoint.manifest import Damaged
from mars_platform.cli.progress import progress_display
from mars_platform.config import Settings
from mars_platform.errors import Stopped, UserError, one_line
from mars_train.data.token_store import TokenStore, TokenStoreWriter
from mars_train.recipe import GenerateStage, Recipe, Scaling
from mars_train.run.notice_board import say_news
from mars_train.run.worker import set_threads
from mars_train.stage.progress import TerminalMessage
from mars_train.stage.responses import Responder, append_responses, rows_to_answer
from mars_train.storage.directories import SaveFailed, SingleWriter, Storage, fetch_shared

STORE = "store"

_ORIGIN, _LENGTHS, _TOKENS = "origin.json", "lengths.npy", "tokens.npy"
_POLL_S = 0.5


class Origin(Settings):
    """The model, data and settings that responses were made from, kept in ``origin.json``."""

    model: str
    """`weights_fingerprint` of the model."""
    data: str
    """Fingerprint of the token store that gave the prompts."""
    temperatures: tuple[float, ...]
    """Temperatures of the stage."""
    max_responses: int | None
    """Most responses of the stage."""
    max_tokens: int | None
    """Most tokens of a response, by the stage's own limit."""
    seed: int
    """Seed of the stage."""
    max_length: int
    """Most tokens of a conversation."""
    shard_size: int
    """Responses of a shard."""
    number_type: str
    """Type of the weights that the engine ran with."""


@dataclass(frozen=True)
class _Job:
    """Everything that a writer needs to know."""

    stage: GenerateStage
    scaling: Scaling
    origin: Origin
    model: str
    """Checkpoint, for `fetch_shared`."""
    data: str
    """Token store, for `fetch_shared`."""
    storage: str
    """Directory or fsspec URL of the shards."""


@dataclass(frozen=True)
class Generation:
    """A stage of objective generate in a run.

    ``share`` makes ``model`` and ``data`` available to writers and returns them for `fetch_shared`,
    model first. ``results``, on local disk, has the results of finished stages.
    """

    recipe: Recipe
    stage: GenerateStage
    model: Path
    data: Path
    share: Callable[[], tuple[str, str]]
    shards: Storage
    results: Storage
    console: Console

    def run(self, terminated: Callable[[], bool]) -> None:
        """Write the token store of the stage, unless it is there.

        Raises:
            UserError: the model is unusable, or a shard cannot be written.
            Stopped: the process was told to terminate; the run can be resumed.
            RuntimeError: writers failed too often.
        """
        name, origin = self.stage.name, self._origin()
        if name in self.results.names() and self._is_usable(self.results, name, origin):
            self._say("written already")
            return
        data, started = TokenStore(self.data), time.monotonic()
        total = _num_shards(self.stage, data)
        self.shards.remove_partial()
        stored = set(self.shards.names())
        missing = [
            index
            for index in range(total)
            if (shard := _shard_name(index)) not in stored
            or not self._is_usable(self.shards, shard, origin)
        ]
        if len(missing) < total:
            self._say(f"{total - len(missing)} of {total} shards are there")
        if missing:
            self._write_shards(self._job(origin), missing, total, terminated)
        self._join(data, origin)
        count = len(rows_to_answer(self.stage, len(data)))
        self._say(f"{count:,} responses; {time.monotonic() - started:.0f} s")

    def _job(self, origin: Origin) -> _Job:
        model, data = self.share()
        return _Job(self.stage, self.recipe.scaling, origin, model, data, self.shards.root)

    def _say(self, text: str, *, warning: bool = False) -> None:
        say_news(self.console, TerminalMessage(f"stage {self.stage.name}: {text}", warning))

    def _origin(self) -> Origin:
        stage = self.stage
        return Origin(
            model=weights_fingerprint(self.model),
            data=TokenStore(self.data).fingerprint,
            temperatures=stage.temperatures,
            max_responses=stage.max_responses,
            max_tokens=stage.max_tokens,
            seed=stage.seed,
            max_length=self.recipe.data.max_length,
            shard_size=stage.shard_size,
            number_type=_number_type(self.recipe),
        )

    def _is_usable(self, storage: Storage, name: str, origin: Origin) -> bool:
        """Return whether a directory is whole and of this origin; otherwise remove it."""
        path = storage.path(name)
        try:
            storage.verify(name)
            content = storage.file_system.cat_file(storage.file_path(name, _ORIGIN))
            found = Origin.model_validate_json(content)
        except (Damaged, OSError, ValueError) as error:
            self._say(f"{path} is damaged and written again: {one_line(error)}", warning=True)
        else:
            ours, theirs = origin.model_dump(), found.model_dump()
            changed = ", ".join(key for key in ours if ours[key] != theirs[key])
            if not changed:
                return True
            self._say(f"{path} is of another {changed} and written again", warning=True)
        storage.remove(name)
        return False

    def _write_shards(
        self, job: _Job, missing: Sequence[int], total: int, terminated: Callable[[], bool]
    ) -> None:
        """Let as many writers as the run has workers write the missing shards."""
        num_writers = min(job.scaling.most_workers, len(missing))
        create = ray.remote(_Writer).options(**_writer_options(job.scaling))
        writers = [create.remote(job) for _ in range(num_writers)]
        # A shard goes to a writer that runs, because the cluster may not hold all of them yet.
        running = {writer.start.remote(): writer for writer in writers}
        waiting, title, done = deque(missing), f"stage {self.stage.name}", total - len(missing)
        try:
            with progress_display(self.console) as display:
                while done < total:
                    if terminated():
                        raise Stopped(
                            f"stage {self.stage.name} is stopped with {done} of {total} shards; "
                            "the same command resumes it"
                        )
                    display.update(title, done, total, "shards of responses")
                    for finished in ray.wait(list(running), timeout=_POLL_S)[0]:
                        writer = running.pop(finished)
                        done += self._num_written(finished)
                        if waiting:
                            running[writer.write.remote(waiting.popleft())] = writer
                display.update(title, done, total, "shards of responses")
        finally:
            for writer in writers:
                ray.kill(writer)  # frees the memory of its GPU for the workers of the next stage

    def _num_written(self, finished: Any) -> int:
        """Return the number of shards that a finished call of a writer has written."""
        try:
            found: int | str = ray.get(finished)
        except ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise RuntimeError(
                f"stage {self.stage.name} failed ({lines[-1]}); the same command resumes it"
            ) from error
        if isinstance(found, str):
            raise UserError(found)
        return found

    def _join(self, data: TokenStore, origin: Origin) -> None:
        """Make one token store of all shards, and clear their storage."""

        def write(directory: Path) -> None:
            with TokenStoreWriter(directory / STORE) as writer:
                for index in range(_num_shards(self.stage, data)):
                    shard = self.shards.fetch(_shard_name(index))
                    rows = _rows_of(index, self.stage, data)
                    append_responses(writer, data, rows, _read_shard(shard))
                writer.finish()
            (directory / _ORIGIN).write_text(origin.model_dump_json(indent=1), encoding="utf-8")

        self.results.remove(self.stage.name)  # one whose manifest was lost
        try:
            self.results.save(self.stage.name, write, SingleWriter())
        except SaveFailed as error:
            raise UserError(f"output: {error}; make room and run again") from error


def _shard_name(index: int) -> str:
    return f"shard-{index:06d}"


def _num_shards(stage: GenerateStage, data: TokenStore) -> int:
    return -(-len(rows_to_answer(stage, len(data))) // stage.shard_size)


def _rows_of(index: int, stage: GenerateStage, data: TokenStore) -> NDArray[np.int64]:
    """Return the rows of the data that a shard responds to: int64 [responses]."""
    rows = rows_to_answer(stage, len(data))
    return rows[index * stage.shard_size : (index + 1) * stage.shard_size]


def _number_type(recipe: Recipe) -> str:
    """Return the name of the type of the engine's weights: the trainer's, float32 on a CPU."""
    is_half = recipe.precision == "bf16" and recipe.scaling.use_gpu
    return "bfloat16" if is_half else "float32"


def _writer_options(scaling: Scaling) -> dict[str, Any]:
    """Return Ray's options of an actor with one worker's resources."""
    resources = dict(scaling.worker_resources)
    return {
        "num_cpus": resources.pop("CPU"),
        "num_gpus": resources.pop("GPU", 0),
        "memory": resources.pop("memory", None),
        "resources": resources,
        "max_restarts": scaling.max_failures,
        "max_task_retries": scaling.max_failures,
    }


class _Writer:
    """Actor that writes shards; a user's mistake is returned as its message, not raised."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._parts: tuple[TokenStore, Responder] | None = None

    def start(self) -> int | str:
        """Load data and model; return 0, the number of shards written."""
        job = self._job
        set_threads(job.scaling)
        try:
            self._parts = (
                TokenStore(Path(fetch_shared(job.data))),
                Responder(
                    read_checkpoint(fetch_shared(job.model)),
                    job.stage,
                    job.origin.max_length,
                    dtype=getattr(torch, job.origin.number_type),
                    device="cuda" if job.scaling.use_gpu else "cpu",
                ),
            )
        except UserError as error:
            return str(error)
        return 0

    def write(self, index: int) -> int | str:
        """Write one shard; return 1."""
        if self._parts is None and isinstance(refusal := self.start(), str):  # a restarted actor
            return refusal
        assert self._parts is not None
        data, responder = self._parts
        try:
            responses = responder.respond(data, _rows_of(index, self._job.stage, data))
            write = partial(_write_responses, responses, self._job.origin)
            storage = Storage(self._job.storage)
            # The shard is there if this process died before it could say so, and a part of it if
            # the manifest was lost.
            storage.remove(_shard_name(index))
            storage.save(_shard_name(index), write, SingleWriter())
        except SaveFailed as error:
            return f"checkpoints.storage: {error}; make room and run again"
        except UserError as error:
            return str(error)
        return 1


def _write_responses(responses: Sequence[Sequence[int]], origin: Origin, directory: Path) -> None:
    np.save(directory / _LENGTHS, np.array([len(each) for each in responses], np.int32))
    np.save(directory / _TOKENS, np.array([t for each in responses for t in each], np.int32))
    (directory / _ORIGIN).write_text(origin.model_dump_json(indent=1), encoding="utf-8")


def _read_shard(directory: Path) -> list[Any]:
    """Return the responses that `_write_responses` wrote, each int32 [length]."""
    lengths, tokens = np.load(directory / _LENGTHS), np.load(directory / _TOKENS)
    return np.split(tokens, np.cumsum(lengths)[:-1])
