"""The interface between a stage's trainer and its host: the job, notices and reports."""

from dataclasses import dataclass
from typing import Any, Protocol

from mars_platform.checkpoint.adapter.settings import AdapterSettings
from mars_platform.checkpoint.metadata import DraftHeadSettings
from mars_train.recipe import MarsStage, Recipe, TrainedStage
from mars_train.stage.held_out import HeldOutSet
from mars_train.stage.progress import Progress


@dataclass(frozen=True)
class StageJob:
    """Everything that a worker needs to know about its stage."""

    recipe: Recipe
    stage: TrainedStage
    storage: str
    """Directory or fsspec URL of the stage's checkpoints."""
    start: str
    """Checkpoint that the stage begins with: a local directory, or a URL for `fetch_shared`."""
    data: str
    """Token store: a local directory, or a URL for `fetch_shared`."""
    held_out: HeldOutSet | None
    """Conversations to score the model on; None for no scoring."""
    provenance: dict[str, Any]
    """Facts about the run for the trained checkpoint's metadata."""
    responses: str | None = None
    """Token store of responses that the model wrote, which take the noisy loss: a local directory,
    or a URL for `fetch_shared`. None if the training data takes it."""
    known_as: str | None = None
    """Directory or hub id by which users know the start, if it is another."""

    @property
    def base(self) -> str:
        """Name of the model that the stage begins with, for users."""
        return self.known_as or self.start

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Block sizes, ascending; empty for plain AR training."""
        return self.stage.block_sizes if isinstance(self.stage, MarsStage) else ()

    @property
    def block_size(self) -> int | None:
        """B of the trained model, or None for plain AR training."""
        return max(self.block_sizes, default=None)

    @property
    def adapter(self) -> AdapterSettings | None:
        """Settings of the draft adapter that is trained; None if there is none."""
        return self.stage.adapter if isinstance(self.stage, MarsStage) else None

    @property
    def draft_head(self) -> DraftHeadSettings | None:
        """Settings of the draft head that is trained; None if there is none."""
        found = self.stage.draft_head if isinstance(self.stage, MarsStage) else None
        return found and DraftHeadSettings(rank=found.rank, kind=found.kind)

    @property
    def is_model_fixed(self) -> bool:
        """Whether all that is trained acts at masks, beside the model."""
        stage = self.stage
        return isinstance(stage, MarsStage) and (stage.adapter is not None or stage.train == "head")

    @property
    def ar_weight(self) -> float:
        """Weight of the clean stream's loss; it is the whole loss in plain AR training."""
        return self.stage.ar_weight if isinstance(self.stage, MarsStage) else 1.0


@dataclass(frozen=True)
class Notice:
    """A request to the run, checked between two steps."""

    save: bool = False
    """Save a checkpoint now: a node is about to be taken away."""
    stop: bool = False
    """Save a checkpoint and end."""


class HostConnection(Protocol):
    """A worker's connection to its host; the first three methods act on rank 0 only."""

    def progress(self, progress: Progress) -> None:
        """Show the stage's progress."""

    def say(self, text: str, *, warning: bool = False) -> None:
        """Show a message to the user."""

    def notice_due(self) -> bool:
        """Return whether this worker wants all workers to check for a notice after this step."""

    def notice(self) -> Notice:
        """Return the current notice; all workers call this together and get the same one."""

    def report(self, metrics: dict[str, Any]) -> None:
        """Report metrics; all workers call this together."""
