"""The interface between a model that requests can name and the replicas that run it.

Imports no Ray or HTTP library.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import Metric

from mars_autoscale.audit.drift import Drift
from mars_autoscale.policy.decision import AutoscalerDecision, ThresholdRange
from mars_autoscale.policy.outer_loop import AutoscalingBasis
from mars_autoscale.policy.reports import ReplicaReport
from mars_platform.checkpoint.metadata import locate_model
from mars_platform.checkpoint.number_type import stored_dtype
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode, default_mode
from mars_serve.config.loras import LoraChanges, LoraNames
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import LoraReference, Request
from mars_serve.engine.settings import CPU_PAGES

if TYPE_CHECKING:  # importing torch takes seconds, and a replica's process does not need it
    from mars_platform.checkpoint.directory import Checkpoint
    from mars_platform.data.prompt_encoding import PromptEncoder
    from mars_platform.data.thinking import ThinkingTokens

_SWITCHES = {"enable_thinking", "thinking", "reasoning_effort"}


@dataclass(frozen=True)
class PublishedThreshold:
    """A live τ, or a range for it, that the governor has published to a model's replicas."""

    version: int
    """Number that grows with every change that a replica gets to know."""
    threshold: float
    """τ in (0, 1] for requests that name none; if ``range`` is given, the replicas' mean τ."""
    range: ThresholdRange | None = None
    """Limits within which each replica sets its own τ; None if all use ``threshold``."""
    is_pinned: bool = False
    """Whether τ was set by hand; the autoscaler then leaves it alone."""
    governor: str = ""
    """Random id of the governor that published it; empty for one that a replica starts with."""


@dataclass(frozen=True)
class Explanation:
    """The autoscaler's latest decisions for a model, and what they are based on."""

    basis: AutoscalingBasis | None
    """Capacity and settings of the model; None until a replica has reported them."""
    records: list[AutoscalerDecision]
    """Latest decisions, the oldest first."""
    drift: Drift = field(default_factory=Drift)
    """Audits of what was served, and what they say about the frontier."""


@dataclass(frozen=True)
class Picture:
    """Additions to a model's picture, which dashboards show."""

    last_s: int
    """Time of its latest second in seconds since 1970, from which to ask on; 0 before the first."""
    text: str
    """The JSON object that dashboards get; see `mars_serve.control.dashboard`."""


class Backend(Protocol):
    """The replicas of one model."""

    async def complete(self, request: Request) -> list[StepOutput]:
        """Run a request to its end."""

    def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        """Run a request and yield one item per forward pass; closing the generator cancels it."""

    async def replicas(self) -> list[ReplicaReport]:
        """Return the state of every replica that can serve."""

    async def live_threshold(self) -> PublishedThreshold:
        """Return the latest live τ, whether or not every replica has applied it yet."""

    async def set_live_threshold(self, threshold: float | None) -> PublishedThreshold:
        """Set τ by hand for all requests that name none, including those that run now.

        ``threshold`` is in (0, 1]; None gives τ back to the autoscaler.
        """

    async def autoscaler(self) -> Explanation | None:
        """Return the autoscaler's latest decisions; None if the model is not autoscaled."""

    async def trust_frontier(self) -> None:
        """Forget what audits have said about the frontier; do nothing without an autoscaler."""

    async def metrics(self) -> list[Metric]:
        """Return the metrics of every replica and of the autoscaler."""

    async def picture(self, since_s: int | None) -> Picture:
        """Return what was added to the dashboard's picture since a time; all of it if None."""

    async def loras(self, known: LoraChanges) -> LoraChanges:
        """Return the latest changes of the model's LoRA adapters: ``known``, if it is newer."""


def with_dtype(settings: ModelSettings) -> ModelSettings:
    """Return settings in which ``dtype: auto`` has become the checkpoint's own number type.

    Raises:
        UserError: the checkpoint does not say its type, or has one that cannot be served.
    """
    if settings.dtype != "auto":
        return settings
    return settings.model_copy(update={"dtype": stored_dtype(locate_model(settings.path))})


def read_served(settings: ModelSettings) -> Checkpoint:
    """Read the checkpoint of a model, the same in each process of its deployment.

    Raises:
        UserError: a file cannot be used, or a path is a link, which may have led others elsewhere.
    """
    from mars_platform.checkpoint.directory import read_checkpoint

    for path in filter(None, (settings.path, settings.adapter)):
        if Path(path).is_symlink():
            raise UserError(
                f"models: {settings.name}: {path} is a link that was missing where the model "
                "was deployed, so that replicas could follow it to different models; mount it "
                f"there, too, or name its target, which is {os.path.realpath(path)} now"
            )
    if not settings.adapter and not settings.loras:
        return read_checkpoint(settings.path)
    from mars_platform.checkpoint.adapted import read_model, with_lora_masks  # it imports torch

    checkpoint = read_model(settings.path, settings.adapter)
    return with_lora_masks(checkpoint, [lora.path for lora in settings.loras])


@dataclass(frozen=True)
class ServedModel:
    """A model that requests can name."""

    settings: ModelSettings
    checkpoint: Checkpoint
    backend: Backend
    created: int
    """Unix time in seconds at which the model was loaded into this server."""
    loras: LoraNames = field(default_factory=LoraNames, compare=False)
    """LoRA adapters of the model."""
    lora: LoraReference | None = None
    """LoRA adapter that acts on the model; None for the model itself."""
    masked: Checkpoint | None = field(init=False, compare=False, default=None)
    """The checkpoint with the mask of LoRA adapters, where they alone have one."""
    prompts: PromptEncoder = field(init=False, compare=False)
    """Encoder of prompts; making it takes a tenth of a second for 250 control tokens."""
    thinking: ThinkingTokens | None = field(init=False, compare=False)
    """Tokens between which the model thinks; None if thinking is not told from answers."""

    def __post_init__(self) -> None:
        """Make the encoder of the checkpoint's prompts, and find its thinking tokens.

        Raises:
            UserError: the settings name a reasoning parser that does not fit the checkpoint.
        """
        from mars_platform.data.prompt_encoding import PromptEncoder

        if self.checkpoint.masks_are_loras:
            plain = replace(self.checkpoint, metadata=None, masks_are_loras=False)
            object.__setattr__(self, "masked", self.checkpoint)
            object.__setattr__(self, "checkpoint", plain)
        thinking, special = find_thinking(self.settings, self.checkpoint), self.checkpoint.special
        ids = special.eos | special.never_emitted
        if thinking is not None:  # no text from clients may begin or end the thinking
            ids |= {thinking.begin, thinking.end}
        object.__setattr__(self, "thinking", thinking)
        object.__setattr__(self, "prompts", PromptEncoder(self.checkpoint.tokenizer, ids))

    @property
    def name(self) -> str:
        """Name that requests give as ``model``."""
        return self.lora.name if self.lora else self.settings.name

    def with_lora(self, lora: LoraReference) -> ServedModel:
        """Return the model with one of its LoRA adapters; all else is the model's."""
        adapted = copy(self)
        object.__setattr__(adapted, "lora", lora)
        if self.masked is not None and lora.has_masks:
            object.__setattr__(adapted, "checkpoint", self.masked)
        return adapted

    def read_lora(self, name: str, path: Path) -> LoraReference:
        """Return a reference to a LoRA adapter that fits the model."""
        from mars_serve.engine.lora_cache import read_weights

        checkpoint = self.masked or self.checkpoint
        return read_weights(name, path, checkpoint, self.settings.engine)[0]

    @cached_property
    def switches(self) -> frozenset[str]:
        """Variables of the chat template that turn thinking on and off, or say how much of it."""
        from mars_platform.data.template_messages import variables_of

        return variables_of(self.checkpoint.tokenizer) & _SWITCHES

    @property
    def root(self) -> str:
        """Hub id of the model; its name if it is a directory, whose path clients are not told."""
        path = self.settings.path
        return self.name if self.checkpoint.path == Path(path) else path.partition("@")[0]

    @property
    def adapter_name(self) -> str | None:
        """Name of the adapter's directory, without its path; None for a whole model."""
        return None if self.settings.adapter is None else Path(self.settings.adapter).name

    @property
    def default_mode(self) -> Mode:
        """Mode of requests that name neither a mode nor a τ."""
        if self.checkpoint.metadata is None:
            return Mode.AR
        usual = default_mode(has_masks=True, has_threshold=self.settings.names_threshold)
        return self.settings.mode or usual

    @property
    def max_length(self) -> int:
        """Highest number of tokens in a request, prompt and output together."""
        sizes = self.settings.engine
        if sizes.num_pages is None and self.settings.num_gpus:
            return self.checkpoint.max_length  # a replica uses as many pages as its GPU holds
        page_size = sizes.page_size_on("cuda" if self.settings.num_gpus else "cpu")
        return min(self.checkpoint.max_length, (sizes.num_pages or CPU_PAGES) * page_size)


def find_thinking(settings: ModelSettings, checkpoint: Checkpoint) -> ThinkingTokens | None:
    """Return the tokens between which a model thinks; None if thinking is not told from answers.

    Raises:
        UserError: the settings name a reasoning parser that does not fit the checkpoint.
    """
    from mars_platform.data.thinking import find_thinking_tokens

    choice, tokenizer = settings.reasoning_parser, checkpoint.tokenizer
    if choice == "none":
        return None
    found = find_thinking_tokens(tokenizer, mentioned_only=choice == "auto")
    if found is None and choice == "think":
        raise UserError(
            "reasoning_parser: 'think' needs <think> and </think> as tokens, which "
            f"{checkpoint.path} has not; use 'auto' or 'none'"
        )
    return found
