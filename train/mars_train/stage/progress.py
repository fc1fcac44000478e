"""News of a stage for the terminal of the user who started it. Imports no Ray or torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Progress:
    """The progress of a stage."""

    stage: str
    step: int
    total_steps: int
    loss: float
    """Loss of the last step, in nats per supervised label."""
    tokens_per_s: float
    """Tokens of the conversations trained on per second, since the stage began or was resumed."""
    learning_rate: float
    gradient_norm: float
    """Norm of the gradient before it was clipped."""

    @property
    def figures(self) -> Figures:
        """The step's figures for trackers."""
        names = ("loss", "learning_rate", "gradient_norm", "tokens_per_s")
        return Figures(self.step, {name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class Figures:
    """Figures of a step for trackers, by name."""

    step: int
    values: dict[str, float]


@dataclass(frozen=True)
class TerminalMessage:
    """A message to the user."""

    text: str
    warning: bool
    """Whether it is shown as a warning."""


@dataclass(frozen=True)
class StageResult:
    """The way in which a stage ended."""

    status: Literal["finished", "stopped", "refused"]
    step: int = 0
    """Optimizer steps done; meaningless after a refusal."""
    reason: str = ""
    """Error message for the user after a refusal; else empty."""
