"""Runs stages without Ray, on processes that communicate through gloo."""

import multiprocessing
import os
import pickle
import resource
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mars_platform.errors import UserError
from mars_platform.mixing.head import causal_of
from mars_train.data.token_store import TokenStoreWriter
from mars_train.recipe import Recipe, ScratchModel
from mars_train.run.scratch import create_model
from mars_train.stage.history import TrainingHistory
from mars_train.stage.job import Notice, StageJob
from mars_train.stage.parallel import Workers, whole_weights
from mars_train.stage.trainer import StageTrainer

TIMEOUT_S = 600
MAX_LENGTH = 48
PROBE = torch.arange(3, 40)[None]  # token ids [1, 37]

STATES = {
    "family": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""Settings of `write_start` for a model with a gated delta net."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.train.warm_process"])


# --- models, data and jobs ------------------------------------------------------------------------


def write_start(path, *, family="qwen2", texts=("1 2 3",), **config):
    """Write a tiny checkpoint to start from."""
    settings = {
        "model_type": family,
        "hidden_size": 32,
        "head_dim": 8,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        **({"sliding_window": None} if family == "mistral" else {}),
        **config,
    }
    create_model(ScratchModel(config=settings, vocabulary_size=264), texts, 96, path, seed=0)
    return path


def write_rows(path, num, *, seed=0):
    """Write a store of random conversations with varying numbers of tokens and labels."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, MAX_LENGTH, num).astype(np.int32)
    begins = rng.integers(1, lengths)
    with TokenStoreWriter(path) as writer:
        writer.append(
            keys=np.stack([np.zeros(num, np.int64), np.arange(num)], axis=1),
            lengths=lengths,
            tokens=rng.integers(3, 250, lengths.sum()).astype(np.int32),
            supervised=np.concatenate(
                [np.arange(n) >= b for n, b in zip(lengths, begins, strict=True)]
            ),
        )
        writer.finish()
    return path


def build_job(storage, start, data, *, stage=(), held_out=None, workers=1, strategy="ddp", **rest):
    """Build a job of one stage; ``stage`` and ``rest`` change the recipe."""
    values = {"objective": "mars", "batch_size": 16, "micro_batch_size": 4, "row_slots": 128}
    recipe = Recipe.model_validate(
        {
            "model": {"base": str(start)},
            "data": {"train": ["rows.jsonl"], "max_length": MAX_LENGTH},
            "stages": [values | {"learning_rate": 5e-3, "epochs": 4} | dict(stage)],
            "output": str(storage),
            "precision": "no",
            "scaling": {"num_workers": workers, "strategy": strategy},
            "checkpoints": {"every_steps": 1000},
            **rest,
        }
    )
    return StageJob(recipe, recipe.stages[0], str(storage), str(start), str(data), held_out, {})


# --- running --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Events:
    """Events that reach a run from outside; steps are counted from 1."""

    stop_at: int | None = None
    save_at: tuple[int, ...] = ()
    full_disk_at: tuple[int, ...] = ()
    """Steps after which no file can grow beyond a few bytes."""


@dataclass
class RecordingReporter:
    """A reporter that records its calls."""

    events: Events
    step: int = 0
    said: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    reported: list[dict[str, Any]] = field(default_factory=list)

    def progress(self, progress):
        self.step = progress.step
        limit = 100 if self.step in self.events.full_disk_at else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    def say(self, text, *, warning=False):
        (self.warned if warning else self.said).append(text)

    def notice_due(self):
        return torch.distributed.get_rank() == 0 and (
            self.step == self.events.stop_at or self.step in self.events.save_at
        )

    def notice(self):
        return Notice(save=self.step in self.events.save_at, stop=self.step == self.events.stop_at)

    def report(self, metrics):
        self.reported.append(metrics)


@dataclass(frozen=True)
class StageOutcome:
    """The results of a run, as one worker saw them."""

    finished: bool | None
    error: str | None
    history: TrainingHistory
    weights: dict[str, Tensor]
    logits: Tensor | None
    reporter: RecordingReporter

    @property
    def losses(self):
        return [step.loss for step in self.history.steps]


def run_stage(job, **events) -> StageOutcome:
    """Run a stage on as many processes as its recipe has workers; return rank 0's outcome."""
    outcomes = run_group(_run_stage, job.recipe.scaling.num_workers, job, Events(**events))
    for outcome in outcomes[1:]:
        assert (outcome.finished, outcome.error) == (outcomes[0].finished, outcomes[0].error)
        assert repr(outcome.reporter.reported) == repr(outcomes[0].reporter.reported)  # NaN
    return outcomes[0]


def _run_stage(job, events):
    scaling, reporter = job.recipe.scaling, RecordingReporter(events)
    workers = Workers(scaling.strategy, use_gpu=False, precision=job.recipe.precision)
    trainer, finished, error = None, None, None
    try:
        trainer = StageTrainer(job, workers, reporter)
        finished = trainer.run()
    except UserError as raised:
        error = str(raised)
    if trainer is None:
        return StageOutcome(finished, error, TrainingHistory(), {}, None, reporter)
    weights = {name: weight.clone() for name, weight in whole_weights(trainer.model).items()}
    logits = None
    if scaling.strategy == "ddp":
        with torch.no_grad():
            logits = causal_of(trainer.model.eval())(PROBE).logits
    return StageOutcome(finished, error, trainer.history, weights, logits, reporter)


def run_group(function: Callable[..., Any], num_workers: int, *arguments: Any) -> list[Any]:
    """Call a module's function on the processes of a gloo group; return the results by rank."""
    with tempfile.TemporaryDirectory() as directory:
        meeting = Path(directory) / "meeting"
        members, ends = [], []
        for rank in range(num_workers):
            ours, theirs = _CONTEXT.Pipe()
            member = _CONTEXT.Process(
                target=_member, args=(theirs, meeting, rank, num_workers, function, arguments)
            )
            member.start()
            theirs.close()
            members.append(member)
            ends.append(ours)
        try:
            results = [_received(end) for end in ends]
            for end in ends:
                end.send_bytes(b"leave")
            return results
        except BaseException:
            for member in members:
                member.kill()  # it may be waiting for one that failed
            raise
        finally:
            for member in members:
                member.join()


def _received(end):
    assert end.poll(TIMEOUT_S), "a process does not answer"
    result, failure = pickle.loads(end.recv_bytes())  # noqa: S301 - our own process's
    assert failure is None, failure
    return result


def _member(end, meeting, rank, num_workers, function, arguments):
    numbers = {"RANK": rank, "LOCAL_RANK": rank}
    sizes = {"WORLD_SIZE": num_workers, "LOCAL_WORLD_SIZE": num_workers, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in {**numbers, **sizes}.items()})
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_workers
    )
    result = failure = None
    try:
        result = function(*arguments)
    except BaseException:
        failure = f"rank {rank}:\n{traceback.format_exc()}"
    end.send_bytes(pickle.dumps((result, failure)))
    if failure is None:
        end.recv_bytes()  # waits for all: one that leaves breaks the connections others still make
        torch.distributed.destroy_process_group()
