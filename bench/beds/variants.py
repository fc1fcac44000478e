"""Lists the ways of training that the varied bed compares.

Every variant continues from the seed's AR checkpoint with the recipe's stage mars, with the fields
that are given here changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

BASELINE = "baseline"
"""Name of the variant with which the others are compared: today's recipe."""


@dataclass(frozen=True)
class Variant:
    """A way of training."""

    name: str
    stage: dict[str, Any] = field(default_factory=dict)
    """Fields of the stage that differ from the recipe's."""
    responses: Literal["greedy", "sampled"] | None = None
    """How the AR checkpoint writes the responses to train on; None for those of the data."""
    steps: float = 1.0
    """Number of steps as a multiple of the baseline's."""


VARIANTS = [
    Variant(BASELINE),
    Variant("twice-the-steps", steps=2.0),
]
