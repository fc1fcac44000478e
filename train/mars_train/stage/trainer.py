"""Trains one stage on one worker: model, optimizer, steps, checkpoints.

Everything that a step depends on is a pure function of the recipe and the step's number: its
conversations, their block borders, the learning rate, and the random numbers of dropout. So a
resumed run repeats an uninterrupted one, bit for bit if the kernels are deterministic, and the
number of workers may change in between. Imports no Ray.
"""

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from peft import LoraConfig
from torch import Tensor
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

from mars_platform.checkpoint.adapter.draft_head import attach_draft_head, draft_head_of
from mars_platform.checkpoint.adapter.files import identify_base, save_adapter
from mars_platform.checkpoint.adapter.layers import attach_adapter
from mars_platform.checkpoint.adapter.lora import LoraWeights, merge_lora
from mars_platform.checkpoint.adapter.settings import AdapterMetadata
from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.checkpoint.number_type import is_bfloat16_slow
from mars_platform.checkpoint.weights import (
    add_mask_token,
    load_model,
    loader_of,
    save_checkpoint,
    unread_weights,
)
from mars_platform.errors import UserError
from mars_platform.mixing.head import text_prefixes
from mars_platform.mixing.probe import Probe
from mars_train.data.token_store import TokenStore
from mars_train.method.adapted import AdapterObjective
from mars_train.method.attention import FLEX_MULTIPLE, Attention, choose_attention
from mars_train.method.batches import StageBatches, num_steps
from mars_train.method.layout import Batch
from mars_train.method.objective import LossSums, MaskLoss, Objective
from mars_train.recipe import MarsStage, TrainedStage
from mars_train.stage.adapter import add_adapter
from mars_train.stage.checkpoints import Checkpoints, TrainingState
from mars_train.stage.held_out import describe, score_held_out, warnings_of
from mars_train.stage.history import HISTORY_FILE, StepRecord, TrainingHistory
from mars_train.stage.job import HostConnection, Notice, StageJob
from mars_train.stage.lora import (
    add_lora,
    lora_weights,
    narrow_frozen,
    own_weights,
    quantization_of,
    round_merged,
    save_lora,
)
from mars_train.stage.parallel import Workers, whole_weights
from mars_train.stage.progress import Progress
from mars_train.storage.directories import SaveFailed, Storage

MODEL = "model"
"""Name of a stage's trained model in its storage."""


class StageTrainer:
    """Model, optimizer and loop of one stage on one worker.

    Raises:
        UserError: the start model is unusable, or too many steps were not finite.
    """

    objective_type = Objective

    def __init__(self, job: StageJob, workers: Workers, reporter: HostConnection) -> None:
        self.job, self.workers, self.reporter = job, workers, reporter
        recipe = job.recipe
        set_seed(recipe.seed)
        data = TokenStore(Path(job.data))
        self.total_steps = num_steps(job.stage, len(data))
        self.model, self.checkpoint = self._load_start()
        self.lora = self._add_lora()
        probe = self._probe()
        if self.lora is not None and job.recipe.precision == "bf16":
            narrow_frozen(self.model)
        attention = choose_attention(
            recipe.attention, self.model.config, probe.specs, workers.device
        )
        responses = None if job.responses is None else TokenStore(Path(job.responses))
        self.batches = self._make_batches(data, responses, attention)
        self.objective = workers.wrap(
            self._checked_objective(probe, attention), self.model._no_split_modules or []
        )
        self.state = self._initial_state()
        stores = [data] if responses is None else [data, responses]
        fingerprint = "+".join(store.fingerprint for store in stores)
        self.checkpoints = Checkpoints(job, fingerprint, workers, reporter)
        self._num_tokens, self._started_s = 0, time.monotonic()

    @property
    def step(self) -> int:
        """Optimizer steps done, skipped ones included."""
        return self.state.step

    @property
    def history(self) -> TrainingHistory:
        """Records and scores of the stage so far."""
        return self.state.history

    @property
    def _mask_token_id(self) -> int:
        return self.checkpoint.metadata.mask_token_id if self.checkpoint.metadata else 0

    @property
    def _is_first(self) -> bool:
        return bool(self.workers.rank == 0)

    def run(self) -> bool:
        """Train to the end and store the model; return False if a notice stopped the run."""
        warn_of_slow_bfloat16(self.workers, self.reporter)
        self._warn_of_unread_weights()
        self.checkpoints.load_newest(self.state)
        self._settle_buckets()
        self._score_if_due()
        self._started_s = time.monotonic()
        every = self.job.recipe.checkpoints.every_steps
        for batches in self.batches.from_step(self.step):
            self.history.steps.append(self._optimize(batches))
            self._refuse_divergence()
            self._post()
            self._score_if_due()
            notice = self._notice()
            last = self.step == self.total_steps
            if notice.save or notice.stop or self.step % every == 0 or last:
                self.checkpoints.save(self.state, must_succeed=notice.stop or last)
            if notice.stop and not last:
                return False
        self._store_model()
        return True

    def _load_start(self) -> tuple[PreTrainedModel, Checkpoint]:
        """Load the start model, and add a mask token if the stage needs one."""
        job = self.job
        checkpoint = read_checkpoint(job.start)
        quantization = quantization_of(job.stage.lora, job.recipe.precision)
        model = load_model(Path(job.start), quantization=quantization)
        trained = text_prefixes(model)
        for name, parameter in model.named_parameters():
            is_whole = parameter.is_floating_point()  # 4 bits are stored as integers
            parameter.requires_grad_(is_whole and name.startswith(trained))
        if job.adapter is not None and job.block_size is not None:
            checkpoint = add_adapter(
                model,
                checkpoint,
                job.adapter,
                block_size=job.block_size,
                base=job.base,
                draft_head=job.draft_head,
                provenance=job.provenance,
            )
        elif job.block_size is not None:
            mask_id, grown = add_mask_token(model, checkpoint.tokenizer)
            metadata = MarsMetadata(
                block_size=job.block_size,
                mask_token_id=mask_id,
                provenance={**job.provenance, "embedding_grown": grown},
                draft_head=job.draft_head,
            )
            checkpoint = checkpoint.with_metadata(metadata)
        elif checkpoint.metadata is not None:  # masks change by the model, and a head is lost
            plain = checkpoint.metadata.model_copy(update={"draft_head": None})
            checkpoint = checkpoint.with_metadata(plain)
        if job.draft_head is not None:
            if job.adapter is None and job.is_model_fixed:
                model.requires_grad_(False)
            attach_draft_head(model, job.draft_head)
        if job.recipe.gradient_checkpointing:
            _checkpoint_activations(model)
        return model, checkpoint

    def _add_lora(self) -> LoraConfig | None:
        settings = self.job.stage.lora
        if settings is None:
            return None
        mask_id = self._mask_token_id if self.checkpoint.metadata else None
        return add_lora(self.model, settings, mask_id)

    def _probe(self) -> Probe:
        """Look what the model's layers ask for, on the device where it will be trained."""
        self.model.to(self.workers.device)
        return Probe.of(self.model, avoided={self._mask_token_id})

    def _checked_objective(self, probe: Probe, attention: Attention) -> Objective:
        """Make the objective of a model that gives the logits of its own forward pass in a row."""
        mask_id = self._mask_token_id
        plain = self._make_objective(attention, is_compiled=False)
        logits = partial(plain.clean_logits, probe.tokens, self.job.block_size, mask_id)
        with self.workers.autocast():
            probe.check("in packed rows", logits)
        self.model.train()
        return self._make_objective(attention, is_compiled=self.job.recipe.compile)

    def _make_objective(self, attention: Attention, *, is_compiled: bool) -> Objective:
        if self.job.is_model_fixed:
            return AdapterObjective(
                self.model, mask_loss=_mask_loss(self.job.stage), attention=attention
            )
        return self.objective_type(
            self.model,
            masked=self.job.block_size is not None,
            mask_loss=_mask_loss(self.job.stage),
            attention=attention,
            compile=is_compiled,
        )

    def _make_batches(
        self, data: TokenStore, responses: TokenStore | None, attention: Attention
    ) -> StageBatches:
        return StageBatches(
            data=data,
            stage=self.job.stage,
            seed=self.job.recipe.seed,
            rank=self.workers.rank,
            num_workers=self.workers.num_workers,
            block_sizes=self.job.block_sizes,
            mask_token_id=self._mask_token_id,
            pad_token_id=self.checkpoint.tokenizer.pad_token_id or 0,
            multiple_of=FLEX_MULTIPLE if attention == "flex" else 1,
            responses=responses,
            clean_loss=not self.job.is_model_fixed,
        )

    def _initial_state(self) -> TrainingState:
        stage = self.job.stage
        trained = [item for item in self.objective.parameters() if item.requires_grad]
        optimizer = torch.optim.AdamW(
            self._by_learning_rate(trained), weight_decay=stage.weight_decay, fused=True
        )
        for parameter in trained:
            # AdamW itself would allocate these in its first step, after a checkpoint is loaded.
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        num_warmup = math.ceil(stage.warmup_ratio * self.total_steps)
        schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup, self.total_steps)
        return TrainingState(self.model, optimizer, schedule, TrainingHistory())

    def _by_learning_rate(self, trained: Sequence[Tensor]) -> list[dict[str, Any]]:
        """Return the optimizer's groups of parameters, the model's own or the adapter's first."""
        stage, head = self.job.stage, draft_head_of(self.model)
        of_head = list[Tensor]() if head is None else list(head.parameters())
        own = {id(parameter) for parameter in of_head}
        rest = [parameter for parameter in trained if id(parameter) not in own]
        groups = [{"params": rest, "lr": stage.learning_rate}]
        if isinstance(stage, MarsStage) and stage.draft_head is not None:
            groups.append({"params": of_head, "lr": stage.draft_head.learning_rate})
        return [group for group in groups if group["params"]]

    def _warn_of_unread_weights(self) -> None:
        """Say what the trained model will lack, from the first worker."""
        lora = self.job.stage.lora
        if not self._is_first or self.job.adapter is not None or (lora and not lora.merge):
            return
        if names := unread_weights(self.checkpoint.path, self.model):
            self.reporter.say(
                f"model: transformers does not load {len(names)} weights of {self.job.base}, such "
                f"as {names[0]}; the trained model is stored without them, so that no server can "
                "draft by them (MTP)",
                warning=True,
            )

    # --- steps ------------------------------------------------------------------------------------

    def _optimize(self, batches: list[Batch]) -> StepRecord:
        """Run one optimizer step.

        Each stream's loss is divided by its labels of all workers and micro-batches, so gradients
        do not depend on how a step's conversations are split. Data parallelism averages gradients
        over workers, hence the factor ``num_workers``.
        """
        dropout_seeds = np.random.SeedSequence([self.job.recipe.seed, self.step, self.workers.rank])
        torch.manual_seed(int(dropout_seeds.generate_state(1)[0]))
        num_clean, num_noisy, num_tokens = self.workers.sum(
            sum(batch.num_clean for batch in batches),
            sum(batch.num_noisy for batch in batches),
            sum(batch.num_tokens for batch in batches),
        )
        counts = max(num_clean, 1.0), max(num_noisy, 1.0)
        scales = [self.workers.num_workers / count for count in counts]
        clean = noisy = torch.zeros((), device=self.workers.device)
        for index, batch in enumerate(batches):
            last = index + 1 == len(batches)
            sums = self._backward(batch, *scales, last=last)
            clean, noisy = clean + sums.clean.detach(), noisy + sums.noisy.detach()
        norm = self.workers.clip_gradients(self.objective, self.job.stage.max_grad_norm)
        clean_sum, noisy_sum = self.workers.sum(clean.item(), noisy.item())
        return self._apply(clean_sum / counts[0], noisy_sum / counts[1], norm, int(num_tokens))

    def _backward(
        self, batch: Batch, clean_scale: float, noisy_scale: float, *, last: bool
    ) -> LossSums:
        plain_share = plain_share_of(self.job.stage, self.step / self.total_steps)
        with self.workers.gradient_exchange(self.objective, last=last):
            with self.workers.autocast():
                batch = batch.to(self.workers.device)
                sums: LossSums = self.objective(batch, plain_share=plain_share)
            loss = sums.noisy * noisy_scale + self.job.ar_weight * sums.clean * clean_scale
            torch.autograd.backward(loss)
        return sums

    def _apply(
        self, clean_loss: float, noisy_loss: float, norm: float, num_tokens: int
    ) -> StepRecord:
        """Update the weights, unless loss or gradient is not finite on any worker."""
        record = StepRecord(
            loss=noisy_loss + self.job.ar_weight * clean_loss,
            clean_loss=clean_loss,
            noisy_loss=noisy_loss,
            learning_rate=float(self.state.schedule.get_last_lr()[0]),
            gradient_norm=norm,
            num_tokens=num_tokens,
            skipped=not (math.isfinite(clean_loss + noisy_loss) and math.isfinite(norm)),
        )
        if not record.skipped:
            self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        self.state.schedule.step()
        return record

    def _settle_buckets(self) -> None:
        """Run one backward pass that changes nothing.

        After its first backward pass DDP regroups gradients into buckets, which changes the order
        of summation over more than two workers. A resumed run must sum in the same order.
        """
        self._backward(self.batches.filler(), 0.0, 0.0, last=True)
        self.state.optimizer.zero_grad()

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

    def _post(self) -> None:
        record = self.history.steps[-1]
        self._num_tokens += record.num_tokens
        self.reporter.progress(
            Progress(
                stage=self.job.stage.name,
                step=self.step,
                total_steps=self.total_steps,
                loss=record.loss,
                tokens_per_s=self._num_tokens / (time.monotonic() - self._started_s),
                learning_rate=record.learning_rate,
                gradient_norm=record.gradient_norm,
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
        if not self.history.scores:  # the first takes minutes of a large model, before any step
            self.reporter.say(f"stage {self.job.stage.name}: scoring the held-out data")
        model = self._whole_model(keep=True)
        assert model is not None
        score = score_held_out(held_out, settings, self.checkpoint, model, self.workers, self.step)
        for text in warnings_of(score, (self.history.scores or [score])[0], settings):
            self.reporter.say(f"stage {self.job.stage.name}, {text}", warning=True)
        self.history.scores.append(score)
        self.reporter.say(f"stage {self.job.stage.name}, {describe(score)}")
        self.reporter.report({"step": self.step, **score.metrics()})

    def _whole_model(self, *, keep: bool) -> PreTrainedModel | None:
        """Copy the model with its current weights, for decoding or export; None unless ``keep``.

        A LoRA adapter is merged into the copy's weights.
        """
        weights, lora = whole_weights(self.model, keep=keep), self.job.stage.lora
        if not keep:
            return None
        if lora is not None and lora.quantization:
            copy = self._unquantized_start()
        else:
            copy = self._copy(weights if lora is None else own_weights(weights))
        if lora is not None:
            merge_lora(copy, lora_weights(weights, lora), self._mask_token_id)
        return copy.to(self.workers.device).eval()

    def _copy(self, weights: dict[str, Tensor]) -> PreTrainedModel:
        config = type(self.model.config).from_dict(self.model.config.to_dict())
        copy = loader_of(config).from_config(config, trust_remote_code=False)
        if adapter := self.checkpoint.adapter:
            attach_adapter(copy, adapter.settings, adapter.metadata.mask_token_id)
        if self.job.draft_head is not None:
            attach_draft_head(copy, self.job.draft_head)
        copy.load_state_dict(weights, strict=False)  # tied weights have one name only
        copy.generation_config = self.model.generation_config
        # transformers' own: names of tensors in files, which are to be written as they were read
        copy._weight_conversions = getattr(self.model, "_weight_conversions", None)
        assert isinstance(copy, PreTrainedModel)
        return copy

    def _unquantized_start(self) -> PreTrainedModel:
        """Load the start model as it is stored, with the mask token of the stage, if it has any."""
        model = load_model(Path(self.job.start))
        if self.checkpoint.metadata is not None:
            add_mask_token(model, read_checkpoint(self.job.start).tokenizer)
        return model

    def _store_model(self) -> None:
        """Store the trained model as a Hugging Face checkpoint, or its adapter alone."""
        lora, storage, is_first = self.job.stage.lora, Storage(self.job.storage), self._is_first
        model = weights = None
        if lora is None or lora.merge:
            model = self._whole_model(keep=is_first)
        else:
            weights = lora_weights(whole_weights(self.model, keep=is_first), lora)

        def write(directory: Path) -> None:
            if not is_first:
                return
            if model is not None:
                self._write_model(directory, model)
            elif weights is not None:
                self._write_lora(directory, weights)
            self.history.write(directory / HISTORY_FILE)

        if MODEL not in self.workers.gather(storage.names())[0]:
            try:
                storage.save(MODEL, write, self.workers)
            except SaveFailed as error:
                raise UserError(f"checkpoints.storage: {error}; make room and run again") from error
        self.reporter.report({"step": self.step, "model": storage.path(MODEL)})

    def _write_model(self, directory: Path, model: PreTrainedModel) -> None:
        checkpoint = self.checkpoint
        if checkpoint.adapter is not None:
            metadata = checkpoint.adapter.metadata
            save_adapter(directory, model, checkpoint.tokenizer, metadata)
            return
        if self.lora is not None:
            round_merged(model, self.model, checkpoint.config.dtype or torch.float32)
        save_checkpoint(
            *(directory, model, checkpoint.tokenizer, checkpoint.metadata), start=checkpoint.path
        )

    def _write_lora(self, directory: Path, weights: LoraWeights) -> None:
        checkpoint = self.checkpoint
        assert self.lora is not None
        metadata = None
        if checkpoint.metadata is not None:
            base = identify_base(checkpoint.path, checkpoint.tokenizer, self.job.base)
            known = checkpoint.metadata.model_dump()
            metadata = AdapterMetadata(**known, base=base, scope="all")
        self.lora.base_model_name_or_path = self.job.base
        save_lora(directory, self.model, weights, self.lora, metadata)
        checkpoint.tokenizer.save_pretrained(directory)


def _mask_loss(stage: TrainedStage) -> MaskLoss | None:
    """Return the terms of the loss behind masks; None for those of the paper."""
    if not isinstance(stage, MarsStage) or stage.distillation is None:
        return None
    return MaskLoss(stage.distillation.weight, stage.distillation.target)


def plain_share_of(stage: TrainedStage, progress: float) -> float:
    """Return the share of a step's loss that masks have without their draft head.

    It falls from 1 to 0 over the first half of the stage, so that masks learn by themselves what
    they can. ``progress``, in [0, 1), is the share of steps that are done.
    """
    if not isinstance(stage, MarsStage) or stage.draft_head is None or stage.train == "head":
        return 0.0
    return max(0.0, 1.0 - 2.0 * progress)


def _checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass; transformers 5.2x renamed the method."""
    switch = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    switch({"use_reentrant": False})


def warn_of_slow_bfloat16(workers: Workers, reporter: HostConnection) -> None:
    """Warn, from the first worker, of a run in mixed precision that bfloat16 makes slower."""
    if workers.rank != 0 or workers.precision != "bf16" or workers.device.type != "cpu":
        return
    if is_bfloat16_slow():
        reporter.say(
            "precision: this processor has no instructions for bf16, so that products take many "
            'times as long as in float32; set precision: "no"',
            warning=True,
        )
