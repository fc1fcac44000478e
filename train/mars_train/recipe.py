"""A training run as one file: every setting that determines it. Knows no code that runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mars_platform.cluster import ClusterSettings
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

    train: list[Path] = Field(min_length=1)
    """JSONL or Parquet files, or directories of them."""
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


class Scaling(Settings):
    """Workers of the run."""

    num_workers: int = Field(default=1, ge=1)
    """Data-parallel workers."""
    use_gpu: bool = False
    """One GPU a worker; on the CPU otherwise."""
    cpus_per_worker: float = Field(default=1, gt=0)
    """CPUs that Ray reserves for a worker."""
    threads_per_worker: int | None = Field(default=None, ge=1)
    """Threads of a worker's CPU kernels; by default the machine's cores, shared evenly."""


class Recipe(Settings):
    """Everything that determines a run."""

    model: ModelSource
    data: DataSettings
    stages: list[Stage] = Field(min_length=1)
    output: Path
    """Directory that gets the model; must not exist, or be empty."""
    scaling: Scaling = Scaling()
    cluster: ClusterSettings = ClusterSettings()
    precision: Literal["no", "bf16"] = "bf16"
    """Mixed precision: bf16, or no for float32 throughout."""
    seed: int = Field(default=0, ge=0)
    """Seed of initial weights, data order and block borders."""

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages: names must differ, got {names}")
        for index, stage in enumerate(self.stages):
            if stage.batch_size % self.scaling.num_workers:
                raise ValueError(
                    f"stages.{index}.batch_size: {stage.batch_size} cannot be shared evenly by "
                    f"scaling.num_workers = {self.scaling.num_workers}; make it a multiple"
                )
            if isinstance(stage, MarsStage) and stage.block_size > self.data.max_length:
                raise ValueError(
                    f"stages.{index}.block_size: {stage.block_size} exceeds data.max_length = "
                    f"{self.data.max_length}; make it smaller"
                )
        return self
