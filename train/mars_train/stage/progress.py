"""News of a stage for the terminal of the user who started it. Imports no Ray or torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """The progress of a stage."""

    stage: str
    step: int
    """Optimizer steps done."""
    total_steps: int
    """Optimizer steps of the stage."""
    loss: float
    """Loss of the last step, in nats per supervised label."""
    tokens_per_s: float
    """Tokens of the conversations trained on per second, since the stage began or was resumed."""


@dataclass(frozen=True)
class TerminalMessage:
    """A message to the user."""

    text: str
    warning: bool
    """Whether it is shown as a warning."""
