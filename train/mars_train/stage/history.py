"""The history of a stage, part of every checkpoint: one record per step, and held-out scores.

Imports no Ray or torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HISTORY_FILE = "history.json"


@dataclass(frozen=True)
class StepRecord:
    """Record of one optimizer step; losses are nats per supervised label over all workers."""

    loss: float
    clean_loss: float
    noisy_loss: float
    learning_rate: float
    gradient_norm: float
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
    loss_by_depth: list[float]
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
class History:
    """Steps and scores of a stage, oldest first."""

    steps: list[StepRecord] = field(default_factory=list)
    scores: list[HeldOutScore] = field(default_factory=list)

    @property
    def num_skipped(self) -> int:
        """Number of steps that were skipped."""
        return sum(step.skipped for step in self.steps)

    def write(self, path: Path) -> None:
        """Write the history as JSON; floats are exact, and infinities and NaN become null."""
        steps = [{k: _plain(v) for k, v in asdict(step).items()} for step in self.steps]
        content = {"steps": steps, "scores": [asdict(score) for score in self.scores]}
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_history(path: Path) -> History:
    """Read a file that `History.write` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    steps = [StepRecord(**{k: _number(v) for k, v in step.items()}) for step in content["steps"]]
    scores = [
        HeldOutScore(
            score["step"],
            score["loss_by_depth"],
            [ThresholdScore(**item) for item in score["thresholds"]],
        )
        for score in content["scores"]
    ]
    return History(steps, scores)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> Any:
    return math.nan if value is None else value
