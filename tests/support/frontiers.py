"""Builds frontiers with made-up figures."""

from __future__ import annotations

from typing import Any

from mars_autoscale.model.frontier import Frontier
from mars_platform.config import build_settings

Corners = tuple[tuple[float, float], tuple[float, float]]
NUM_ITEMS = 500
PLAIN_QUALITY = 80.0
"""Quality of mode ar, with which the losses of points are made up."""


def point(
    mode: str,
    threshold: float,
    quality: float,
    tokens: float,
    positions: float,
    half: float = 2.0,
    plain_quality: float = PLAIN_QUALITY,
) -> dict[str, Any]:
    """Return a point whose intervals are ``half`` percentage points to either side."""
    loss = plain_quality - quality
    lost = {"loss": {"value": loss, "low": loss - half, "high": loss + half}}
    return {
        "mode": mode,
        "threshold": threshold,
        "quality": quality,
        "quality_low": quality - half,
        "quality_high": quality + half,
        **({} if mode == "ar" else lost),
        "windows": (
            {
                "num_masks": 0 if mode == "ar" else 3,
                "tokens_per_forward": tokens,
                "positions_per_row": positions,
            },
        ),
    }


AR = point("ar", 1.0, PLAIN_QUALITY, 1.0, 1.0)


def right_of(quality: float, num_items: int) -> str:
    """Return which items were right, the first ones, at a quality in percent."""
    num_right = round(quality / 100 * num_items)
    return "1" * num_right + "0" * (num_items - num_right)


def frontier_of(
    *points: dict[str, Any],
    weights: str,
    seconds: float | Corners,
    window: int = 4,
    prefill_tokens_per_s: float = 10_000.0,
    measure: str = "accuracy",
    num_items: int = NUM_ITEMS,
    **more: Any,
) -> Frontier:
    """Build a frontier.

    Args:
        points: Points from `point`.
        weights: Fingerprint of the weights.
        seconds: Step times at the corners of (0, 100) positions and (0, 1000) cached tokens, or
            one time for all.
        window: Masks of a row per step.
        prefill_tokens_per_s: Prompt tokens per second.
        measure: What quality is.
        num_items: Number of items.
        more: Other fields of the frontier.
    """
    corners = seconds if isinstance(seconds, tuple) else ((seconds, seconds), (seconds, seconds))
    if measure == "accuracy":
        points = tuple({"right": right_of(one["quality"], num_items), **one} for one in points)
    content = {
        "weights": weights,
        "hardware": "one H200",
        "dtype": "bfloat16",
        "measure": measure,
        "num_items": num_items,
        "window": window,
        "step_seconds": {"positions": (0, 100), "stored": (0, 1000), "seconds": corners},
        "prefill_tokens_per_s": prefill_tokens_per_s,
        "points": points,
        **more,
    }
    return build_settings(content, Frontier, source="test")
