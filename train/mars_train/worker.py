"""The training loop of one Ray Train worker. accelerate does device, precision and gradients."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from numpy.typing import NDArray
from ray.actor import ActorHandle
from transformers import AutoTokenizer, get_cosine_schedule_with_warmup

from mars_platform.checkpoint import MarsMetadata, add_mask_token, load_model, save_checkpoint
from mars_train.layout import Batch, collate, lay_out, pack
from mars_train.objective import LossSums, Objective
from mars_train.progress import Progress
from mars_train.recipe import MarsStage, Recipe, Stage

_POST_INTERVAL_S = 0.5
_SHUFFLE_ROWS = 10_000


@dataclass(frozen=True)
class StageJob:
    """What a worker is handed: one stage of a recipe, and where it starts from."""

    recipe: Recipe
    stage: Stage
    start: Path
    """Checkpoint directory that the stage begins with."""
    num_examples: int
    """Rows of the whole data set."""
    provenance: dict[str, Any]
    board: ActorHandle[Any]

    @property
    def block_size(self) -> int | None:
        """B, or None for plain AR training."""
        return self.stage.block_size if isinstance(self.stage, MarsStage) else None

    @property
    def ar_weight(self) -> float:
        """Weight of the clean stream's loss; it is the whole loss in plain AR training."""
        return self.stage.ar_weight if isinstance(self.stage, MarsStage) else 1.0

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps an epoch; an incomplete last batch is left out."""
        return self.num_examples // self.stage.batch_size

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the stage."""
        steps = self.steps_per_epoch * self.stage.epochs
        return min(steps, self.stage.max_steps or steps)


def run_worker(config: dict[str, StageJob]) -> None:
    """Entry point that Ray Train calls on every worker."""
    job = config["job"]
    _set_threads(job)
    set_seed(job.recipe.seed)
    accelerator = Accelerator(
        cpu=not job.recipe.scaling.use_gpu, mixed_precision=job.recipe.precision
    )
    trainer = _StageTrainer(job, accelerator)
    trainer.run()
    trainer.report_checkpoint()


def _set_threads(job: StageJob) -> None:
    """Ray allows a worker one thread; CPU training wants its share of the cores."""
    scaling = job.recipe.scaling
    share = max(1, (os.cpu_count() or 1) // scaling.num_workers)
    torch.set_num_threads(scaling.threads_per_worker or share)


class _StageTrainer:
    """Model, optimizer and loop of one stage on one worker."""

    def __init__(self, job: StageJob, accelerator: Accelerator) -> None:
        self.job = job
        self.accelerator = accelerator
        self.tokenizer = AutoTokenizer.from_pretrained(job.start)
        model = load_model(job.start).train()
        self.metadata: MarsMetadata | None = None
        if job.block_size is not None:
            mask_id, grown = add_mask_token(model, self.tokenizer)
            provenance = {**job.provenance, "embedding_grown": grown}
            self.metadata = MarsMetadata(
                block_size=job.block_size, mask_token_id=mask_id, provenance=provenance
            )
        objective = Objective(model, masked=self.metadata is not None)
        optimizer = torch.optim.AdamW(
            objective.parameters(), lr=job.stage.learning_rate, weight_decay=job.stage.weight_decay
        )
        self.schedule = get_cosine_schedule_with_warmup(
            optimizer, math.ceil(job.stage.warmup_ratio * job.total_steps), job.total_steps
        )
        self.objective, self.optimizer = accelerator.prepare(objective, optimizer)
        self._last_post = 0.0

    def run(self) -> None:
        """All optimizer steps of the stage."""
        tokens, started = 0, time.monotonic()
        for step, batches in enumerate(self._steps(), start=1):
            loss = self._optimize(batches)
            tokens += sum(batch.num_tokens for batch in batches)
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"stage {self.job.stage.name}: the loss is {loss} at step {step}; "
                    "lower learning_rate"
                )
            self._post(step, loss, tokens / (time.monotonic() - started))

    def report_checkpoint(self) -> None:
        """Hand the trained model to Ray Train; rank 0 alone writes it."""
        model = self.accelerator.unwrap_model(self.objective).model
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if self.accelerator.is_main_process:
                save_checkpoint(Path(directory), model, self.tokenizer, self.metadata)
                checkpoint = ray.train.Checkpoint.from_directory(directory)
            ray.train.report({"steps": self.job.total_steps}, checkpoint=checkpoint)

    def _steps(self) -> Iterator[list[Batch]]:
        """This worker's micro-batches of each optimizer step."""
        shard = ray.train.get_dataset_shard("train")
        share = self.job.stage.batch_size // self.accelerator.num_processes
        done = 0
        for epoch in range(self.job.stage.epochs):
            seed = self.job.recipe.seed + epoch
            generator = np.random.default_rng([seed, self.accelerator.process_index])
            rows = shard.iter_batches(
                batch_size=share,
                drop_last=True,
                local_shuffle_buffer_size=max(_SHUFFLE_ROWS, share),
                local_shuffle_seed=seed,
            )
            for _, batch in zip(range(self.job.steps_per_epoch), rows, strict=False):
                if done == self.job.total_steps:
                    return
                yield self._micro_batches(batch, generator)
                done += 1

    def _micro_batches(
        self, rows: dict[str, NDArray[Any]], generator: np.random.Generator
    ) -> list[Batch]:
        stage, block_size = self.job.stage, self.job.block_size
        mask_id = self.metadata.mask_token_id if self.metadata else 0
        layouts = [
            lay_out(
                np.asarray(ids, dtype=np.int64),
                np.asarray(supervised, dtype=bool),
                block_size,
                mask_id,
                block_offset=int(generator.integers(block_size or 1)),
            )
            for ids, supervised in zip(rows["input_ids"], rows["supervised"], strict=True)
        ]
        size = stage.micro_batch_size
        return [
            collate(pack(layouts[i : i + size], stage.row_slots), self.tokenizer.pad_token_id or 0)
            for i in range(0, len(layouts), size)
        ]

    def _optimize(self, batches: list[Batch]) -> float:
        """One optimizer step; returns the loss per supervised label over all workers, in nats.

        Gradients are weighted by labels, so that they do not depend on how a step's
        conversations are split into micro-batches and workers. Data parallelism averages
        gradients over workers, hence the factor ``num_processes``.
        """
        labels = self._sum_over_workers(sum(len(batch.labels) for batch in batches))
        scale = self.accelerator.num_processes / labels
        total = torch.zeros((), device=self.accelerator.device)
        for index, batch in enumerate(batches):
            with self._gradient_exchange(last=index + 1 == len(batches)):
                with self.accelerator.autocast():
                    sums: LossSums = self.objective(batch.to(self.accelerator.device))
                loss = (sums.noisy + self.job.ar_weight * sums.clean) * scale
                self.accelerator.backward(loss)
            total += loss.detach()
        self.accelerator.clip_grad_norm_(self.objective.parameters(), self.job.stage.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        mean: float = self._sum_over_workers(float(total)) / self.accelerator.num_processes
        return mean

    def _gradient_exchange(self, *, last: bool) -> AbstractContextManager[None]:
        """Workers exchange gradients in the last micro-batch of a step only."""
        return nullcontext() if last else self.accelerator.no_sync(self.objective)

    def _sum_over_workers(self, value: float) -> float:
        local = torch.tensor(float(value), device=self.accelerator.device, dtype=torch.float32)
        reduced = self.accelerator.reduce(local, reduction="sum")
        assert isinstance(reduced, torch.Tensor)
        return reduced.item()

    def _post(self, step: int, loss: float, rate: float) -> None:
        now = time.monotonic()
        done = step == self.job.total_steps
        if not self.accelerator.is_main_process or (
            now - self._last_post < _POST_INTERVAL_S and not done
        ):
            return
        self._last_post = now
        total_rate = rate * self.accelerator.num_processes
        name = self.job.stage.name
        self.job.board.post.remote(Progress(name, step, self.job.total_steps, loss, total_rate))
