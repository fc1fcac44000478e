"""One stage on one worker: model, optimizer, steps, checkpoints. Knows no Ray.

Everything that a step depends on is a pure function of the recipe and the step's number: which
conversations it gets, where their blocks begin, the learning rate, and the random numbers that
dropout draws. So a run resumed from a checkpoint repeats, bit for bit where the kernels do, what
an uninterrupted one does, and the number of workers may change on the way.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from accelerate.utils import set_seed
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, get_cosine_schedule_with_warmup

from mars_platform.checkpoint import (
    Checkpoint,
    MarsMetadata,
    add_mask_token,
    load_model,
    read_checkpoint,
    save_checkpoint,
)
from mars_platform.errors import UserError
from mars_train.attention import FLEX_MULTIPLE, Attention
from mars_train.held_out import HeldOutSet, score_held_out, warnings_of
from mars_train.history import HISTORY_FILE, HeldOutScore, History, StepRecord, read_history
from mars_train.layout import Batch, Layout, collate, lay_out, pack
from mars_train.objective import LossSums, Objective
from mars_train.parallel import Workers, whole_parameters
from mars_train.progress import Progress
from mars_train.recipe import MarsStage, Recipe, Stage
from mars_train.shards import load_shards, save_shards
from mars_train.storage import Damaged, SaveFailed, Storage
from mars_train.tokens import BatchOrder, TokenStore, block_offsets, share

MODEL = "model"
"""Name of a stage's trained model in its storage."""
_STATE_FILE = "state.json"
_STEP_DIGITS = 8


@dataclass(frozen=True)
class StageJob:
    """What every worker of a stage is handed."""

    recipe: Recipe
    stage: Stage
    storage: str
    """Where the stage's checkpoints go: a directory or an fsspec URL."""
    start: str
    """Checkpoint directory that the stage begins with; a path or, at first, a shared URL."""
    data: str
    """Directory of the token store, likewise."""
    held_out: HeldOutSet | None
    provenance: dict[str, Any]

    @property
    def block_size(self) -> int | None:
        """B, or None for plain AR training."""
        return self.stage.block_size if isinstance(self.stage, MarsStage) else None

    @property
    def ar_weight(self) -> float:
        """Weight of the clean stream's loss; it is the whole loss in plain AR training."""
        return self.stage.ar_weight if isinstance(self.stage, MarsStage) else 1.0


def num_steps(stage: Stage, num_examples: int) -> int:
    """Optimizer steps of a stage; an epoch's incomplete last batch is left out."""
    steps = num_examples // stage.batch_size * stage.epochs
    return min(steps, stage.max_steps or steps)


@dataclass(frozen=True)
class Notice:
    """What the outside asks of the run, between two steps."""

    save: bool = False
    """Save a checkpoint now: a node is about to be taken away."""
    stop: bool = False
    """Save a checkpoint and end."""


class Reporter(Protocol):
    """How a worker speaks to the outside; the first three do something on one worker only."""

    def progress(self, progress: Progress) -> None:
        """Show where the stage stands."""

    def say(self, text: str, *, warning: bool = False) -> None:
        """Tell the user something."""

    def notice_due(self) -> bool:
        """Whether this worker wants all of them to look for a notice after this step."""

    def notice(self) -> Notice:
        """Look for a notice; all workers call it together and get the same."""

    def report(self, metrics: dict[str, Any]) -> None:
        """Report metrics; all workers call it together."""


class StageTrainer:
    """Model, optimizer and loop of one stage on one worker.

    Raises:
        UserError: the start model is unusable, or too many steps were not finite.
    """

    def __init__(self, job: StageJob, workers: Workers, reporter: Reporter) -> None:
        self.job, self.workers, self.reporter = job, workers, reporter
        recipe, stage = job.recipe, job.stage
        set_seed(recipe.seed)
        self.storage = Storage(job.storage)
        self.data = TokenStore(Path(job.data))
        self.order = BatchOrder(len(self.data), stage.batch_size, recipe.seed)
        self.total_steps = num_steps(stage, len(self.data))
        self.model, self.checkpoint = self._load_start()
        self.attention = _attention(recipe, workers)
        objective = Objective(
            self.model,
            masked=job.block_size is not None,
            attention=self.attention,
            compile=recipe.compile,
        )
        self.objective = workers.wrap(objective, self.model._no_split_modules or [])
        self.optimizer = torch.optim.AdamW(
            self.objective.parameters(), lr=stage.learning_rate, weight_decay=stage.weight_decay
        )
        for parameter in self.objective.parameters():
            # as AdamW itself would before the first step that is not skipped
            self.optimizer.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        num_warmup = math.ceil(stage.warmup_ratio * self.total_steps)
        self.schedule = get_cosine_schedule_with_warmup(
            self.optimizer, num_warmup, self.total_steps
        )
        self.history = History()
        self._num_tokens, self._started_s = 0, time.monotonic()

    @property
    def step(self) -> int:
        """Optimizer steps done, skipped ones included."""
        return len(self.history.steps)

    def run(self) -> bool:
        """Train to the end and store the model; False if a notice stopped the run before."""
        self._resume()
        self._settle_buckets()
        self._score_if_due()
        self._started_s = time.monotonic()
        for batches in self._batches():
            record = self._optimize(batches)
            self.history.steps.append(record)
            self._refuse_divergence()
            self._post(record)
            self._score_if_due()
            notice = self._notice()
            last = self.step == self.total_steps
            if notice.save or notice.stop or self.step % self._every == 0 or last:
                self._save(must_succeed=notice.stop or last)
            if notice.stop and not last:
                return False
        self._store_model()
        return True

    @property
    def _every(self) -> int:
        return self.job.recipe.checkpoints.every_steps

    def _load_start(self) -> tuple[PreTrainedModel, Checkpoint]:
        """The start model, with a mask token if the stage needs one, and its description."""
        job = self.job
        checkpoint = read_checkpoint(job.start)
        model = load_model(Path(job.start)).train()
        if job.block_size is not None:
            mask_id, grown = add_mask_token(model, checkpoint.tokenizer)
            metadata = MarsMetadata(
                block_size=job.block_size,
                mask_token_id=mask_id,
                provenance={**job.provenance, "embedding_grown": grown},
            )
            checkpoint = checkpoint.with_metadata(metadata)
        if job.recipe.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model, checkpoint

    # --- steps ------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[list[Batch]]:
        """This worker's micro-batches of each remaining step, made one step ahead."""
        with ThreadPoolExecutor(1, thread_name_prefix="layout") as executor:
            coming: Future[list[Batch]] | None = None
            for step in range(self.step, self.total_steps):
                batches = coming.result() if coming else self._micro_batches(step)
                if step + 1 < self.total_steps:
                    coming = executor.submit(self._micro_batches, step + 1)
                yield batches

    def _micro_batches(self, step: int) -> list[Batch]:
        """The same number on every worker; one that has no conversation left gets a filler."""
        stage, num_workers = self.job.stage, self.workers.num_workers
        rows = share(self.order.rows(step), self.workers.rank, num_workers)
        epoch = self.order.epoch(step)
        largest_share = -(-stage.batch_size // num_workers)
        count = -(-largest_share // stage.micro_batch_size)
        return [self._batch(part, epoch) for part in np.array_split(rows, count)]

    def _batch(self, rows: NDArray[np.int64], epoch: int) -> Batch:
        block_size, seed = self.job.block_size, self.job.recipe.seed
        offsets = block_offsets(rows, seed, epoch, block_size or 1)
        layouts = [
            lay_out(*self.data[int(row)], block_size, self._mask_id, block_offset=int(offset))
            for row, offset in zip(rows, offsets, strict=True)
        ]
        return self._collate(layouts or [self._filler()])

    def _filler(self) -> Layout:
        """A conversation without labels."""
        input_ids, supervised = self.data[0]
        return lay_out(input_ids[:2], supervised[:2] & False, self.job.block_size, self._mask_id)

    def _collate(self, layouts: list[Layout]) -> Batch:
        multiple_of = FLEX_MULTIPLE if self.attention == "flex" else 1
        rows = pack(layouts, self.job.stage.row_slots)
        padding_id = self.checkpoint.tokenizer.pad_token_id or 0
        return collate(rows, padding_id, multiple_of=multiple_of)

    @property
    def _mask_id(self) -> int:
        return self.checkpoint.metadata.mask_token_id if self.checkpoint.metadata else 0

    def _optimize(self, batches: list[Batch]) -> StepRecord:
        """One optimizer step.

        Gradients are weighted by labels over all workers and micro-batches, so that they do not
        depend on how a step's conversations are split. Data parallelism averages gradients over
        workers, hence the factor ``num_workers``.
        """
        torch.manual_seed(self._dropout_seed())
        num_labels, num_tokens = self.workers.sum(
            sum(len(batch.labels) for batch in batches), sum(b.num_tokens for b in batches)
        )
        scale = self.workers.num_workers / num_labels
        clean = noisy = torch.zeros((), device=self.workers.device)
        for index, batch in enumerate(batches):
            last = index + 1 == len(batches)
            sums = self._backward(batch, scale, last=last)
            clean, noisy = clean + sums.clean.detach(), noisy + sums.noisy.detach()
        norm = self.workers.clip_gradients(self.objective, self.job.stage.max_grad_norm)
        return self._apply(clean, noisy, norm, num_labels, int(num_tokens))

    def _backward(self, batch: Batch, scale: float, *, last: bool) -> LossSums:
        with self.workers.gradient_exchange(self.objective, last=last):
            with self.workers.autocast():
                sums: LossSums = self.objective(batch.to(self.workers.device))
            loss = (sums.noisy + self.job.ar_weight * sums.clean) * scale
            torch.autograd.backward(loss)
        return sums

    def _apply(
        self, clean: Tensor, noisy: Tensor, norm: float, num_labels: float, num_tokens: int
    ) -> StepRecord:
        """Change the weights, unless loss or gradient is not finite on any worker."""
        clean_sum, noisy_sum = self.workers.sum(clean.item(), noisy.item())
        clean_loss, noisy_loss = clean_sum / num_labels, noisy_sum / num_labels
        record = StepRecord(
            loss=noisy_loss + self.job.ar_weight * clean_loss,
            clean_loss=clean_loss,
            noisy_loss=noisy_loss,
            learning_rate=self.schedule.get_last_lr()[0],
            gradient_norm=norm,
            num_tokens=num_tokens,
            skipped=not (math.isfinite(clean_sum + noisy_sum) and math.isfinite(norm)),
        )
        if not record.skipped:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return record

    def _dropout_seed(self) -> int:
        sequence = [self.job.recipe.seed, self.step, self.workers.rank]
        return int(np.random.SeedSequence(sequence).generate_state(1)[0])

    def _settle_buckets(self) -> None:
        """Run one backward pass that changes nothing.

        Data parallelism regroups gradients after its first one, and with them the order in which
        they are summed over more than two workers. A resumed run must not differ in that.
        """
        self._backward(self._collate([self._filler()]), 0.0, last=True)
        self.optimizer.zero_grad()

    def _refuse_divergence(self) -> None:
        limit, skipped = self.job.recipe.max_nonfinite_steps, self.history.num_skipped
        if not self.history.steps[-1].skipped:
            return
        self.reporter.say(
            f"step {self.step}: loss or gradient is not finite; the step is skipped", warning=True
        )
        if skipped > limit:
            raise UserError(
                f"stage {self.job.stage.name}: loss or gradient was not finite in {skipped} steps, "
                f"the last of them step {self.step}, and max_nonfinite_steps allows {limit}; lower "
                "learning_rate, or look for broken data"
            )

    def _post(self, record: StepRecord) -> None:
        self._num_tokens += record.num_tokens
        self.reporter.progress(
            Progress(
                stage=self.job.stage.name,
                step=self.step,
                total_steps=self.total_steps,
                loss=record.loss,
                tokens_per_s=self._num_tokens / (time.monotonic() - self._started_s),
            )
        )

    def _notice(self) -> Notice:
        due = self.workers.sum(float(self.reporter.notice_due()))[0] > 0
        return self.reporter.notice() if due else Notice()

    # --- held-out scores --------------------------------------------------------------------------

    def _score_if_due(self) -> None:
        settings, held_out = self.job.recipe.evaluation, self.job.held_out
        if settings is None or held_out is None:
            return
        due = self.step % settings.every_steps == 0 or self.step == self.total_steps
        if not due or any(score.step == self.step for score in self.history.scores):
            return
        model = self._whole_model(keep=True)
        assert model is not None
        score = score_held_out(held_out, settings, self.checkpoint, model, self.workers, self.step)
        for text in warnings_of(score, (self.history.scores or [score])[0], settings):
            self.reporter.say(f"stage {self.job.stage.name}, {text}", warning=True)
        self.history.scores.append(score)
        self.reporter.say(_describe(self.job.stage.name, score))
        self.reporter.report({"step": self.step, **score.metrics()})

    def _whole_model(self, *, keep: bool) -> PreTrainedModel | None:
        """A copy of the model as it is now, for decoding or export; None where not to be kept."""
        weights = whole_parameters(self.model)
        if not keep:
            return None
        config = type(self.model.config).from_dict(self.model.config.to_dict())
        copy = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        copy.load_state_dict(weights, strict=False)  # tied weights are named once
        copy.generation_config = self.model.generation_config
        assert isinstance(copy, PreTrainedModel)
        return copy.to(self.workers.device).eval()

    # --- checkpoints ------------------------------------------------------------------------------

    def _state_tensors(self) -> dict[str, Tensor]:
        """Weights and the optimizer's moments, by name."""
        tensors = {}
        for name, parameter in self.model.named_parameters():
            tensors[f"model.{name}"] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer.{key}.{name}"] = value
        return tensors

    def _save(self, *, must_succeed: bool) -> None:
        """Store a checkpoint; if that fails, the one before stays, and the run goes on."""
        name = f"step-{self.step:0{_STEP_DIGITS}d}"
        if name in self.workers.gather(self.storage.names())[0]:
            return
        tensors = self._state_tensors()

        def write(directory: Path) -> None:
            save_shards(directory, tensors, self.workers.rank, self.workers.num_workers)
            if self.workers.rank == 0:
                self._write_state(directory)

        try:
            self.storage.save(name, write, self.workers)
        except SaveFailed as error:
            if must_succeed:
                raise UserError(f"checkpoints.storage: {error}; make room and run again") from error
            self.reporter.say(f"checkpoint skipped: {error}", warning=True)
            return
        if self.workers.rank == 0:
            for old in _step_names(self.storage)[: -self.job.recipe.checkpoints.keep]:
                self.storage.remove(old)
        record = asdict(self.history.steps[-1])
        self.reporter.report({"step": self.step, **record, "checkpoint": self.storage.path(name)})

    def _write_state(self, directory: Path) -> None:
        state = {
            "stage": self.job.stage.name,
            "step": self.step,
            "seed": self.job.recipe.seed,  # with the step it gives data position and random state
            "data_fingerprint": self.data.fingerprint,
            "schedule": self.schedule.state_dict(),
            "recipe": self.job.recipe.model_dump(mode="json"),
        }
        text = json.dumps(state, indent=1)
        (directory / _STATE_FILE).write_text(text + "\n", encoding="utf-8")
        self.history.write(directory / HISTORY_FILE)

    def _resume(self) -> None:
        """Continue from the newest intact checkpoint, if there is one."""
        name = self.workers.gather(self._newest_intact() if self.workers.rank == 0 else None)[0]
        if name is None:
            return
        directory = self.storage.fetch(name)
        state = json.loads((directory / _STATE_FILE).read_text(encoding="utf-8"))
        self._refuse_other_run(state, name)
        load_shards(directory, self._state_tensors())
        self.schedule.load_state_dict(state["schedule"])
        for group, rate in zip(
            self.optimizer.param_groups, self.schedule.get_last_lr(), strict=True
        ):
            group["lr"] = rate
        self.history = read_history(directory / HISTORY_FILE)
        self.reporter.say(f"stage {self.job.stage.name}: resumed from {self.storage.path(name)}")

    def _refuse_other_run(self, state: dict[str, Any], name: str) -> None:
        changed = self.job.recipe.differences(Recipe.model_validate(state["recipe"]))
        if state["data_fingerprint"] != self.data.fingerprint:
            changed.append("its data")
        if changed:
            raise UserError(
                f"checkpoints.storage: {self.storage.path(name)} is of another run, which differs "
                f"in {', '.join(changed)}; name another storage"
            )

    def _newest_intact(self) -> str | None:
        self.storage.remove_partial()
        for name in reversed(_step_names(self.storage)):
            try:
                self.storage.verify(name)
            except Damaged as error:
                path = self.storage.path(name)
                self.reporter.say(
                    f"checkpoint {path} is damaged and not used: {error}", warning=True
                )
                self.storage.set_aside(name)
            else:
                return name
        return None

    def _store_model(self) -> None:
        """Write the trained model as a Hugging Face checkpoint."""
        model = self._whole_model(keep=self.workers.rank == 0)
        checkpoint = self.checkpoint

        def write(directory: Path) -> None:
            if model is not None:
                save_checkpoint(directory, model, checkpoint.tokenizer, checkpoint.metadata)
                self.history.write(directory / HISTORY_FILE)

        if MODEL not in self.workers.gather(self.storage.names())[0]:
            try:
                self.storage.save(MODEL, write, self.workers)
            except SaveFailed as error:
                raise UserError(f"checkpoints.storage: {error}; make room and run again") from error
        self.reporter.report({"step": self.step, "model": self.storage.path(MODEL)})


def _attention(recipe: Recipe, workers: Workers) -> Attention:
    on_cuda = workers.device.type == "cuda"
    if recipe.attention == "flex" and not on_cuda:
        raise UserError("attention: flex trains on CUDA only; use sdpa, or auto for either")
    if recipe.attention == "auto":
        return "flex" if on_cuda else "sdpa"
    return recipe.attention


def _step_names(storage: Storage) -> list[str]:
    return [name for name in storage.names() if name.startswith("step-")]


def _describe(stage: str, score: HeldOutScore) -> str:
    parts = [f"AR loss {score.loss_by_depth[0]:.4f}"]
    for item in score.thresholds:
        accuracy = "" if item.accuracy is None else f"{100 * item.accuracy:.1f}% correct, "
        parts.append(
            f"τ={item.threshold:g}: {accuracy}{item.tokens_per_forward:.2f} tokens/forward"
        )
    return f"stage {stage}, step {score.step}, held-out: " + "; ".join(parts)
