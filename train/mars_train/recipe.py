"""The recipe of a training run: one file with every setting that determines it.

Imports no Ray or torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from mars_platform.checkpoint.adapter.settings import AdapterSettings, LoraSettings
from mars_platform.checkpoint.metadata import DraftHeadSettings
from mars_platform.cluster.settings import ClusterSettings
from mars_platform.config import Settings
from mars_platform.data.shapes import Column
from mars_platform.data.sources import is_remote
from mars_platform.errors import UserError

_OF_TOKENIZER = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"}
"""Keys of a new model's configuration that follow from the tokenizer trained for it."""
_OTHER_CONTENT = {"data", "ray", "start"}
"""Names beside those of the stages in a run's directories; ``start-NAME`` is another."""
_OF_ADAPTERS = {"ar_weight": 0.0, "distillation": {"weight": 1.0}, "learning_rate": 2e-4}
"""Defaults of a stage that leaves the model as it is, which teaches what is trained beside it."""
_MOST_TOKENS = 64
"""Largest block."""


class ScratchModel(Settings):
    """A new model built from its configuration, with a tokenizer trained on the training data."""

    config: dict[str, Any]
    """Hugging Face model configuration; ``model_type`` is required."""
    vocabulary_size: int = Field(default=512, ge=264)
    """Most entries of the byte-level BPE tokenizer."""

    @field_validator("config")
    @classmethod
    def _is_of_a_family(cls, config: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(config.get("model_type"), str):
            raise ValueError("model_type is required; name a family, such as qwen2")
        if taken := sorted(_OF_TOKENIZER & config.keys()):
            raise ValueError(f"{taken[0]} follows from the new tokenizer; leave it out")
        return config


class ModelSource(Settings):
    """The model that training starts from: exactly one of the two settings."""

    base: str | None = None
    """A model directory or a Hugging Face hub id."""
    scratch: ScratchModel | None = None
    """A new model, to train from scratch."""

    @model_validator(mode="after")
    def _exactly_one(self) -> ModelSource:
        if (self.base is None) == (self.scratch is None):
            raise ValueError("give either base (a directory or hub id) or scratch (a new model)")
        return self


class DataSettings(Settings):
    """Training conversations, and the turns that the loss is taken on."""

    train: list[str] = Field(min_length=1)
    """Files (.jsonl and .json, also with .gz or .zst, .parquet, .arrow), directories or globs, each
    as a path or an fsspec URL (s3://bucket/chats/*.parquet), and data sets of Hugging Face's hub
    (hub:owner/name@revision:config/split; all but the name may be left out, and the split is then
    train)."""
    columns: dict[Column, str] = Field(default_factory=dict)
    """Names of columns that have others in the data, here and in evaluation.data: {messages: chat}.
    """
    loss_on: Literal["last", "all"] = "last"
    """Supervised turns: the last assistant turn, or all of them. Where the chat template drops what
    earlier turns thought, each is learned in a row of its own, behind its own prompt."""
    max_length: int = Field(default=512, ge=8)
    """Most tokens of a conversation; longer ones are cut, counted and reported."""
    max_bad_rows: int = Field(default=0, ge=0)
    """Most unusable rows that are skipped; with more the run is refused."""

    def check_context(self, context: int) -> None:
        """Refuse conversations that are longer than a model's context of some tokens.

        Raises:
            UserError: ``max_length`` exceeds the context.
        """
        if self.max_length > context:
            raise UserError(
                f"data.max_length: {self.max_length} exceeds the {context} tokens that the model's "
                "context holds; lower it"
            )


class _NamedStage(Settings):
    """Settings of stages of every kind."""

    model_config = ConfigDict(allow_inf_nan=False)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    """Name of the stage, and of its directory."""

    @field_validator("name")
    @classmethod
    def _is_free(cls, name: str) -> str:
        if name in _OTHER_CONTENT or name.startswith("start-"):
            raise ValueError("a run keeps other content under this name; choose another")
        return name


class _TrainedStage(_NamedStage):
    """Settings of the stages that train the model."""

    epochs: int = Field(default=5, ge=1)
    """Passes over the data."""
    max_steps: int | None = Field(default=None, ge=1)
    """Most optimizer steps; null for all steps of the epochs."""
    batch_size: int = Field(default=384, ge=1)
    """Conversations per optimizer step, over all workers."""
    micro_batch_size: int = Field(default=48, ge=1)
    """Conversations that a worker processes at once; gradients are accumulated over its share."""
    learning_rate: float = Field(default=5e-6, gt=0)
    """Peak learning rate of the cosine schedule; with ``adapter`` or ``lora``, 2e-4 by default."""
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    """Share of the steps during which the learning rate rises."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this norm."""
    row_slots: int = Field(default=1024, ge=16)
    """Most slots of a packed row, clean and noisy tokens together."""
    lora: LoraSettings | None = None
    """Weights to train beside the model's own, which act at all positions (LoRA); null to train the
    model itself."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_lora(cls, content: Any) -> Any:
        if not isinstance(content, dict) or content.get("lora") is None:
            return content
        return {"learning_rate": _OF_ADAPTERS["learning_rate"], **content}


class ArStage(_TrainedStage):
    """Plain autoregressive supervised fine-tuning."""

    objective: Literal["ar"]
    """Kind of the stage."""
    name: str = Field(default="ar", pattern=r"^[a-z0-9][a-z0-9-]*$")
    """Name of the stage, and of its directory."""


def _size_or_sizes(value: Any) -> Any:
    sizes = list(value) if isinstance(value, list | tuple) else [value]
    if not sizes or not all(type(size) is int and 1 <= size <= _MOST_TOKENS for size in sizes):
        raise ValueError("give a number of tokens from 1 to 64, or a list of such numbers")
    if sizes != sorted(set(sizes)):
        raise ValueError(f"give each size once, ascending: {sorted(set(sizes))}")
    return value


class Distillation(Settings):
    """Learning what a mask predicts from the clean stream, whose logits are detached."""

    weight: float = Field(gt=0, le=1)
    """Share λ of this loss in the loss behind masks; 1 - λ is the labels' share."""
    target: Literal["soft", "argmax"] = "soft"
    """soft is the KL divergence from the clean stream's distribution at the same label, argmax
    the cross-entropy of its likeliest token."""


class DraftHeadTraining(DraftHeadSettings):
    """A draft head to train: weights by which a mask's draft depends on the token before it."""

    learning_rate: float = Field(default=5e-3, gt=0)
    """Peak learning rate of these weights, in the schedule of the stage's own."""


class MarsStage(_TrainedStage):
    """MARS: the noisy stream's loss beside the AR loss (arXiv 2604.07023, section 3.2)."""

    objective: Literal["mars"]
    """Kind of the stage."""
    name: str = Field(default="mars", pattern=r"^[a-z0-9][a-z0-9-]*$")
    """Name of the stage, and of its directory."""
    block_size: Annotated[int | tuple[int, ...], BeforeValidator(_size_or_sizes)] = 4
    """Block size B, in tokens, 1 to 64. Of a list such as [4, 8, 16] a size is drawn for each
    conversation and epoch, and the largest is the model's."""
    ar_weight: float = Field(default=1.0, ge=0)
    """Weight of the clean stream's AR loss; always 0 where the model itself is left as it is."""
    distillation: Distillation | None = None
    """Learning masks from the clean stream; null for labels alone. By default an adapter learns
    from the clean stream alone, with weight 1."""
    responses: str | None = None
    """Name of an earlier stage of objective generate, whose responses take the noisy loss; the AR
    loss stays on the training data. Null for the training data in both."""
    adapter: AdapterSettings | None = None
    """Weights to train beside the model's own, which act at masks only (a draft adapter); null to
    train the model itself."""

    draft_head: DraftHeadTraining | None = None
    """Weights by which a mask's draft depends on the token before it (a draft head), beside an
    adapter or the whole model; null for none."""
    train: Literal["all", "head"] = "all"
    """head trains the draft head alone, beside a model whose masks are trained already."""

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Block sizes that a conversation's is drawn from, ascending."""
        return (self.block_size,) if isinstance(self.block_size, int) else self.block_size

    @model_validator(mode="before")
    @classmethod
    def _defaults_beside_a_fixed_model(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        is_fixed = content.get("adapter") is not None or content.get("train") == "head"
        return {**_OF_ADAPTERS, **content} if is_fixed else content

    @model_validator(mode="after")
    def _adapter_leaves_the_ar_loss(self) -> MarsStage:
        if self.adapter is not None and self.lora is not None:
            raise ValueError(
                "lora: a stage trains a LoRA adapter or a draft adapter (adapter); leave one out, "
                "or train the draft adapter in a stage behind this one"
            )
        if self.adapter is not None and self.ar_weight:
            raise ValueError(
                "ar_weight: an adapter does not change the AR loss; leave the weight out"
            )
        return self

    @model_validator(mode="after")
    def _draft_head_has_its_masks(self) -> MarsStage:
        if self.draft_head is None:
            if self.train == "head":
                raise ValueError("train: there is no head to train; set draft_head")
            return self
        if self.lora is not None:
            raise ValueError("lora: is not trained with a draft head; leave one of them out")
        if self.train == "head" and (self.adapter is not None or self.ar_weight):
            key = "ar_weight" if self.adapter is None else "adapter"
            raise ValueError(f"{key}: a head alone is trained beside a fixed model; leave it out")
        return self


def _one_or_more_temperatures(value: Any) -> Any:
    given = list(value) if isinstance(value, list | tuple) else [value]
    are_numbers = all(type(each) in (int, float) and 0 <= each <= 2 for each in given)
    if not given or not are_numbers:
        raise ValueError("give a number from 0 to 2, or a list of such numbers")
    if given != sorted(set(given)):
        raise ValueError(f"give each temperature once, ascending: {sorted(set(given))}")
    return value


class GenerateStage(_NamedStage):
    """Responses of the model so far to the prompts of the training data; it trains nothing."""

    objective: Literal["generate"]
    """Kind of the stage."""
    name: str = Field(default="generate", pattern=r"^[a-z0-9][a-z0-9-]*$")
    """Name of the stage, and of its directory."""
    temperature: Annotated[
        float | tuple[float, ...], BeforeValidator(_one_or_more_temperatures)
    ] = 0.0
    """Temperature of the responses, 0 to 2; 0 for the likeliest token each time. Of a list such as
    [0, 1] a temperature is drawn for each response."""
    max_responses: int | None = Field(default=None, ge=1)
    """Most responses, to conversations spread evenly over the data; null for one to each."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of a response; null for as many as data.max_length leaves."""
    seed: int = Field(default=0, ge=0)
    """Seed of the tokens that are drawn at a temperature above 0."""
    max_num_seqs: int = Field(default=32, ge=1, le=4096)
    """Responses that a worker writes at once."""
    shard_size: int = Field(default=512, ge=1)
    """Responses that are stored together; a resumed run writes only the missing shards."""

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Temperatures that a response's is drawn from, ascending."""
        given = self.temperature
        return given if isinstance(given, tuple) else (given,)


TrainedStage = ArStage | MarsStage
Stage = Annotated[ArStage | MarsStage | GenerateStage, Field(discriminator="objective")]


def _number_or_range(value: Any) -> Any:
    numbers = value if isinstance(value, list | tuple) and len(value) == 2 else [value]
    if not all(type(number) is int and number >= 1 for number in numbers):
        raise ValueError("give a number from 1, or a range [least, most] of such numbers")
    return value


def _no_for_false(value: object) -> object:
    """Return "no" for False, as which YAML reads a bare no."""
    return "no" if value is False else value


class Scaling(Settings):
    """Number, resources and placement of the workers."""

    num_workers: Annotated[int | tuple[int, int], BeforeValidator(_number_or_range)] = 1
    """Data-parallel workers; with a range [least, most] the run follows the cluster's size."""
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """ddp keeps the whole model on every worker; fsdp2 shards weights, gradients and optimizer."""
    use_gpu: bool = False
    """Whether each worker uses one GPU; otherwise workers use the CPU."""
    cpus_per_worker: float = Field(default=1, gt=0)
    """CPUs that Ray reserves for each worker."""
    resources_per_worker: dict[str, float] = Field(default_factory=dict)
    """Further Ray resources of each worker, such as memory in bytes or custom ones."""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's strategy for placing workers on nodes."""
    threads_per_worker: int | None = Field(default=None, ge=1)
    """Threads of each worker's CPU kernels; by default an even share of the machine's cores."""
    max_failures: int = Field(default=3, ge=-1)
    """Number of failures after which the run gives up replacing lost workers; -1 for no limit.
    Nodes that are taken away with notice do not count."""

    @property
    def least_workers(self) -> int:
        """Fewest workers that the run needs."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def most_workers(self) -> int:
        """Most workers that the run uses."""
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
    """Checkpoints from which a run can be resumed."""

    every_steps: int = Field(default=100, ge=1)
    """Optimizer steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """Number of a stage's newest checkpoints that are kept."""
    storage: str | None = None
    """Directory or fsspec URL (s3://...) that every node can reach; by default output/checkpoints.
    With a URL, workers also get data and start weights through it."""


class EvaluationSettings(Settings):
    """Scoring of the model on a held-out set during training."""

    data: list[str] = Field(min_length=1)
    """Local files of conversations, as in data.train; a row with an ``answer`` can be checked."""
    every_steps: int = Field(default=100, ge=1)
    """Optimizer steps between scorings; each stage is also scored at its start and end."""
    max_items: int = Field(default=200, ge=1)
    """Most conversations, taken from the beginning of the files."""
    max_tokens: int = Field(default=256, ge=1)
    """Most output tokens of a conversation."""
    thresholds: tuple[Annotated[float, Field(gt=0, le=1)], ...] = (1.0, 0.95, 0.7)
    """Confidence thresholds to decode with; 1, plain AR decoding, is always added."""
    max_accuracy_drop: float = Field(default=0.02, ge=0, le=1)
    """Drop of one-token accuracy since the stage's start, as a share of checkable answers, above
    which a warning is given."""
    max_loss_rise: float = Field(default=0.05, ge=0)
    """Rise of the AR loss since the stage's start, in nats per token, above which a warning is
    given."""

    @field_validator("data")
    @classmethod
    def _is_local(cls, data: list[str]) -> list[str]:
        if any(is_remote(source) for source in data):
            raise ValueError("give local files; remote ones are read for training only")
        return data


class TrackingSettings(Settings):
    """Experiment trackers that get the losses and scores of a run."""

    to: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(min_length=1)
    """Trackers, each of which has to be installed; tensorboard's files are in output/tracking."""
    project: str = Field(default="marsray", min_length=1)
    """Project at wandb and trackio, experiment at mlflow."""
    run: str | None = Field(default=None, min_length=1)
    """Name of the run; by default that of the output directory."""
    tags: tuple[str, ...] = ()
    """Tags of the run at wandb and mlflow."""


_MAY_CHANGE: dict[str, Any] = {
    "output": True,
    "cluster": True,
    "scaling": True,
    "checkpoints": True,
    "max_nonfinite_steps": True,
    "tracking": True,
}
"""Settings that do not change the trained model."""


class Recipe(Settings):
    """All settings of a training run."""

    model: ModelSource
    data: DataSettings
    stages: list[Stage] = Field(min_length=1)
    output: Path
    """Directory for the run's results. An unfinished run of the same recipe in it is resumed."""
    evaluation: EvaluationSettings | None = None
    """Scoring on a held-out set; null for none."""
    tracking: TrackingSettings | None = None
    """Experiment trackers; null for none."""
    checkpoints: CheckpointSettings = CheckpointSettings()
    scaling: Scaling = Scaling()
    cluster: ClusterSettings = ClusterSettings()
    precision: Annotated[Literal["no", "bf16"], BeforeValidator(_no_for_false)] = "bf16"
    """Mixed precision: bf16, or no for float32 only."""
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    """Attention: flex skips masked blocks, sdpa takes a dense mask, auto is flex on a GPU."""
    gradient_checkpointing: bool = False
    """Whether to recompute activations in the backward pass: less memory, a third more time."""
    compile: bool = False
    """Whether to compile the decoder with torch.compile."""
    max_nonfinite_steps: int = Field(default=10, ge=0)
    """Most steps of a stage that are skipped for a non-finite loss or gradient; with more the run
    fails."""
    seed: int = Field(default=0, ge=0)
    """Seed of initial weights, data order, block sizes and block borders."""

    @property
    def trained_stages(self) -> list[TrainedStage]:
        """The stages that train the model."""
        return [stage for stage in self.stages if not isinstance(stage, GenerateStage)]

    @property
    def begins_with_head(self) -> bool:
        """Whether masks are trained by nothing before the first head that is trained alone."""
        of_masks = [stage for stage in self.stages if isinstance(stage, MarsStage)]
        return bool(of_masks) and of_masks[0].train == "head"

    def differences(self, other: Recipe) -> list[str]:
        """Return the top-level settings that would make another recipe train another model."""
        ours, theirs = (item.model_dump(mode="json", exclude=_MAY_CHANGE) for item in (self, other))
        return [key for key in ours if ours[key] != theirs[key]]

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages: names must differ, got {names}")
        for index, stage in enumerate(self.stages):
            if isinstance(stage, GenerateStage):
                continue
            if stage.batch_size < self.scaling.most_workers:
                raise ValueError(
                    f"stages.{index}.batch_size: {stage.batch_size} conversations cannot be shared "
                    f"by scaling.num_workers = {self.scaling.most_workers}; make it larger"
                )
            if isinstance(stage, MarsStage) and stage.block_sizes[-1] > self.data.max_length:
                raise ValueError(
                    f"stages.{index}.block_size: {stage.block_sizes[-1]} exceeds data.max_length = "
                    f"{self.data.max_length}; make it smaller"
                )
        return self

    @model_validator(mode="after")
    def _head_has_its_masks(self) -> Recipe:
        if self.begins_with_head and self.model.base is None:
            raise ValueError(
                "stages: a new model has no masks beside which a head could be trained alone; put "
                "a stage of objective mars with train: all first"
            )
        alone = [s for s in self.stages if isinstance(s, MarsStage) and s.train == "head"]
        if alone and self.compile:
            raise ValueError("compile: a head alone is trained without it; leave it out")
        return self

    @model_validator(mode="after")
    def _adapter_has_its_model(self) -> Recipe:
        for index, stage in enumerate(self.stages):
            if isinstance(stage, GenerateStage):
                continue
            draft = stage.adapter if isinstance(stage, MarsStage) else None
            if draft is None and stage.lora is None:
                continue
            key = f"stages.{index}.{'lora' if draft is None else 'adapter'}"
            is_whole = stage.lora is not None and stage.lora.merge
            if index + 1 < len(self.stages) and not is_whole:
                raise ValueError(
                    f"{key}: the next stage would train the model that the adapter belongs to; "
                    f"make it the last stage{', or set merge' if stage.lora else ''}"
                )
            if self.model.scratch is not None and index == 0:
                raise ValueError(
                    f"{key}: a new model has learned nothing that an adapter could start from; put "
                    "a stage of objective ar before it, or give a trained model as model.base"
                )
            if self.compile:
                raise ValueError("compile: layers with an adapter are not compiled; leave it out")
            self._check_quantization(f"{key}.quantization", stage)
        return self

    def _check_quantization(self, key: str, stage: TrainedStage) -> None:
        if stage.lora is None or stage.lora.quantization is None:
            return
        if not self.scaling.use_gpu:
            raise ValueError(
                f"{key}: weights of 4 bits are trained beside on GPUs only; set scaling.use_gpu, "
                "or leave it out"
            )
        if self.scaling.strategy != "ddp":
            raise ValueError(
                f"{key}: fsdp2 does not shard weights of 4 bits; set scaling.strategy to ddp, or "
                "leave it out"
            )

    @model_validator(mode="after")
    def _responses_are_written_before(self) -> Recipe:
        writers = {s.name: i for i, s in enumerate(self.stages) if isinstance(s, GenerateStage)}
        taken = set[str]()
        for index, stage in enumerate(self.stages):
            name = stage.responses if isinstance(stage, MarsStage) else None
            if name is None:
                continue
            if name not in writers:
                raise ValueError(
                    f"stages.{index}.responses: no stage of objective generate has the name "
                    f"{name!r}; add one before this stage"
                )
            if writers[name] > index:
                raise ValueError(
                    f"stages.{index}.responses: stage {name} comes later; move it before this one"
                )
            taken.add(name)
        for name in [name for name in writers if name not in taken]:
            raise ValueError(
                f"stages.{writers[name]}: no later stage has responses: {name}; name it in a stage "
                "of objective mars, or leave it out"
            )
        if isinstance(self.stages[0], GenerateStage) and self.model.scratch is not None:
            raise ValueError(
                "stages.0: a new model has learned nothing that it could respond with; put a stage "
                "of objective ar before this one"
            )
        return self

    @model_validator(mode="after")
    def _new_model_holds_the_data(self) -> Recipe:
        config = {} if self.model.scratch is None else self.model.scratch.config
        context = config.get("max_position_embeddings")
        if isinstance(context, int):
            self.data.check_context(context)
        return self

    @model_validator(mode="after")
    def _attention_has_its_device(self) -> Recipe:
        if self.attention == "flex" and not self.scaling.use_gpu:
            raise ValueError(
                "attention: flex trains on GPUs only; use sdpa or auto, or set scaling.use_gpu"
            )
        return self
