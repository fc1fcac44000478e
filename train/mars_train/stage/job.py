"""What a stage's workers are handed, and how they speak to whoever started them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from mars_train.recipe import MarsStage, Recipe, Stage
from mars_train.stage.held_out import HeldOutSet
from mars_train.stage.progress import Progress


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
