"""A training run as one file: every setting that determines it. Knows no code that runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from mars_platform.cluster.settings import ClusterSettings
from mars_platform.config import Settings


class ScratchModel(Settings):
    """A model built from its configuration, with a tokenizer trained on the training data."""

    config: dict[str, Any]
    """Hugging Face model configuration; ``model_type`` is required."""
    vocabulary_size: int = Field(default=512, ge=264)
    """Entries of the byte-level BPE tokenizer at the most."""


class ModelSource(Settings):
    """What training starts from: exactly one of the two."""

    base: str | None = None
    """A model directory or a Hugging Face hub id."""
    scratch: ScratchModel | None = None
    """A new model."""

    @model_validator(mode="after")
    def _exactly_one(self) -> ModelSource:
        if (self.base is None) == (self.scratch is None):
            raise ValueError("give either base (a directory or hub id) or scratch (a new model)")
        return self


class DataSettings(Settings):
    """Training conversations and what the loss is taken on."""

    train: list[str] = Field(min_length=1)
    """Files (.jsonl, .jsonl.gz, .jsonl.zst, .parquet), directories or globs of them; a path, or a
    URL that fsspec knows (s3://bucket/chats/*.parquet)."""
    loss_on: Literal["last", "all"] = "last"
    """Whether the final assistant turn is supervised, or every one."""
    max_length: int = Field(default=512, ge=8)
    """Tokens of a conversation at the most; what goes beyond is cut off, and counted."""
    max_bad_rows: int = Field(default=0, ge=0)
    """Rows that may be skipped as unusable; more of them stop the run."""


class _StageSettings(Settings):
    """Settings that both stages share."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    """Name of the stage, and of its directory."""
    epochs: int = Field(default=5, ge=1)
    """Passes over the data."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps at the most, where the epochs have more."""
    batch_size: int = Field(default=384, ge=1)
    """Conversations an optimizer step, over all workers."""
    micro_batch_size: int = Field(default=48, ge=1)
    """Conversations a worker runs at once; the rest of its share is accumulated."""
    learning_rate: float = Field(default=5e-6, gt=0)
    """Peak of the cosine schedule."""
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    """Share of the steps in which the learning rate rises."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this norm."""
    row_slots: int = Field(default=1024, ge=16)
    """Slots of a packed row, clean and noisy tokens together."""


class ArStage(_StageSettings):
    """Plain autoregressive supervised fine-tuning."""

    objective: Literal["ar"]
    name: str = Field(default="ar", pattern=r"^[a-z0-9][a-z0-9-]*$")


class MarsStage(_StageSettings):
    """MARS: the noisy stream's loss beside the AR loss (arXiv 2604.07023, section 3.2)."""

    objective: Literal["mars"]
    name: str = Field(default="mars", pattern=r"^[a-z0-9][a-z0-9-]*$")
    block_size: int = Field(default=4, ge=1, le=64)
    """B, in tokens."""
    ar_weight: float = Field(default=1.0, ge=0)
    """Weight of the clean stream's AR loss."""


Stage = Annotated[ArStage | MarsStage, Field(discriminator="objective")]


def _number_or_range(value: Any) -> Any:
    numbers = value if isinstance(value, list | tuple) and len(value) == 2 else [value]
    if not all(type(number) is int and number >= 1 for number in numbers):
        raise ValueError("give a number from 1, or a range [least, most] of such numbers")
    return value


class Scaling(Settings):
    """Workers of the run."""

    num_workers: Annotated[int | tuple[int, int], BeforeValidator(_number_or_range)] = 1
    """Data-parallel workers; [least, most] lets the run shrink and grow with the cluster."""
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """ddp keeps the whole model on every worker; fsdp2 shards weights, gradients and optimizer."""
    use_gpu: bool = False
    """One GPU a worker; on the CPU otherwise."""
    cpus_per_worker: float = Field(default=1, gt=0)
    """CPUs that Ray reserves for a worker."""
    resources_per_worker: dict[str, float] = Field(default_factory=dict)
    """Further Ray resources of a worker, such as memory in bytes or custom ones."""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's placement of workers on nodes."""
    threads_per_worker: int | None = Field(default=None, ge=1)
    """Threads of a worker's CPU kernels; by default the machine's cores, shared evenly."""
    max_failures: int = Field(default=3, ge=-1)
    """Times that lost workers are replaced before the run gives up; -1 for always. Nodes taken
    away with notice do not count."""

    @property
    def least_workers(self) -> int:
        """Workers that the run needs."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def most_workers(self) -> int:
        """Workers that the run uses where the cluster has room."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def worker_resources(self) -> dict[str, float]:
        """Ray resources of one worker."""
        gpus = {"GPU": 1.0} if self.use_gpu else {}
        return {"CPU": self.cpus_per_worker, **gpus, **self.resources_per_worker}

    @model_validator(mode="after")
    def _some_workers(self) -> Scaling:
        if self.least_workers > self.most_workers:
            raise ValueError("num_workers: give the range as [least, most]")
        return self


class CheckpointSettings(Settings):
    """Checkpoints to resume from."""

    every_steps: int = Field(default=100, ge=1)
    """Optimizer steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints of a stage that are kept."""
    storage: str | None = None
    """Directory or fsspec URL (s3://...) that every node reaches; output/checkpoints by default.
    With a URL, data and start weights are passed to the workers through it, too."""


class EvaluationSettings(Settings):
    """Scoring of a held-out set during training."""

    data: list[str] = Field(min_length=1)
    """JSONL or Parquet files of conversations; a row's ``answer`` makes it checkable."""
    every_steps: int = Field(default=100, ge=1)
    """Optimizer steps between scorings; the start and the end of a stage are scored as well."""
    max_items: int = Field(default=200, ge=1)
    """Conversations at the most, from the beginning of the files."""
    max_tokens: int = Field(default=256, ge=1)
    """Output tokens a conversation at the most."""
    thresholds: tuple[Annotated[float, Field(gt=0, le=1)], ...] = (1.0, 0.95, 0.7)
    """Confidence thresholds to decode with; 1, plain AR decoding, is always among them."""
    max_accuracy_drop: float = Field(default=0.02, ge=0, le=1)
    """Share of checkable answers that one-token decoding may lose against the stage's start
    before a warning is given."""
    max_loss_rise: float = Field(default=0.05, ge=0)
    """Nats a token that the AR loss may rise over the stage's start before a warning is given."""


_MAY_CHANGE: dict[str, Any] = {
    "output": True,
    "cluster": True,
    "scaling": True,
    "checkpoints": True,
    "max_nonfinite_steps": True,
}
"""Settings that do not determine what is trained."""


class Recipe(Settings):
    """Everything that determines a run."""

    model: ModelSource
    data: DataSettings
    stages: list[Stage] = Field(min_length=1)
    output: Path
    """Directory that gets the model. An unfinished run of the same recipe in it is resumed."""
    evaluation: EvaluationSettings | None = None
    """Held-out scoring; none by default."""
    checkpoints: CheckpointSettings = CheckpointSettings()
    scaling: Scaling = Scaling()
    cluster: ClusterSettings = ClusterSettings()
    precision: Literal["no", "bf16"] = "bf16"
    """Mixed precision: bf16, or no for float32 throughout."""
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    """flex skips blocks that no token sees, sdpa takes a dense mask; auto is flex on a GPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """Compile the decoder with torch.compile."""
    max_nonfinite_steps: int = Field(default=10, ge=0)
    """Steps of a stage whose loss or gradient is not finite that are skipped; more are fatal."""
    seed: int = Field(default=0, ge=0)
    """Seed of initial weights, data order and block borders."""

    def differences(self, other: Recipe) -> list[str]:
        """Top-level settings in which another recipe would train something else."""
        ours, theirs = (item.model_dump(mode="json", exclude=_MAY_CHANGE) for item in (self, other))
        return [key for key in ours if ours[key] != theirs[key]]

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages: names must differ, got {names}")
        for index, stage in enumerate(self.stages):
            if stage.batch_size < self.scaling.most_workers:
                raise ValueError(
                    f"stages.{index}.batch_size: {stage.batch_size} conversations cannot be shared "
                    f"by scaling.num_workers = {self.scaling.most_workers}; make it larger"
                )
            if isinstance(stage, MarsStage) and stage.block_size > self.data.max_length:
                raise ValueError(
                    f"stages.{index}.block_size: {stage.block_size} exceeds data.max_length = "
                    f"{self.data.max_length}; make it smaller"
                )
        return self
