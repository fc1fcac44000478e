"""Lists the ways of training that the varied bed compares.

Every variant continues from the seed's AR checkpoint with the recipe's stage mars, with the fields
that are given here changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

BASELINE = "baseline"
"""Name of the variant with which the others are compared: today's recipe."""
SOFT: dict[str, Any] = {"distillation": {"weight": 1.0, "target": "soft"}}
"""Distillation from the clean stream alone, without labels."""

BLOCKS: dict[str, Any] = {"block_size": [2, 4, 8]}
"""Block sizes of which one is drawn for each conversation."""
ON_POLICY: dict[str, Any] = {"on_policy": {"share": 0.3}}
"""Learning from the model's own drafts in the last steps."""
ADAPTER: dict[str, Any] = {"adapter": {"rank": 32}, "learning_rate": 4e-3}
"""An adapter that acts at masks, by default trained with `SOFT`."""
FAST_ADAPTER: dict[str, Any] = {**ADAPTER, "learning_rate": 8e-3}
"""The same at a higher rate, which pays with two and three times the steps."""

Responses = Literal["greedy", "sampled", "mixed"]
"""Ways in which the AR checkpoint writes responses: at temperature 0, at 1, or half at each."""

Convention = Literal["end-filling", "per-conversation"]
"""Ways in which the paper's code differs; see `bench/training/published.py`."""


@dataclass(frozen=True)
class Variant:
    """A way of training."""

    name: str
    stage: dict[str, Any] = field(default_factory=dict)
    """Fields of the stage that differ from the recipe's."""
    responses: Responses | None = None
    """How the AR checkpoint writes the responses to train on; None for those of the data."""
    convention: Convention | None = None
    """Convention of the paper's code to train with; None for the project's own."""
    steps: float = 1.0
    """Number of steps as a multiple of the baseline's."""


VARIANTS = [
    Variant(BASELINE),
    Variant("twice-the-steps", steps=2.0),
    Variant("soft-.5", {"distillation": {"weight": 0.5, "target": "soft"}}),
    Variant("soft-1", SOFT),
    Variant("argmax-.5", {"distillation": {"weight": 0.5, "target": "argmax"}}),
    Variant("argmax-1", {"distillation": {"weight": 1.0, "target": "argmax"}}),
    Variant("decay-.8", {"depth_decay": 0.8}),
    Variant("blocks-2-4-8", BLOCKS),
    Variant("on-policy-.3", ON_POLICY),
    Variant("greedy", responses="greedy"),
    Variant("sampled", responses="sampled"),
    Variant("mixed", responses="mixed"),
    Variant("end-filling", convention="end-filling"),
    Variant("per-conversation", convention="per-conversation"),
    Variant("soft-1-decay-.8", {**SOFT, "depth_decay": 0.8}),
    Variant("soft-1-greedy", SOFT, responses="greedy"),
    Variant("soft-1-sampled", SOFT, responses="sampled"),
    Variant("soft-1-decay-.8-greedy", {**SOFT, "depth_decay": 0.8}, responses="greedy"),
    Variant("soft-1-decay-.8-sampled", {**SOFT, "depth_decay": 0.8}, responses="sampled"),
    Variant("soft-1-greedy-on-policy-.3", {**SOFT, **ON_POLICY}, responses="greedy"),
    Variant("mixed-blocks-2-4-8", BLOCKS, responses="mixed"),
    Variant("mixed-blocks-2-4-8-on-policy-.3", {**BLOCKS, **ON_POLICY}, responses="mixed"),
    Variant("adapter", ADAPTER),
    Variant("adapter-argmax", {**ADAPTER, "distillation": {"weight": 1.0, "target": "argmax"}}),
    Variant("adapter-greedy", ADAPTER, responses="greedy"),
    Variant("adapter-blocks-2-4-8", {**ADAPTER, **BLOCKS}),
    Variant("adapter-blocks-2-4-8-greedy", {**ADAPTER, **BLOCKS}, responses="greedy"),
    Variant("adapter-blocks-2-4-8-mixed", {**ADAPTER, **BLOCKS}, responses="mixed"),
    Variant("adapter-twice-greedy", {**FAST_ADAPTER, **BLOCKS}, responses="greedy", steps=2.0),
    Variant("adapter-twice-mixed", {**FAST_ADAPTER, **BLOCKS}, responses="mixed", steps=2.0),
    Variant("adapter-thrice-mixed", {**FAST_ADAPTER, **BLOCKS}, responses="mixed", steps=3.0),
]
