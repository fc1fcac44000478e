"""The history of a stage, part of every checkpoint: one record per step, and held-out scores.

Imports no Ray or torch.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, TypeAdapter

HISTORY_FILE = "history.json"

Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A float; in a file, null stands for NaN and the infinities."""


@dataclass(frozen=True)
class StepRecord:
    """Record of one optimizer step; losses are nats per supervised label over all workers."""

    loss: Number
    clean_loss: Number
    noisy_loss: Number
    learning_rate: float
    gradient_norm: Number
    num_tokens: int
    """Tokens of the step's conversations, without padding and noisy copies."""
    skipped: bool
    """Whether the step changed nothing because loss or gradient was not finite."""


@dataclass(frozen=True)
class ThresholdScore:
    """Result of decoding the held-out set at one threshold."""

    threshold: float
    accuracy: float | None
    """Share of checkable answers that are correct; None if no answer is checkable."""
    tokens_per_forward: float
    """Mean tokens per forward pass."""


@dataclass(frozen=True)
class HeldOutScore:
    """Scores of the held-out set after ``step`` optimizer steps."""

    step: int
    loss_by_depth: list[Number]
    """Mean loss in nats by the number of masks that the prediction sees; entry 0 is the AR loss."""
    thresholds: list[ThresholdScore]
    """Results of decoding; the first is plain AR decoding."""

    @property
    def one_token(self) -> ThresholdScore:
        """The result of plain AR decoding."""
        return next(score for score in self.thresholds if score.threshold >= 1.0)

    def metrics(self) -> dict[str, float]:
        """Return the scores as flat metrics."""
        found = {f"eval/loss_depth_{i}": loss for i, loss in enumerate(self.loss_by_depth)}
        for score in self.thresholds:
            found[f"eval/tokens_per_forward_{score.threshold:g}"] = score.tokens_per_forward
            if score.accuracy is not None:
                found[f"eval/accuracy_{score.threshold:g}"] = score.accuracy
        return found


@dataclass
class TrainingHistory:
    """Steps and scores of a stage, oldest first."""

    steps: list[StepRecord] = field(default_factory=list)
    scores: list[HeldOutScore] = field(default_factory=list)

    @property
    def num_skipped(self) -> int:
        """Number of steps that were skipped."""
        return sum(step.skipped for step in self.steps)

    def write(self, path: Path) -> None:
        """Write the history as JSON; floats are exact, and infinities and NaN become null."""
        path.write_bytes(_FILE.dump_json(self) + b"\n")


_FILE = TypeAdapter(TrainingHistory)


def read_history(path: Path) -> TrainingHistory:
    """Read a file that `TrainingHistory.write` wrote."""
    return _FILE.validate_json(path.read_bytes())
